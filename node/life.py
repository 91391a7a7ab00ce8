"""The life of a peer that trains, from the first knock to the goodbye: what the daemon and the simulation have in common.

Needs an event loop and nothing else of the world: time and disk are the peer's doors, computing is `work` and the learner's
`steps`. To live one:

    peer = Peer(identity, run_id, Doors(now, wall, rng, disk), directory, preset, report.emit)
    life = Life(peer, report, begin=begin, learn=learn, work=work)
    await life.run()

`begin(peer)` opens the first stage (`Peer.found` or `Peer.arrive`) and says whether there is a swarm to join; `learn(manifest)`
gives what is trained; `work(function)` runs a function where computing is allowed. `life.stop()` ends it well, cancelling `run`
ends it as a kill does: nothing is saved and nobody is told.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection

from thinwire.swarm.manifest import Manifest

from .duties import Duties
from .learner import NOTHING, Learner, Share, StepReport, together
from .peer import Peer
from .report import Reporter
from .waiting import Work, cancelled

ABANDON_SECONDS = 5.0
"""How long a round may still take after the first request to stop."""

GATHER_SECONDS = 60.0
"""How long `wait_for` waits for other peers."""

LOOK_SECONDS = 0.1
"""How often is looked who is there, while others are waited for."""


class Life:
    """See the module. `peer` and `report` tell how it is going.

    wait_for: peers that must hold the state and take part before training begins, a minute at most. rounds: leave after this
    round; None: when the manifest says so. invited: called with an invite by the peer with which the run begins, also
    when it begins once more.
    beside: as `work`, for what need not wait for inner steps; without it `work` does that, too.
    held: of what is trained, the fragments that this peer has to do with, see `Peer.take_up`.
    moves: whether this life is over after a round, because the peer is to train something else in another.
    """

    def __init__(
        self,
        peer: Peer,
        report: Reporter,
        *,
        begin: Callable[[Peer], Awaitable[bool]],
        learn: Callable[[Manifest], Awaitable[Learner]],
        work: Work,
        wait_for: int = 1,
        rounds: int | None = None,
        invited: Callable[[str], None] = lambda code: None,
        beside: Work | None = None,
        held: Callable[[Learner], Collection[int] | None] = lambda learner: None,
        moves: Callable[[Learner], bool] = lambda learner: False,
    ) -> None:
        self.peer, self.report = peer, report
        self._begin, self._learn, self._work, self._invited = begin, learn, work, invited
        self._beside = beside or work
        self._wait_for, self._last, self._held, self._moves = wait_for, rounds, held, moves
        self._duties = Duties(peer, report)
        self._learner: Learner | None = None
        self._stopping = asyncio.Event()
        self._interrupt = asyncio.Event()
        self._tokens = 0
        self._tail = NOTHING  # steps since the last contribution, made while it was under way

    async def run(self) -> None:
        """Until the run's last round, `stop`, or an error, which is raised after a checkpoint and the goodbye."""
        life = asyncio.create_task(self._live())
        try:
            try:
                await self._until_end(life)
            finally:
                self._interrupt.set()
                await cancelled(life)
        except asyncio.CancelledError:
            await self.peer.vanish()
            raise
        except Exception:
            await self._finish()
            raise
        await self._finish()

    def stop(self) -> None:
        """Leave well: after the round in progress, when it does not take long."""
        self.report.phase = "leaving"
        self._stopping.set()
        self._interrupt.set()

    @property
    def stopping(self) -> bool:
        """Whether it was asked to stop."""
        return self._stopping.is_set()

    async def _until_end(self, life: asyncio.Task[None]) -> None:
        stop = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((life, stop), return_when=asyncio.FIRST_COMPLETED)
            if not life.done() and self.peer.ready:
                await asyncio.wait((life,), timeout=ABANDON_SECONDS)
        finally:
            stop.cancel()
        if life.done():
            life.result()

    async def _live(self) -> None:
        peer, report = self.peer, self.report
        report.emit("start", {"peer": peer.identity.peer_id.hex(), "run": peer.run_id.hex()})
        joins = await self._begin(peer)
        membership = asyncio.create_task(self._take_part(joins))
        trouble = asyncio.create_task(self._duties.trouble())
        try:
            await asyncio.wait((membership, trouble), return_when=asyncio.FIRST_COMPLETED)
            if trouble.done():
                raise trouble.result()
            membership.result()
        finally:
            trouble.cancel()
            await cancelled(membership)

    async def _take_part(self, joins: bool) -> None:
        peer = self.peer
        learner = await self._learn(peer.manifest)
        self.report.phase = "joining" if joins else "starting"
        await self._take_up(learner, joins)
        invite = peer.invite()
        if peer.anchors.founds and invite is not None:
            self._invited(invite.code())
        await self._gather()
        last = self._last or peer.manifest.run.rounds
        while not self.stopping and not (last and peer.over(last)):
            if await self._round(learner) and self._duties.save_due:
                await self._save(learner)
            if self._moves(learner):
                self.stop()

    async def _take_up(self, learner: Learner, joins: bool) -> None:
        peer, report = self.peer, self.report
        await peer.take_up(
            learner.layout,
            await self._work(learner.parameters),
            read=learner.read,
            write=learner.write,
            work=self._work,
            joins=joins,
            held=self._held(learner),
            beside=self._beside,
        )
        self._learner = learner
        if peer.manifest.overlap:
            self._duties.train_on(self._train_on)
        kept = peer.private is not None and learner.restore(peer.private)
        if not kept and peer.replica.round:
            learner.skip_to(peer.replica.round, len(peer.replica.members))
            report.emit("fresh", {"detail": "the inner optimizer's state is new and warms up"})
        report.emit("ready", {"round": peer.replica.round, "parameters": learner.layout.total})
        self._duties.follow()

    async def _gather(self) -> None:
        session, now = self.peer.session, self.peer.doors.now
        until = now() + GATHER_SECONDS
        while len({*session.ready, session.me}) < self._wait_for:
            if self.stopping or session.overtaken:
                return  # asked to stop, or the swarm has gone on without us
            if now() > until:
                return self.report.emit("waited", {"detail": "going on without the peers that were waited for"})
            self.report.phase = "waiting"
            await asyncio.sleep(LOOK_SECONDS)

    async def _round(self, learner: Learner) -> bool:
        """Inner steps and an exchange; whether a round was committed."""
        peer, report, tail = self.peer, self.report, self._tail
        report.phase, count = "training", max(0, peer.steps(report.speed) - tail.steps)
        lease = peer.lease()
        place, at = peer.place(), peer.position() + tail.steps
        learner.assign(Share(place, peer.identity.peer_id, peer.replica.round, lease, at))
        if lease is not None and (self._tokens or not lease):
            count = 0  # what went into no round yet waits for the next one; for who has no lease there is nothing to do
        # A commit without us ends the steps on what is now an old state; so does the end.
        self._interrupt = interrupt = asyncio.Event()

        def look() -> None:
            if peer.session.overtaken:
                interrupt.set()

        peer.session.on_commit = look
        look()
        lead = await self._steps(learner, count, interrupt) if count else NOTHING
        done, self._tail = together(tail, lead), NOTHING
        self._tokens += lead.tokens
        if done.seconds > 0 and done.steps:
            report.speed = done.tokens / done.seconds
        if self.stopping and lead.steps < count:
            return False
        await peer.rounds.settled()
        loss, before = done.loss if done.steps and not math.isnan(done.loss) else report.loss, peer.replica.newest
        weight = self._tokens or peer.idle_weight
        outcome, _ = await self._duties.exchange(steps=tail.steps + count, weight=weight, loss=loss)
        past = outcome.commit is not None or outcome.dropped or outcome.taken
        # Where nobody waits it may have moved by rounds of others. A round that was just made has no digest yet.
        moved = not past and not peer.manifest.asynchronous and peer.replica.newest != before
        if past or moved:
            self._tokens = min(self._tokens, outcome.kept)  # what the others went into is done with, or gone
            if outcome.commit is None and not outcome.taken:
                self._tail = NOTHING
        self._tokens += self._tail.tokens
        return outcome.commit is not None

    async def _steps(self, learner: Learner, count: int, stop: asyncio.Event) -> StepReport:
        if not self.peer.manifest.asynchronous:
            return await learner.steps(count, stop)
        made = NOTHING
        while made.steps < count and not (stop.is_set() or self.peer.session.overtaken):
            # One by one, so that rounds of others can be followed between two.
            made = together(made, await learner.steps(1, stop))
        return made

    async def _train_on(self) -> None:
        """Inner steps while a round is under way: its verdict is no reason to end them."""
        learner, self._interrupt = self._learner, asyncio.Event()
        assert learner is not None
        self.peer.session.on_commit = lambda: None
        number, wanted, tail = self.peer.replica.round, self.peer.overlap, NOTHING
        while tail.steps < wanted and not (self.stopping or self._interrupt.is_set()):
            # One by one, so that the outer step can be made between two; then the rest at once.
            settled = self.peer.replica.round > number
            made = await learner.steps(wanted - tail.steps if settled else 1, self._interrupt)
            if not made.steps:
                break  # a host without an origin makes none, for as long as it has none
            tail = together(tail, made)
        self._tail = tail

    async def _save(self, learner: Learner) -> None:
        if self.peer.ready:
            await self.peer.rounds.settled()
        self._duties.saved(await self._work(lambda: self._duties.save(learner.private)))

    async def _finish(self) -> None:
        """Keep what we have, let the others get what they need from us, say goodbye."""
        try:
            if self._learner is not None:
                await self._save(self._learner)
            if not self.stopping:
                await self._duties.linger()
        finally:
            await self._duties.leave()
