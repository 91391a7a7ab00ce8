"""Origin of a replica in stages: has data, embedding, first layers, head and loss; drives all hosts.

In a step every micro-batch travels origin → stages → origin, and its gradient travels back. Then the origin asks all
hosts to close the step with the micro-batches that count, and all make their inner step. Messages:

    Route            origin → every peer on the route
    Activation       from peer to peer along the route, and its gradient back
    Passed           every peer → origin: passed on, or why not
    Close            origin → all hosts: your gradient should consist of these micro-batches
    GradientSummary  its squared norm and tokens, or why it is given up
    Apply            divisor, and the factor that clips the whole model's gradient

The origin retains what it sent until a micro-batch is done. After any failure the micro-batch is retried from the
start, with another peer of the stage in question, or skipping the stage. A peer counts it once, and as long as a
reachable peer may have counted it, no other peer of that stage does. So at worst a stage misses the gradient of a
micro-batch that failed while it returned; none counts twice. Gradients that a dead peer had accumulated are lost, and
the step's outcome reports this.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from thinwire.collectives.transport.payload_assembly import pieces
from thinwire.compression.boundary_codec import Boundary
from thinwire.compression.core.codec import CodecError
from thinwire.node.pipeline.model.section import ModelSection
from thinwire.node.pipeline.model.stage_optimizer import StageOptimizer, clipping
from thinwire.node.pipeline.step.gradient_ledger import GradientLedger, StepOutcome
from thinwire.node.pipeline.step.measurements import Measurements
from thinwire.node.pipeline.step.micro_batch_attempt import Attempt, Failure
from thinwire.node.pipeline.step.origin_compute import OriginCompute
from thinwire.node.pipeline.step.route_planner import RoutePlanner
from thinwire.node.pipeline.step.stage_holders import StageHolders, Visits
from thinwire.node.pipeline.step.step_context import StepContext
from thinwire.node.pipeline.step.timeouts import Timeouts
from thinwire.node.training.batches import Batch
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import (
    MAX_MICROS,
    Activation,
    Apply,
    Close,
    GradientSummary,
    Hop,
    Outdated,
    Passed,
    PeerId,
    Route,
)

ATTEMPTS = 8
"""Attempts of a micro-batch after which it is given up."""


class Origin:
    """Handler of Presence; `step` makes one inner step.

    `window`: micro-batches in progress at a time; as many as stages is 1F1B, all of them GPipe. `clip`: largest norm of
    the whole model's gradient, 0 = not clipped. `by_visits`: a stage's gradient is divided by the micro-batches that
    went through it instead of by all. `recompute`: see Stage. `route_planner`: plans routes; without one micro-batches
    visit all stages.
    """

    def __init__(
        self,
        section: ModelSection,
        update: StageOptimizer,
        boundary: Boundary,
        stage_holders: StageHolders,
        context: StepContext,
        *,
        patience: Timeouts,
        window: int,
        route_planner: RoutePlanner | None = None,
        clip: float = 0.0,
        by_visits: bool = False,
        recompute: bool = False,
        step: int = 0,
    ) -> None:
        self.stage_holders, self.update, self.next_step = stage_holders, update, step
        self.norms: dict[int, float] = {}
        """Norm of the last gradient by stage, before clipping."""
        self._ends = OriginCompute(section, boundary, recompute=recompute)
        self._send_queue, self._work, self._now, self._emit = (
            context.send_queue,
            context.work,
            context.now,
            context.emit,
        )
        self._boundary, self._patience, self._window, self._clip = boundary, patience, window, clip
        self._by_visits = by_visits
        self._route_planner, self.measurements = (
            route_planner,
            route_planner.measurements if route_planner is not None else Measurements(context.now),
        )
        self._attempts: dict[int, Attempt] = {}
        self._account = GradientLedger()
        self._back: set[PeerId] = set()
        self._applies: dict[PeerId, Apply] = {}
        self._news = asyncio.Event()

    # Incoming events

    def on_frame(self, peer: PeerId, frame: Frame) -> None:
        """Handle a checked frame; ignore frames that are not of a pipeline or not of this step."""
        message = frame.message
        if not isinstance(message, (Passed, Activation, GradientSummary)) or message.step != self.next_step:
            return
        if not self.stage_holders.holds(peer):
            return
        if isinstance(message, GradientSummary):
            self._account.tallies.setdefault(peer, message)
            self._news.set()
            return
        current = self._attempts.get(message.micro)
        if isinstance(message, Activation):
            if current is not None:
                current.take(peer, message, frame.payload)
            return
        self._account.passed(peer, message)
        if current is not None:
            if not message.reason and message.attempt == current.attempt and peer in current.peers:
                self.measurements.passed(peer, message.micro, message.seconds, backward=message.backward)
            leg, since = current.due, current.since
            if current.passed(peer, message, self._now()) and not message.reason and leg[0] == peer:
                self.stage_holders.done(peer, self._patience.record(leg, since), backward=message.backward)

    def on_link_down(self, peer: PeerId, *, gone: bool) -> None:
        """Remove a peer without a link from this step."""
        self.stage_holders.lost.add(peer)
        self._back.discard(peer)
        self._account.give_up(peer, "out of reach")
        for current in self._attempts.values():
            if current.needs(peer):
                current.fail("out of reach", peer)
        self._news.set()

    def on_link_up(self, peer: PeerId) -> None:
        """Let a peer with a new link take part from the next step on."""
        if peer in self.stage_holders.lost:
            self._back.add(peer)

    def on_tick(self) -> None:
        """Do nothing: each micro-batch has its own time-out."""

    # Steps

    async def step(self, batches: Sequence[Batch], visits: Sequence[Visits] | None = None) -> StepOutcome:
        """Make one inner step on these micro-batches, all of shape [B, T]. `visits`: planned route of each.

        Raises ValueError for invalid micro-batches, Diverged if the origin's own part is not finite.
        """
        if not 0 < len(batches) <= MAX_MICROS or len({batch[0].shape for batch in batches}) != 1:
            raise ValueError(f"a step has 1…{MAX_MICROS} micro-batches of one shape")
        if visits is not None and len(visits) != len(batches):
            raise ValueError("a plan has a route for each micro-batch")
        began = self._now()
        self.stage_holders.lost -= self._back
        for peer in sorted(self._back):
            self.catch_up(peer)
        self._back.clear()
        self._account = GradientLedger()
        sequences: Sequence[Sequence[int]] = [(micro,) for micro in range(len(batches))]
        room, planned = asyncio.Semaphore(self._window), 0.0
        if visits is None and self._route_planner is not None:
            routes = await self._route_planner.routes(len(batches), self.stage_holders, self._work, self.next_step)
            if routes is not None:
                visits, sequences, planned = routes.visits, routes.sequences, routes.seconds
                room = asyncio.Semaphore(len(sequences))
        driving_since = self._now()

        async def drive(sequence: Sequence[int]) -> None:
            for micro in sequence:
                async with room:
                    await self._drive(micro, batches[micro], visits[micro] if visits is not None else None)

        async with asyncio.TaskGroup() as group:
            for sequence in sequences:
                group.create_task(drive(sequence))
        measured = self._now() - driving_since
        self.measurements.closed()
        await self._settle(batches[0][0].numel())
        account = self._account
        outcome = StepOutcome(
            self.next_step,
            dict(account.losses),
            frozenset(account.finished),
            account.counted(),
            account.lost,
            dict(account.skipped),
            account.attempts,
            self._now() - began,
            dict(account.computed),
            measured,
            planned,
        )
        self.next_step += 1
        return outcome

    async def _drive(self, micro: int, batch: Batch, visits: Visits | None) -> None:
        """Drive a micro-batch until it is done or given up."""
        payload: bytes = await self._compute(self._ends.begin, micro, batch[0])
        tried: Counter[PeerId] = Counter()
        path: tuple[Hop, ...] = ()
        for attempt in range(ATTEMPTS):
            claimed = self._account.where(micro)
            path = self.stage_holders.path(self.next_step, claimed, tried, visits, last=path)
            failure = await self._try(micro, attempt, path, batch, payload)
            if failure is None:
                wanted = [stage for stage, _ in visits] if visits is not None else sorted(self.stage_holders.holders)
                missed = tuple(stage for stage in wanted if stage not in {hop.stage for hop in path})
                if missed:
                    self._account.skipped[micro] = missed
                self._account.finish(micro, attempt)
                return
            self._emit("micro_batch_failed", {"micro": micro, "attempt": attempt, "reason": failure.reason})
            tried.update(failure.suspects)
            for peer in failure.suspects:
                if failure.reason == "stalled":
                    self.stage_holders.rest(peer, self.next_step)
                if failure.reason == "step":
                    self.catch_up(peer)
            for hop in path:
                over = Passed(self.next_step, micro, attempt, False, 0.0, "over")
                self._send_queue.control(hop.peer, over)
        self._ends.forget(micro)
        self._emit("micro_batch_given_up", {"micro": micro})

    async def _try(
        self, micro: int, attempt: int, path: tuple[Hop, ...], batch: Batch, payload: bytes
    ) -> Failure | None:
        """Make one attempt; return the failure, if any."""
        (size, length), step = batch[0].shape, self.next_step
        self._account.sent(micro, attempt, path)
        if not path:
            self._account.losses[micro] = await self._work(partial(self._ends.alone, micro, batch, payload))
            return None
        current = self._attempts[micro] = Attempt(micro, attempt, path, self._boundary, size, length, self._now())
        try:
            for hop in path:
                self._send_queue.control(hop.peer, Route(step, micro, attempt, size, length, path))
            self._send(path[0].peer, micro, attempt, payload, backward=False)
            there = await self._arrival(current)
            if isinstance(there, Failure):
                return there
            try:
                self._account.losses[micro], gradient = await self._compute(self._ends.turn, micro, batch, there)
            except CodecError:
                return Failure("payload", (path[-1].peer,))
            current.turn(self._now())
            self._account.turned(micro, attempt)
            self._send(path[-1].peer, micro, attempt, gradient, backward=True)
            back = await self._arrival(current)
            if isinstance(back, Failure):
                return back
            try:
                await self._compute(self._ends.finish, micro, batch, back)
            except CodecError:
                return Failure("payload", (path[0].peer,))
            return None
        finally:
            del self._attempts[micro]

    async def _arrival(self, current: Attempt) -> bytes | Failure:
        self.measurements.sent(current.micro, backward=current.backward)
        found = await current.arrival(self._patience)
        if not isinstance(found, Failure):
            self.measurements.arrived(current.micro, current.peers, backward=current.backward)
        return found

    async def _compute(self, part: Callable[..., Any], *arguments: Any) -> Any:
        """Compute the origin's own part of a micro-batch."""
        asked = self._now()
        found = await self._work(partial(part, *arguments))
        self.measurements.own(part.__name__, asked)
        return found

    def _send(self, to: PeerId, micro: int, attempt: int, payload: bytes, *, backward: bool) -> None:
        for number, piece in enumerate(pieces(payload)):
            self._send_queue.bulk(to, Frame(Activation(self.next_step, micro, attempt, backward, number), piece))

    # End of a step

    def catch_up(self, peer: PeerId) -> None:
        """Send the last values to apply, and the next step, to a peer that may have missed the end of steps."""
        if peer in self._applies:
            self._send_queue.control(peer, self._applies[peer])
        if self.next_step:
            self._send_queue.control(peer, Close(self.next_step - 1, ()))
            self._send_queue.control(peer, Apply(self.next_step - 1, 0.0, 1.0))

    def outdated(self, peer: PeerId, stage: int, round: int) -> None:
        """Tell a peer that another peer has a newer state of its stage."""
        self._send_queue.control(peer, Outdated(stage, round))

    async def _settle(self, tokens: int) -> None:
        """Close the step on all peers and apply it. `tokens`: of one micro-batch."""
        account, step = self._account, self.next_step
        asked, since = self.stage_holders.peers, self._now()
        for peer in asked:
            self._send_queue.control(peer, Close(step, tuple(sorted(account.of(peer)[1]))))
        await self._tallies(asked, since)
        squares: float = await self._work(self.update.squares)
        seen = len(account.losses)
        ours = squares < float("inf") and seen > 0
        scaled = squares / seen**2 if ours else 0.0
        norms = {0: math.sqrt(scaled)} if ours else {}
        for peer in asked:
            tally = account.tallies.get(peer)
            if tally is None or tally.reason or tally.squares < 0:
                account.give_up(peer, "silent" if tally is None else tally.reason or "squares")
        divisors = {peer: account.divisor(peer, by_visits=self._by_visits) for peer in asked}
        for peer, divisor in divisors.items():
            if divisor:
                part, (stage, _) = account.tallies[peer].squares / divisor**2, account.of(peer)
                scaled += part
                norms[stage] = max(norms.get(stage, 0.0), math.sqrt(part))
                self.stage_holders.did_well(peer)
        self.norms.update(norms)
        factor = clipping(scaled, self._clip)
        account.settle()
        for peer, divisor in divisors.items():
            self._applies[peer] = Apply(step, divisor, factor, account.loss)
            self._send_queue.control(peer, self._applies[peer])
        if ours:
            await self._work(partial(self.update.apply, step, float(seen), factor, tokens * seen))
        else:
            self._emit("gradient_lost", {"step": step, "reason": "not finite" if seen else "no micro-batch"})
        self.update.drop()
        self._ends.clear()

    async def _tallies(self, asked: Sequence[PeerId], since: float) -> None:
        """Wait for the answers of reachable peers, for each at most as long as it may take."""
        while missing := [p for p in asked if p not in self._account.tallies and p not in self.stage_holders.lost]:
            self._news.clear()
            left = max(self._patience.left((peer, False), since) for peer in missing)
            if not left:
                for peer in missing:
                    self.stage_holders.rest(peer, self.next_step)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._news.wait()
