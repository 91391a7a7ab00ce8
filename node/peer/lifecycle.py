"""Lifecycle of a peer that trains, from the join handshake to its departure; also in simulations.

Needs an event loop and nothing else of the outside world: time and disk are the peer's environment, and computation
runs in `work` and in the learner's `steps`. Use:

    peer = Peer(identity, run_id, Environment(now, wall, rng, disk), directory, preset, report.emit)
    lifecycle = PeerLifecycle(peer, report, begin=begin, learn=learn, work=work)
    await lifecycle.run()

`begin(peer)` opens the first stage (`Peer.found` or `Peer.arrive`) and returns whether there is a swarm to join;
`learn(manifest)` returns the learner; `work(function)` runs a function in the worker. `lifecycle.stop()` ends it gracefully.
Cancelling `run` ends it like a kill: nothing is saved and no peer is informed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from thinwire.node.peer.peer import Peer
from thinwire.node.peer.peer_services import PeerServices
from thinwire.node.peer.reporter import Reporter
from thinwire.node.runtime.asyncio_extra import Work, cancelled
from thinwire.node.state.checkpoint_store import SaveFailed
from thinwire.node.training.learner import NOTHING, Learner, StepReport, together
from thinwire.swarm.manifest.manifest import Manifest

ABANDON_SECONDS = 5.0
"""Seconds that a round may still take after the first request to stop."""


class PeerLifecycle:
    """Lifecycle of one peer. `peer` and `report` show its state.

    - `begin`, `learn`, `work`: see above.
    - `wait_for`: number of peers that must hold the state and take part before training starts; the wait takes at most a
      minute.
    - `rounds`: leave after this round; None: as in the manifest.
    - `invited`: called with an invite by the peer with which the run starts, also when it starts again.
    - `beside`: like `work`, for computations that need not wait for inner steps; without it `work` runs them, too.
    - `moves`: called after each round; returns True if the lifecycle must end because the peer changes to another stage.
    - `evaluate`: returns the held-out loss of the model; called in `work` after every `every` rounds (0: never).
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
        moves: Callable[[Learner], bool] = lambda learner: False,
        evaluate: Callable[[Learner], float] | None = None,
        every: int = 0,
    ) -> None:
        self.peer, self.report = peer, report
        self._begin, self._learn, self._work, self._invited = begin, learn, work, invited
        self._beside = beside or work
        self._evaluate, self._every = evaluate, every
        self._wait_for, self._last, self._moves = wait_for, rounds, moves
        self._services = PeerServices(peer, report, meanwhile=self._train_on, work=work)
        self._learner: Learner | None = None
        self._stopping = asyncio.Event()
        self._interrupt, self._exchanging = asyncio.Event(), False
        self.unsaved = ""
        """Reason why the last state was not written, if no other peer can be reached that has it."""
        self._tokens = 0
        self._tail = NOTHING  # Steps since the last contribution, made while the round was in progress.

    async def run(self) -> None:
        """Run until the run's last round, `stop`, or an error, which is raised after checkpoint and departure."""
        training = asyncio.create_task(self._begin_and_train())
        try:
            try:
                await self._until_end(training)
            finally:
                self._interrupt.set()
                await cancelled(training)
        except asyncio.CancelledError:
            await self._services.checkpoints.abandon()
            await self.peer.vanish()
            raise
        except Exception:
            await self._finish()
            raise
        await self._finish()

    def stop(self) -> None:
        """Leave gracefully: after the round in progress, unless it takes too long; without one at once."""
        self.report.phase = "leaving"
        self._stopping.set()
        self._interrupt.set()

    @property
    def stopping(self) -> bool:
        """True if `stop` was called."""
        return self._stopping.is_set()

    @property
    def takes_part(self) -> bool:
        """True once this peer has the state, so that rounds may be in progress."""
        return self._learner is not None

    async def _until_end(self, training: asyncio.Task[None]) -> None:
        stop = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((training, stop), return_when=asyncio.FIRST_COMPLETED)
            if not training.done() and self.takes_part:
                await asyncio.wait((training,), timeout=ABANDON_SECONDS)
        finally:
            stop.cancel()
        if training.done():
            training.result()

    async def _begin_and_train(self) -> None:
        peer, report = self.peer, self.report
        report.emit("start", {"peer": peer.identity.peer_id.hex(), "run": peer.run_id.hex()})
        joins = await self._begin(peer)
        membership = asyncio.create_task(self._take_part(joins))
        trouble = asyncio.create_task(self._services.trouble())
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
        if peer.known_peers.founds and invite is not None:
            self._invited(invite.code())
        await self._services.gather(self._wait_for, self._stopping.is_set)
        last = self._last or peer.manifest.run.rounds
        while not self.stopping and not (last and peer.workload.over(last)):
            if await self._round(learner):
                await self._services.checkpoints.begin_if_due(learner.private)
                await self._evaluate_if_due(learner)
            if self._moves(learner):
                self.stop()

    async def _evaluate_if_due(self, learner: Learner) -> None:
        """Evaluate the model on held-out text if that is due."""
        evaluate, number = self._evaluate, self.peer.replica.round
        if evaluate is not None and self._every and number % self._every == 0 and not self.stopping:
            self.report.evaluated(number, await self._work(lambda: evaluate(learner)))

    async def _take_up(self, learner: Learner, joins: bool) -> None:
        peer, report = self.peer, self.report
        await peer.take_up(
            learner.layout,
            await self._work(learner.parameters),
            read=learner.read,
            write=learner.write,
            work=self._work,
            joins=joins,
            beside=self._beside,
            on_commit=self._interrupt_if_overtaken,
            device=learner.device,
        )
        self._learner = learner
        restored = peer.private is not None and learner.restore(peer.private)
        if not restored and peer.replica.round:
            learner.skip_to(peer.replica.round, len(peer.replica.members))
            report.emit("fresh", {"detail": "the inner optimizer's state is new and warms up"})
        report.emit("ready", {"round": peer.replica.round, "parameters": learner.layout.total})
        self._services.follow()

    async def _round(self, learner: Learner) -> bool:
        """Run inner steps and an exchange; return True if a round was committed."""
        peer, report, tail = self.peer, self.report, self._tail
        report.phase, count = "training", max(0, peer.workload.steps(report.speed) - tail.steps)
        share = peer.workload.share(tail.steps)
        learner.assign(share)
        await peer.rounds.judge(learner.score)
        if share.lease is not None and (self._tokens or not share.lease):
            # Tokens that went into no round yet wait for the next one; a peer without a lease has nothing to do.
            count = 0
        # A commit without us, and the end of the run, end the steps: they start from an old state.
        self._interrupt, self._exchanging = asyncio.Event(), False
        self._interrupt_if_overtaken()
        lead = await self._steps(learner, count, self._interrupt) if count else NOTHING
        done, self._tail = together(tail, lead), NOTHING
        self._tokens += lead.tokens
        if done.seconds > 0 and done.steps:
            report.speed = done.tokens / done.seconds
        if self.stopping and lead.steps < count:
            return False
        await peer.rounds.settled()
        loss, before = done.loss if done.steps and not math.isnan(done.loss) else report.loss, peer.replica.contents
        weight = self._tokens or peer.workload.idle_weight
        outcome, _ = await self._services.exchange(steps=done.steps, weight=weight, loss=loss)
        past = outcome.commit is not None or outcome.dropped or outcome.taken
        # Without a barrier the state may have changed through rounds of others. A round that was just made has no
        # digest yet.
        changed = not past and not peer.rounds.follows and peer.replica.contents != before
        if past or changed:
            # The rest of the tokens went into a round, or is lost.
            self._tokens = min(self._tokens, outcome.kept) + outcome.merged
            if outcome.commit is None and not outcome.taken:
                self._tail = NOTHING
        self._tokens += self._tail.tokens
        return outcome.commit is not None

    def _interrupt_if_overtaken(self) -> None:
        """End the inner steps before an exchange if the swarm has committed the round without us."""
        if not self._exchanging and self.peer.rounds.overtaken:
            self._interrupt.set()

    async def _steps(self, learner: Learner, count: int, stop: asyncio.Event) -> StepReport:
        if not self.peer.rounds.follows:
            return await learner.steps(count, stop)
        made = NOTHING
        while made.steps < count and not (stop.is_set() or self.peer.rounds.overtaken):
            # One by one, so that rounds of others can be followed in between.
            made = together(made, await learner.steps(1, stop))
        return made

    async def _train_on(self) -> None:
        """Make inner steps while a round is in progress; its commit is no reason to end them."""
        learner, self._interrupt, self._exchanging = self._learner, asyncio.Event(), True
        assert learner is not None
        number, wanted, tail = self.peer.replica.round, self.peer.workload.overlap, NOTHING
        while tail.steps < wanted and not (self.stopping or self._interrupt.is_set()):
            # One by one, so that the outer step can be made in between; then the rest at once.
            settled = self.peer.replica.round > number
            made = await learner.steps(wanted - tail.steps if settled else 1, self._interrupt)
            if not made.steps:
                break  # A host without an origin makes no steps until it has one.
            tail = together(tail, made)
        self._tail = tail

    async def _save(self, learner: Learner) -> None:
        checkpoints = self._services.checkpoints
        await checkpoints.written()
        if self.peer.ready:
            await self.peer.rounds.settled()
        outcome = await self._work(lambda: checkpoints.save(learner.private))
        checkpoints.saved(outcome)
        if isinstance(outcome, SaveFailed) and not self.peer.presence.live:
            self.unsaved = outcome.reason

    async def _finish(self) -> None:
        """Save the state, let the other peers fetch what they need, and leave."""
        try:
            if self._learner is not None:
                await self._save(self._learner)
            if not self.stopping:
                await self._services.linger()
        finally:
            await self._services.leave()
