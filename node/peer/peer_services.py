"""Services of a peer beside training: exchange, failure detection, departure."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

from thinwire.collectives.outcome import Outcome
from thinwire.node.membership.join import BANNED_HINT, DuplicateKey
from thinwire.node.outer.round_loop import Meanwhile
from thinwire.node.peer.checkpoint_schedule import CheckpointSchedule
from thinwire.node.peer.peer import Peer
from thinwire.node.peer.reporter import Reporter
from thinwire.node.peer.reports.participation import Participation
from thinwire.node.runtime.asyncio_extra import Work
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.identity.identity import Identity, short
from thinwire.swarm.messages.registry import PeerId

GATHER_SECONDS = 60.0
"""Seconds for which `gather` waits for other peers."""

LOOK_SECONDS = 0.1
"""Interval in seconds between two checks of the present peers."""

LINGER_SECONDS = 10.0
"""Seconds that other peers have to fetch the last round from us before we leave."""

LEAVE_SECONDS = 10.0
"""Longest duration of the departure in seconds."""


class Banned(HintedError):
    """The members of the run exclude this peer for good, by evidence that is valid."""

    exit_code: ClassVar[int] = 5


class PeerServices:
    """Services of one peer; belong to the loop's thread. `work`: see CheckpointSchedule.

    `meanwhile`: trains while an exchange is in progress, for methods that overlap the two.
    """

    def __init__(self, peer: Peer, report: Reporter, *, meanwhile: Meanwhile, work: Work) -> None:
        self._peer, self._report, self._now = peer, report, peer.environment.now
        self.checkpoints = CheckpointSchedule(peer, report, work)
        self._gathered = frozenset[PeerId]()
        self._meanwhile, self._trained_seconds = meanwhile, 0.0
        """Seconds of training during the exchange in progress."""
        self._participation, self._late_alarm = Participation(), ""

    async def _train_meanwhile(self) -> None:
        """Train while an exchange is in progress; the time does not count as waiting."""
        report, began = self._report, self._now()
        if report.phase == "exchanging":
            report.phase = "training"
        try:
            await self._meanwhile()
        finally:
            self._trained_seconds += self._now() - began
            if report.phase == "training":
                report.phase = "exchanging"

    def follow(self) -> None:
        """Follow rounds of others while training, if the method does, and record them."""
        peer, report = self._peer, self._report

        def report_round(outcome: Outcome) -> None:
            report.round(peer, outcome, loss=report.loss, seconds=0.0, steps=0, weight=0)
            peer.store_known_peers()

        peer.rounds.follow(report_round)

    async def gather(
        self, count: int, stopping: Callable[[], bool] = lambda: False, seconds: float = GATHER_SECONDS
    ) -> None:
        """Wait until `count` peers, this one included, hold the state and take part; at most for some seconds.

        A member takes part; other peers announce it. The first exchange waits for the contributions of the latter. Return
        early if `stopping`, or if the swarm has continued without us.
        """
        peer, report, until, shown = self._peer, self._report, self._now() + seconds, 0
        while (here := self._taking_part()) < count:
            if stopping() or peer.rounds.overtaken:
                return
            if self._now() > until:
                report.emit("waited", {"detail": f"long enough: training begins with {here} of {count} peers"})
                break
            if here > shown:
                left = max(0.0, until - self._now())
                report.emit("waiting", {"detail": f"for {count} peers, {here} here, at most {left:.0f} s more"})
                shown, report.phase = here, "waiting"
            await asyncio.sleep(LOOK_SECONDS)
        if count > 1:
            self._gathered = frozenset(peer.session.ready)

    def _taking_part(self) -> int:
        session, members = self._peer.session, self._peer.replica.members
        return len({session.me, *session.ready, *session.live.intersection(members)})

    async def _others_contribute(self) -> None:
        """Wait for the contributions of the peers that `gather` counted, before the first one of a member.

        A synchronous round waits for members only, and these peers become members by the first round. Those that are no members
        do not wait, so no two peers wait for each other. Wait no longer than a round waits for an unknown member.
        """
        peer, others = self._peer, self._gathered.difference(self._peer.replica.members)
        self._gathered, manifest = frozenset(), self._peer.manifest
        common = not (manifest.outer.gossip or manifest.outer.asynchronous or manifest.pipeline.stages)
        # With `exactly_once` only members have data.
        if not common or manifest.data.exactly_once or peer.session.me not in peer.replica.members:
            return
        others = frozenset(one for one in others if not peer.session.roster.on_trial(one))
        seconds, reported = peer.manifest.exchange.timeout_seconds, False
        until = self._now() + seconds
        while missing := others.intersection(peer.session.live).difference(peer.session.announced):
            if peer.rounds.overtaken or self._now() > until:
                return
            if not reported:
                detail = f"for the first contributions of {len(missing)} other peers, at most {seconds:.0f} s"
                self._report.emit("waiting", {"detail": detail})
                reported = True
            await asyncio.sleep(LOOK_SECONDS)

    async def exchange(self, *, steps: int, weight: int, loss: float | None) -> tuple[Outcome, float]:
        """Run one round after `steps` inner steps on `weight` tokens or samples, see `OuterLoop.sync`.

        Return the outcome and the seconds waited.
        """
        peer, report, began, self._trained_seconds = self._peer, self._report, self._now(), 0.0
        before, report.phase = report.phase, "exchanging"
        try:
            capped = min(weight, peer.manifest.max_weight)
            known_loss = loss if loss is not None and math.isfinite(loss) else 0.0  # A host may not know a loss yet.
            meanwhile = self._train_meanwhile if peer.manifest.overlap else None
            await self._others_contribute()
            contents = peer.replica.contents
            outcome = await peer.rounds.sync(weight=capped, loss=known_loss, speed=report.speed, meanwhile=meanwhile)
        finally:
            if report.phase == "exchanging":  # The phase may have become "leaving".
                report.phase = before
        seconds = self._now() - began - self._trained_seconds
        if outcome.commit is not None:
            report.book(peer, outcome, loss=loss, seconds=seconds, steps=steps)
            self._count(outcome)
            committed_weight = weight - outcome.kept
            # The report of a round contains the digest of the state after it.
            peer.rounds.call_when_settled(
                lambda: report.round(peer, outcome, loss=loss, seconds=seconds, steps=steps, weight=committed_weight)
            )
            peer.store_known_peers()
        elif not outcome.taken:
            report.uncommitted(peer, replaced=peer.replica.contents != contents)
        return outcome, seconds

    def _count(self, outcome: Outcome) -> None:
        """Count a committed round in which we could contribute; warn while we are always too late.

        Not while we are on trial, or follow rounds that the others had before we had the state.
        """
        peer, me = self._peer, self._peer.identity.peer_id
        synchronous = not (peer.manifest.asynchronous or peer.manifest.outer.gossip)
        trial = me not in peer.replica.members and peer.session.roster.on_trial(me)
        if synchronous and not trial and not outcome.began_late and outcome.missing.get(me, "late") == "late":
            if self._participation.add(me in outcome.contributors):
                self._warn()
            elif self._participation.recovered:
                self._end_late_alarm("this peer contributes again, and to at least half of its rounds")

    def _warn(self) -> None:
        """Emit an alarm with the number of our contributions, and the reason why so few were in time."""
        peer = self._peer
        speeds = [one.speed for one in list(peer.session.announced.values())]
        others = set(peer.replica.members) - {peer.identity.peer_id}
        self._end_late_alarm("newer counts follow")
        self._late_alarm = self._participation.text(
            self._report.speed,
            speeds,
            balancing=getattr(peer.manifest.outer, "step_balancing", ""),
            unlinked=sum(peer.session.roster.peers.is_live(one) for one in others - peer.session.live),
            group=self._report.group(),
        )
        self._report.emit("alarm", {"detail": self._late_alarm})

    def _end_late_alarm(self, why: str) -> None:
        alarm, self._late_alarm = self._late_alarm, ""
        if alarm:
            self._report.end_alarm(alarm, why)

    async def trouble(self) -> BaseException:
        """Wait until this peer cannot continue; return why.

        Reasons: receiving failed, its key is used elsewhere, or the members have banned it.
        """
        running, presence = self._peer.running, self._peer.presence
        duplicate, banned = (asyncio.create_task(one.wait()) for one in (presence.duplicate, presence.banned))
        try:
            await asyncio.wait((running, duplicate, banned), return_when=asyncio.FIRST_COMPLETED)
        finally:
            duplicate.cancel()
            banned.cancel()
        if presence.banned.is_set():
            return Banned(f"this peer is banned from the run: {presence.ban_reason}", BANNED_HINT)
        if not running.done():
            return duplicate_key(self._peer.identity)
        failure = None if running.cancelled() else running.exception()
        return failure or RuntimeError("the peer's presence has ended")

    async def linger(self) -> None:
        """Stay for a while, until all present peers have the last round: they may fetch it here."""
        peer = self._peer
        if not peer.ready or peer.presence.banned.is_set():
            return
        until, last = self._now() + LINGER_SECONDS, peer.manifest.run.rounds
        # A peer with the last fragments only continues to count.
        mine = min(peer.replica.round, last or peer.replica.round)
        session = peer.session
        while self._now() < until:
            if not any(
                session.roster.peers.is_live(other) and session.roster.peers.progress_of(other) < mine
                for other in session.live
            ):
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def leave(self) -> None:
        """Announce the departure, close everything, and record it."""
        peer = self._peer
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                try:
                    if peer.ready:
                        await peer.rounds.settled()
                finally:
                    await peer.leave()
        if self._participation.poor:
            self._warn()
        if peer.ready:
            round, digest = peer.replica.newest
            fields: dict[str, object] = {"round": round, "digest": digest.hex()}
            if fragments := peer.replica.fragment_digests:
                fields["state"] = peer.replica.digest.hex()
                fields["fragments"] = {str(number): one.hex() for number, one in fragments.items()}
            self._report.emit("left", fields)
        self._report.summary(peer)
        self._report.phase = "done"


def duplicate_key(identity: Identity) -> DuplicateKey:
    """Return the error for a peer whose key is in use elsewhere."""
    return DuplicateKey(
        f"another process uses the key of peer {short(identity.peer_id)}, and it started later",
        "give each daemon a separate key, with --home DIR",
    )
