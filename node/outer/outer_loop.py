"""Outer loop: one outer step after another; each commits whole or leaves everything as it was.

The replica has the method's rule: what a peer contributes, and what a commit changes. The schedule decides when
training waits for a round, and what the model does when it commits. `OuterLoop` runs one round with both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounds.data_planes.contributions import ContributionSummary
from thinwire.collectives.state_sync.state_sync import FetchedState
from thinwire.collectives.timing import GIVE_UP
from thinwire.compression.device import HOST
from thinwire.node.outer.round_loop import Meanwhile, ReplicaLoop
from thinwire.node.outer.round_session import RoundSession
from thinwire.node.outer.verification.trials import Score
from thinwire.node.runtime.asyncio_extra import Work, uninterrupted
from thinwire.node.state.replica import Replica
from thinwire.node.state.replica_buffers import ParameterWrite, Read
from thinwire.swarm.lineage import descends, lineage_of
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import Commit, PeerId

Average = Callable[[float | None], Coroutine[Any, Any, Outcome]]
"""Announces a contribution and waits for the round, at most that number of seconds (None: no limit)."""


class Schedule:
    """Barrier schedule of DiLoCo: training waits, and the model starts from the outer parameters.

    Base of all schedules, which change single decisions.
    """

    follows = False
    """True if the loop follows rounds of other peers between two calls of `sync`."""

    merges = True
    """True if contributions are measured from the outer parameters.

    Then a model of another lineage can be contributed.
    """

    loop: OuterLoop

    def attach(self, loop: OuterLoop) -> None:
        """Become the schedule of `loop`, whose session and replica exist."""
        self.loop = loop

    async def sync(self, weight: int, loss: float, speed: float, meanwhile: Meanwhile | None) -> Outcome:
        """Run the rounds that one call of `OuterLoop.sync` takes."""
        return await self.loop.round(weight, loss, speed)

    async def average(self, average: Average) -> Outcome:
        """Wait for the announced round, or train meanwhile."""
        return await average(self.loop.give_up)

    async def late(self, weight: int) -> None:
        """Account for `weight` tokens that were not announced before their round committed, if the rule does."""
        if self.loop.replica.owes_forfeit(weight):
            await self.loop.forfeit()

    def not_finite(self) -> None:
        """Handle a contribution that is not finite, in the worker. Here the model stays as it is."""

    async def commit(self, outcome: Outcome) -> None:
        """Make the outer step; the model starts from it. The digest is computed while training continues."""
        await self.loop.step(outcome, digest=False)
        await self.loop.adopt_in_background()

    async def adopt(self) -> None:
        """Set the model to the outer parameters, and begin the next round."""
        await self.loop.write_theta()
        self.loop.session.advance()

    def replaced(self) -> None:
        """Note that a fetched state has replaced the state and the model."""

    def trains_on(self, commit: Commit) -> bool:
        """Return True if training should continue in spite of this commit."""
        return False

    def follow(self, report: Callable[[Outcome], None]) -> None:
        """Start to report rounds that end outside `sync` to `report`."""

    async def rest(self) -> None:
        """Stop following."""

    def resume(self) -> None:
        """Follow again."""


class OuterLoop(ReplicaLoop):
    """Rounds of one replica, by a schedule.

    `read` copies a range of the model's parameters, `write` sets them from the outer parameters; both run in `work`.
    `beside` computes without the model while training continues; None: in `work`.
    """

    _settling: asyncio.Task[None] | None = None

    def __init__(
        self,
        session: RoundSession,
        schedule: Schedule,
        *,
        read: Read,
        write: ParameterWrite,
        work: Work,
        beside: Work | None = None,
    ) -> None:
        self.session = self._session = session
        self.read, self.write, self.work, self._beside = read, write, work, beside or work
        self._when_settled: list[Callable[[], None]] = []
        self.schedule = schedule
        self.follows = schedule.follows
        schedule.attach(self)
        self._merges = schedule.merges and _merges(session.manifest)
        self._given = b"", 0
        """Lineage of the last committed round, and the weight of our contributions in that lineage."""

    @property
    def replica(self) -> Replica:
        return self.session.replica

    @property
    def overtaken(self) -> bool:
        """True if training on the old state is useless: the swarm has committed the round without us."""
        commit, behind = self.session.open_commit, self.session.catch_up.behind.is_set()
        return behind or (commit is not None and not self.schedule.trains_on(commit))

    def follow(self, report: Callable[[Outcome], None]) -> None:
        """Report rounds that end outside `sync` to `report`."""
        self.schedule.follow(report)

    def take_part(self) -> None:
        if self.follows:
            self.session.take_part()

    async def rest(self) -> None:
        """Leave the replica as it is until `resume`."""
        await self.schedule.rest()
        await self.settled()

    def resume(self) -> None:
        self.schedule.resume()

    async def settled(self) -> None:
        """Wait for the rest of `adopt_in_background`. Raises its error, if any."""
        settling = self._settling
        if settling is not None:
            await asyncio.wait([settling])
            settling.result()

    def call_when_settled(self, function: Callable[[], None]) -> None:
        """Call `function` as soon as `settled` has nothing to wait for: now, or on the loop."""
        if self._settling is None:
            function()
        else:
            self._when_settled.append(function)

    async def sync(self, *, weight: int, loss: float, speed: float, meanwhile: Meanwhile | None = None) -> Outcome:
        """Run one round after the inner steps, see `RoundLoop.sync`.

        After a commit the replica has made its outer step and the model starts from it; its digest is computed during
        the next inner steps, see `settled`. Without a commit everything is as before (the model keeps its local
        progress, which the next call sends), unless this peer had to fetch the swarm's state: then the model starts
        from that. The outcome has no results.
        """
        try:
            outcome = await self.schedule.sync(weight, loss, speed, meanwhile)
        finally:
            self.replica.rollback()
        return replace(outcome, results=())

    # --- for schedules

    async def round(self, weight: int, loss: float, speed: float) -> Outcome:
        """Run one round: contribute, average, commit; or catch up with the swarm."""
        await self.settled()
        session = self.session
        if session.current.agreement.commit is None and not session.catch_up.behind.is_set():
            try:
                encoded = await self._encoded()
            except FloatingPointError as error:
                self.report_unsent(error)
                encoded = [], ContributionSummary(b"")
            else:
                self.report_sent()
            payloads, summary = encoded
            average = partial(
                session.average,
                payloads,
                summary=summary,
                weight=weight if payloads else 0,
                loss=loss,
                speed=speed,
            )
            del payloads, encoded
            outcome = await self.schedule.average(lambda give_up: average(give_up=give_up))
            del average
        else:
            outcome = await session.outcome(give_up=GIVE_UP * session.patience)
            if outcome.commit is not None:
                await self.schedule.late(weight)
        if outcome.commit is not None:
            if session.trials.holds:
                await self.work(session.trials.hold)
            await uninterrupted(self.schedule.commit(outcome))
            self.count(outcome.commit)
        elif outcome.diverged or session.catch_up.behind.is_set():
            return await self._rejoin(outcome, weight)
        return outcome

    @property
    def on_trial(self) -> bool:  # type: ignore[override]
        """True if this peer is on trial."""
        return self.session.trials.here

    def score_of(self, peer: PeerId) -> str:
        return self.session.trials.describe(peer)

    async def judge(self, score: Score) -> None:
        trials = self.session.trials
        if (sample := trials.due) is not None:
            trials.judge(sample, *await self.work(lambda: trials.evaluate(sample, score)))

    def count(self, commit: Commit) -> None:
        """Add the weight of our contribution to that of our lineage."""
        lineage, given = self._given
        given = given if lineage == commit.proposal.lineage else 0
        ours = [entry.weight for entry in commit.proposal.contributors if entry.peer == self.session.me]
        self._given = commit.proposal.lineage, given + sum(ours)

    async def _rejoin(self, outcome: Outcome, weight: int) -> Outcome:
        """Take over the swarm's state; return the outcome of the round in progress.

        If the state belongs to another lineage, the model may stay as it is: the next contribution then has all that this
        peer has trained since the split, and `merged` of the outcome is the weight of its rounds in the old lineage.
        """
        session, before = self.session, self.replica.chain
        fetched = await session.catch_up.newer(self.work)
        if fetched is None:
            session.resume_round()
            await session.wait_before_retry()
            return outcome
        merges = self._merges and bool(before) and lineage_of(fetched.chain) != lineage_of(before)
        await uninterrupted(self._take_over(fetched, write=not merges))
        if not merges:
            return outcome
        lineage, given = self._given
        # A lineage that was founded in ours contains our rounds.
        merged = given if lineage == lineage_of(before) and not descends(fetched.chain, lineage) else 0
        detail = f"training on {weight + merged} tokens since the split is part of the next contribution"
        session.report("merged", detail, tokens=merged)
        return replace(outcome, taken=True, kept=weight, merged=merged)

    @property
    def give_up(self) -> float:
        """Seconds after which a round without commit is given up."""
        return self.session.grace + GIVE_UP * self.session.patience

    async def step(self, outcome: Outcome, *, digest: bool = True, since: Read | None = None) -> bool:
        """Commit a round to the replica, and with `digest` compute that; return True if it was an outer step."""
        me, replica = self.session.me, self.replica
        return await self.session.change(self.work, lambda: replica.commit(outcome, me, since), settled=digest)

    async def forfeit(self) -> None:
        """Account for a contribution that was not sent."""
        try:
            await self.work(lambda: self.replica.forfeit(self.read))
        except FloatingPointError as error:
            self.session.report("unsent", str(error))

    async def write_theta(self) -> None:
        """Set the model to the outer parameters."""
        await self.work(lambda: self.replica.write_model(self.write))

    def start_over(self) -> None:
        """Discard private vectors and set the model to the outer parameters. Runs in the worker."""
        self.replica.reset()
        self.replica.write_model(self.write)

    async def adopt_in_background(self) -> None:
        """Set the model to the outer parameters; digest and next round follow while training continues."""
        await self.write_theta()
        self._settling = asyncio.create_task(self._settle_down())

    async def _settle_down(self) -> None:
        try:
            await self._beside(self.replica.compute_digest)
            self.session.advance()
            for function in self._when_settled:
                function()
        except Exception as error:
            self.session.fail(error)  # no caller waits for it before the next round
            raise
        self._when_settled.clear()
        self._settling = None

    async def _encoded(self) -> tuple[list[memoryview], ContributionSummary]:
        """Encode the contribution; from now on the host does so if the GPU has no room.

        Raises FloatingPointError.
        """
        encoded: tuple[list[memoryview], ContributionSummary]
        self.session.make_room()
        try:
            encoded = await self.work(self._encode)
        except torch.OutOfMemoryError:
            self.replica.encode_on(HOST)
            self.session.report("alarm", "the GPU has no room to encode contributions; the CPU does so from now on")
            encoded = await self.work(self._encode)
        return encoded

    def _encode(self) -> tuple[list[memoryview], ContributionSummary]:
        session, replica = self.session, self.replica
        attempt = session.current.attempt + 1
        peers = {*replica.members, *filter(lambda one: not session.trials.on_trial(one), session.ready), session.me}
        try:
            replica.read_buffers(self.read)
            payloads = list(replica.contribution(self.read, attempt=attempt, peers=len(peers)))
        except FloatingPointError:
            self.schedule.not_finite()
            raise
        if replica.next_start is not None:
            self.write(replica.next_start)
            replica.write_buffers(self.write)
        return payloads, session.current.data_plane.summarize(payloads)

    async def catch_up(self) -> bool:
        """Take over the swarm's state; return True if there was a suitable one."""
        fetched = await self.session.catch_up.newer(self.work)
        if fetched is not None:
            await uninterrupted(self._take_over(fetched))
        return fetched is not None

    async def _take_over(self, fetched: FetchedState, *, write: bool = True) -> None:
        await self.session.catch_up.fetcher.install(self.work, fetched)
        if write:
            await self.adopt()
        else:
            self.session.advance()
        self.schedule.replaced()

    async def adopt(self) -> None:
        """Set the model to the outer parameters, and begin the next round."""
        await self.schedule.adopt()


def _merges(manifest: Manifest) -> bool:
    # A state has the record of used samples. That of another lineage does not have ours.
    return manifest.exchange.on_split == "merge" and not manifest.data.exactly_once
