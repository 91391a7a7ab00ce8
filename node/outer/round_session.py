"""Session of rounds with agreement, one after the other.

Everything runs on the event loop. The session averages encoded chunks for `OuterLoop` and does not know the model. Its parts
start a round (`round_starter`), route what arrives (`frame_router`), store past rounds (`round_history`), serve the state
(`state_server`), decide when to fetch another (`catch_up`) and fetch it (`state_fetcher`), compare lineages (`lineages`) and
found them (`own_lineage`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from thinwire.collectives.consensus.chain import checked
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounds.data_planes.contributions import ContributionSummary
from thinwire.collectives.rounds.round import Round
from thinwire.collectives.rounds.round_factory import MAX_PENDING
from thinwire.collectives.state_sync.state_offers import ReceivedChains
from thinwire.collectives.transport.pending_frames import PendingFrames
from thinwire.compression.core.types import Buffer
from thinwire.node.outer.catch_up import CatchUp
from thinwire.node.outer.frame_router import FrameRouter
from thinwire.node.outer.lineages import Lineages
from thinwire.node.outer.own_lineage import OwnLineage, continue_alone, report
from thinwire.node.outer.quorum_wait import QuorumWait
from thinwire.node.outer.round_starter import RoundStarter
from thinwire.node.outer.session import FragmentRounds, ReplicaSession, SessionContext
from thinwire.node.outer.state_transfer.round_history import RoundHistory
from thinwire.node.outer.state_transfer.state_fetcher import StateFetcher
from thinwire.node.outer.state_transfer.state_server import StateServer
from thinwire.node.runtime.asyncio_extra import Result, Work
from thinwire.node.state.replica import Replica
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import short
from thinwire.swarm.messages.registry import (
    Ask,
    Commit,
    Fork,
    PeerId,
    Ready,
)


class RoundSession(ReplicaSession):
    """Session of a replica whose rounds need agreement; call `advance` after a commit was applied.

    `announced`, `pending_frames` (see RoundFactory) and `turn` (see CatchUp) are shared by the sessions of all fragments of
    a peer. `on_advance`: called when the next round begins; by default our progress is announced to the other peers then.
    """

    current: Round
    """The round in progress."""

    def __init__(
        self,
        context: SessionContext,
        replica: Replica,
        fragment: int = 0,
        *,
        announced: dict[PeerId, Ready] | None = None,
        pending_frames: PendingFrames | None = None,
        turn: asyncio.Semaphore | None = None,
        on_advance: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(context, replica, fragment)
        manifest, now = context.manifest, context.now
        if announced is not None:
            self.announced = announced
        self._on_commit, self._on_advance = context.on_commit, on_advance or self._announce_progress
        self._staged = bool(manifest.pipeline.stages)
        """True in a pipeline: a stage that no peer holds delays all rounds, so no data is paced."""
        self.votes = context.votes(fragment)
        self.history = RoundHistory(replica.state.nbytes, now)
        """Past rounds that other peers may still need."""
        self.starter = self._round_starter(context, pending_frames)
        self.factory, self._straggler_grace = self.starter.factory, self.starter.straggler_grace
        self._own_contributions = self.starter.verification.own_contributions
        self.trials = self.starter.verification.trials
        self.chains = ReceivedChains(
            partial(
                checked,
                fraction=manifest.quorum,
                verifier=self.factory.keyring.with_keys,
                admits=self.roster.is_admitted,
                gaps=self._staged,
            ),
            self.presence.chains,
        )
        """Chains that other peers have sent."""
        self.states = self._state_server(entered=context.entered and self.me in replica.members)
        self.quorum_wait = QuorumWait(manifest.exchange.orphan, now=now, current=lambda: self.current)
        rounds = FragmentRounds(
            replica=replica, presence=self.presence, fragment=fragment, now=now, current=lambda: self.current
        )
        self.lineages = Lineages(
            rounds,
            chains=self.chains,
            quorum_wait=self.quorum_wait,
            states=self.states,
            # A lost pipeline stage begins again with the peer that makes it.
            founder=b"" if self._staged else context.founder,
        )
        self.own_lineage = self._own_lineage(rounds)
        self.catch_up: CatchUp = CatchUp(
            rounds, self._state_fetcher(), factory=self.factory, lineages=self.lineages, turn=turn
        )
        self._router = self._frame_router(rounds)
        # If the clock was set back, the stored highest number of this life is higher.
        self.current = self.starter.start(max(self.roster.record.first_attempt, self.votes.numbers))
        self._send_queue.begin(self.current.round, self.fragment)

    # --- parts

    def _round_starter(self, context: SessionContext, pending_frames: PendingFrames | None) -> RoundStarter:
        def paced(peer: PeerId, round: int) -> bool:
            return not (self._staged or peer in self.replica.members or self.history.hurried(peer))

        return RoundStarter(
            context,
            self.replica,
            self.fragment,
            votes=self.votes,
            on_phase=self._phase,
            pending_frames=pending_frames,
            paced=paced,
        )

    def _state_server(self, *, entered: bool) -> StateServer:
        return StateServer(
            self.replica,
            self._send_queue,
            self._now,
            entered=entered,
            fragment=self.fragment,
            report=self.report,
            history=self.history,
            paced=not self._staged,
        )

    def _state_fetcher(self) -> StateFetcher:
        return StateFetcher(
            self.replica,
            self.states,
            self._send_queue,
            self._now,
            fragment=self.fragment,
            emit=self._emit,
            report=self.report,
            chains=self.chains,
        )

    def _own_lineage(self, rounds: FragmentRounds) -> OwnLineage:
        return OwnLineage(
            rounds,
            self.lineages,
            self.quorum_wait,
            emit=self._emit,
            keyring=self.factory.keyring,
            token_of=self.roster.token_of,
            votes=self.votes,
            founded=self._founded,
        )

    def _frame_router(self, rounds: FragmentRounds) -> FrameRouter:
        return FrameRouter(
            rounds,
            states=self.states,
            catch_up=self.catch_up,
            lineages=self.lineages,
            own_lineage=self.own_lineage,
            history=self.history,
            straggler_grace=self._straggler_grace,
            pending_frames=self.factory.pending_frames,
            announced=self.announced,
            verification=self.starter.verification,
        )

    # --- rounds

    def make_room(self) -> None:
        """Free memory before a contribution is encoded."""
        self._own_contributions.make_room()

    async def average(
        self,
        source: Sequence[Buffer],
        *,
        weight: int,
        loss: float,
        speed: float,
        summary: ContributionSummary | None = None,
        give_up: float | None = None,
    ) -> Outcome:
        """Average our encoded pseudo-gradient with the peers of the round in progress.

        The outcome has no commit if the round did not commit within `give_up` seconds and its data no longer arrives, if
        this peer is behind, or if its state differs from that of the majority.
        """
        self._straggler_grace.on_announcement(self.me, self.current.round, self._now(), contributes=bool(weight))
        self.current.announce(source, weight=weight, loss=loss, speed=speed, summary=summary)
        if (ready := self.current.agreement.ready.get(self.me)) is not None:  # else the round is over already
            self._own_contributions.announced(ready, source)
            self._router.prune()  # before the data of this round comes
        return await self.outcome(give_up=give_up)

    async def outcome(self, *, give_up: float | None = None) -> Outcome:
        """Wait for the end of the round in progress, see `average`."""
        outcome = await self.factory.outcome(self.current, give_up=give_up)
        return replace(outcome, began_late=True) if self.catch_up.began_late else outcome

    async def until_given_up(self, futures: Collection[asyncio.Future[Any]], give_up: float) -> None:
        """Wait for the first of the futures, or until the round in progress is given up, see `average`."""
        await self.factory.until_given_up(self.current, futures, give_up)

    @property
    def patience(self) -> float:
        return self.factory.patience

    @property
    def grace(self) -> float:
        """Maximum seconds that a round waits for stragglers after a quorum is ready."""
        return self._straggler_grace.limit

    @property
    def overtaken(self) -> bool:
        """True if the swarm has completed this round without us: training on the old state is useless."""
        return self.open_commit is not None or self.catch_up.behind.is_set()

    @property
    def open_commit(self) -> Commit | None:
        """Commit of the round in progress while the replica does not have it yet."""
        return self.current.agreement.commit if self.current.round > self.replica.round else None

    @property
    def ready(self) -> Collection[PeerId]:
        return self.current.agreement.ready

    def waiting_for(self) -> Collection[PeerId]:
        return self.current.agreement.waiting_for()

    def stalled(self) -> str:
        agreement = self.current.agreement
        if self.quorum_wait.text or not agreement.overdue:
            return self.quorum_wait.text
        silent, leader = ", ".join(map(short, agreement.unanswered)), short(agreement.acceptor.leader)
        reason = f"no answer from {silent} (can be reached)" if silent else f"{leader} leads it"
        return f"round {agreement.terms.round} does not end: {reason}"

    @property
    def fruitless(self) -> bool:
        return self.factory.fruitless(self.current)

    def sizes(self) -> dict[str, tuple[int, int]]:
        return {"stash": (len(self.factory.pending_frames), MAX_PENDING), "early": self.current.data_plane.early}

    @property
    def dropped_frames(self) -> int:
        return self._router.dropped_frames

    def resume_round(self) -> None:
        """Continue the round in progress, which was given up for a swarm ahead of us that does not exist."""
        if self.current.agreement.commit is None:
            self.current.resume()

    def fail(self, error: Exception) -> None:
        """Report an error that no caller would notice soon."""
        self._send_queue.fail(error)

    async def change(self, work: Work, how: Callable[[], Result], *, settled: bool = True) -> Result:
        """Run `how`, which changes the replica, in `work`. The state is not offered until `advance`.

        With `settled` the digest is computed in `work`, too; otherwise the caller computes it before `advance`.
        """

        def change() -> Result:
            result = how()
            self.replica.pool.free()
            if settled:
                self.replica.compute_digest()
            return result

        return await self.states.change(work, change)

    def advance(self) -> None:
        """Begin the next round after a change of the state; the same again if the last one's was fetched."""
        done = self.current
        committed = self.replica.round == done.round and done.complete
        if committed:
            self.history.add(done)
        else:
            self.history.clear()
        self._report_lost_residuals()
        self.current = self.starter.start(done.attempt, done)
        self._send_queue.begin(self.current.round, self.fragment)
        self._send_queue.rest()
        # Peers that are past this round, and those that announced something with our state before it began again here.
        base = self.current.agreement.terms.base  # another one after each round
        agreeing = {peer for peer, ready in done.agreement.ready.items() if ready.base == base} - {self.me}
        for peer in sorted(agreeing.union(self.catch_up.begin())):
            self._send_queue.control(peer, Ask(self.current.round, self.fragment, again=not committed))
        for peer, frame in self._router.waiting():
            self.on_frame(peer, frame)
        self.trials.advance(done if committed else None)
        self._on_advance()
        self.states.resume()
        self.own_lineage.advance()
        self.lineages.advance()
        # The others should know that we have no vote, although we are a member.
        nonvoter = not self.current.agreement.voter
        if self.me not in self.replica.members or nonvoter or self.replica.asynchronous:
            self.take_part()

    def _announce_progress(self) -> None:
        self.roster.progress = self.replica.round

    def _report_lost_residuals(self) -> None:
        """Report lost owner residuals: other peers own their chunks, or the state was replaced."""
        residuals = self.factory.planes.owner_residuals
        chunks, square = residuals.lost
        if chunks:
            residuals.lost = 0, 0.0
            self.report("residual_lost", f"residuals of {chunks} chunks, norm {square**0.5:.3g}")

    def leave(self) -> None:
        self.current.agreement.leave()
        self.current.pump()

    def take_part(self) -> None:
        """Become a member of the next round without a contribution (unless one follows in time)."""
        self.current.announce((), weight=0, loss=0.0, speed=0.0)

    def _founded(self, fork: Fork) -> None:
        """Continue in a lineage that was founded with our state; the training since its round remains."""
        self.replica.found(fork)
        self.current.abandon()
        self.advance()

    def _phase(self, round: int, name: str) -> None:
        self._emit("phase", {"round": round, "phase": name})
        if name == "commit":
            self._on_commit()

    async def continue_alone(self, work: Work, change: Callable[[], None] = lambda: None) -> None:
        """Found a lineage alone, as no other peer has the state. `change` makes the state first, in `work`."""

        def alone() -> Fork | None:
            change()
            place = self.replica, self.fragment, self.votes
            ours = self.factory.keyring, self.roster.record.token
            return continue_alone(*place, *ours, ahead=self.starter.ahead)

        if (fork := await self.change(work, alone)) is not None:
            report(fork, self._emit)

    # --- frame handler

    def on_link_up(self, peer: PeerId) -> None:
        self._router.on_link_up(peer)

    def on_link_down(self, peer: PeerId, *, gone: bool) -> None:
        self._router.on_link_down(peer, gone=gone)

    def on_frame(self, peer: PeerId, frame: Frame) -> None:
        self._router.on_frame(peer, frame)

    def on_tick(self) -> None:
        self._router.on_tick()
