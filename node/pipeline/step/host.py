"""Host of one stage: executes the origin's routes, and checks everything that arrives along them.

Tasks run one after the other: orders of the origin first, then gradients, then activations, each in the order of
arrival. So the data held between forward and backward is released early (1F1B) if no more micro-batches are in progress
than there are stages.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from functools import partial

from thinwire.collectives.transport.payload_assembly import PayloadAssembly, pieces
from thinwire.compression.boundary_codec import Boundary
from thinwire.compression.core.codec import CodecError
from thinwire.node.pipeline.model.stage import Stage
from thinwire.node.pipeline.model.stage_optimizer import StageOptimizer
from thinwire.node.pipeline.step.early_activations import EarlyActivations
from thinwire.node.pipeline.step.micro_batch_attempt import NO_NEXT, NO_PREVIOUS
from thinwire.node.pipeline.step.route_hop import RouteHop
from thinwire.node.pipeline.step.step_context import StepContext
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Activation, Apply, Close, GradientSummary, Passed, PeerId, Route
from torch import Tensor

Order = Route | Passed | Close | Apply
"""Orders of the origin."""

ORDERS = 8192
"""Largest number of waiting orders."""

LARGEST = 1 << 32
"""Largest size of a micro-batch in bytes."""


class RefusedMicroBatch(Exception):
    """Micro-batch that cannot be passed on; the message is the reason for the origin."""


class Host:
    """Handler of Presence that works for an origin; let `run` run until cancelled.

    `stage`: number of the stage; `layers`: its computation; `update`: inner optimizer of its parameters. `room`:
    micro-batches that it holds at a time, each of at most `batch` sequences of at most `length` tokens. `step`: number of the
    next inner step; `loss`: loss of the last step as the origin announced it.
    """

    def __init__(
        self,
        context: StepContext,
        origin: PeerId,
        stage: int,
        layers: Stage,
        update: StageOptimizer,
        boundary: Boundary,
        *,
        length: int,
        room: int = 16,
        batch: int = 1 << 16,
        step: int = 0,
    ) -> None:
        self.step, self.loss = step, math.nan
        self.me, self.origin, self.stage, self.layers, self.update = context.me, origin, stage, layers, update
        self._send_queue, self._work, self._now, self._emit = (
            context.send_queue,
            context.work,
            context.now,
            context.emit,
        )
        self._boundary, self._length, self._room, self._batch = boundary, length, room, batch
        self._visits: dict[int, RouteHop] = {}
        self._busy: RouteHop | None = None
        self._attempts: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        """Tokens of the micro-batches whose gradients were counted."""
        self._closed, self._tokens = False, 0
        self._early = EarlyActivations()
        self._orders: deque[Order] = deque()
        self._back: deque[RouteHop] = deque()
        self._there: deque[RouteHop] = deque()
        self._awake = asyncio.Event()

    def on_frame(self, peer: PeerId, frame: Frame) -> None:
        """Handle a checked frame; ignore frames that are not of a pipeline or not for this host."""
        message = frame.message
        if isinstance(message, Activation):
            self._piece(peer, message, frame)
        elif isinstance(message, (Route, Passed, Close, Apply)) and peer == self.origin and len(self._orders) < ORDERS:
            self._orders.append(message)
        else:
            return
        self._awake.set()

    def on_link_down(self, peer: PeerId, *, gone: bool) -> None:
        """Drop micro-batches that were to come from this peer or go to it."""
        self._early.forget(peer)
        for visit in list(self._visits.values()):
            if peer != self.origin and peer in (visit.before, visit.after):
                self._refuse(visit, visit.forwarded, NO_PREVIOUS if peer == visit.before else NO_NEXT)

    def on_link_up(self, peer: PeerId) -> None:
        """Do nothing: no work starts with a new link."""

    def on_tick(self) -> None:
        """Do nothing: no work waits for time."""

    def wake(self) -> None:
        """Check again whether to continue."""
        self._awake.set()

    @property
    def ordered(self) -> int:
        """Step of the origin's next order; the one in progress if no order waits."""
        return self._orders[0].step if self._orders else self.step

    def abandon(self) -> None:
        """Give up the unapplied part of the step in progress: its gradients belong to old parameters."""
        for visit in list(self._visits.values()):
            self._refuse(visit, visit.forwarded, "away")
        if self.layers.counted or self._tokens:
            self._emit("gradient_lost", {"step": self.step, "reason": "away", "micros": len(self.layers.counted)})
            self.update.drop()
        self.layers.clear()
        self._sizes.clear()
        self._tokens = 0

    def follow(self, origin: PeerId) -> None:
        """Work for another origin from now on; orders of the old one belong to other steps."""
        self.abandon()
        self.origin, self._closed = origin, False
        self._orders.clear()

    async def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Work until cancelled, or until `until` is True between two tasks. Raises errors of this host."""
        while not until():
            if self._orders:
                await self._obey(self._orders.popleft())
            elif self._back:
                await self._process(self._back.popleft(), backward=True)
            elif self._there:
                await self._process(self._there.popleft(), backward=False)
            else:
                self._awake.clear()
                await self._awake.wait()

    # Orders

    async def _obey(self, message: Order) -> None:
        match message:
            case Route():
                self._begin(message)
            case Passed():
                visit = self._visits.get(message.micro)
                if visit is not None and (message.step, message.attempt) == (self.step, visit.route.attempt):
                    self._end(visit)
            case Close():
                await self._close(message)
            case Apply():
                await self._apply(message)

    def _begin(self, route: Route) -> None:
        """Take up a route, or answer why not."""
        if route.step != self.step or self._closed:
            return self._answer(route, "step")
        if route.attempt <= self._attempts.get(route.micro, -1):
            return  # A later attempt is known.
        mine = [hop for hop in route.path if hop.peer == self.me]
        distinct = len({hop.peer for hop in route.path}) == len({hop.stage for hop in route.path}) == len(route.path)
        if not distinct or len(mine) != 1 or mine[0].stage != self.stage:
            return self._answer(route, "path")
        fits = 0 < route.batch <= self._batch and 0 < route.length <= self._length
        if not fits or self._boundary.nbytes(route.batch, route.length, backward=False) > LARGEST:
            return self._answer(route, "shape")
        old = self._visits.get(route.micro)
        if old is not None:
            self._end(old)
        if len(self._visits) >= self._room:
            return self._answer(route, "full")
        self._attempts[route.micro] = route.attempt
        self._visits[route.micro] = RouteHop(route, self.me, self.origin, self._boundary)
        self._emit("routed", {"micro": route.micro, "attempt": route.attempt})
        for peer, frame in self._early.take(route.step, route.micro, route.attempt):
            assert isinstance(frame.message, Activation)
            self._piece(peer, frame.message, frame)

    async def _close(self, message: Close) -> None:
        """Fix the micro-batches of the gradient; it is void if it has others, which cannot be removed."""
        if message.step < self.step:
            return
        expected, counted = set(message.micros), self.layers.counted
        reason = "step" if message.step > self.step else "" if expected == counted else "other micro-batches"
        squares: float = await self._work(self.update.squares) if counted and not reason else 0.0
        if not squares < float("inf"):
            reason, squares = "not finite", 0.0
        self.step = message.step
        tokens = sum(self._sizes[micro] for micro in counted) if not reason else 0
        if reason:
            if counted:
                self._emit("gradient_lost", {"step": message.step, "reason": reason, "micros": len(counted)})
            self.update.drop()
        self._settle()
        self._closed, self._tokens = True, tokens
        self._emit("closed", {"step": message.step, "tokens": tokens})
        self._send_queue.control(self.origin, GradientSummary(message.step, squares, tokens, reason))

    def _settle(self) -> None:
        """End all work on the step."""
        for visit in list(self._visits.values()):
            self._end(visit)
        self.layers.clear()
        self._attempts.clear()
        self._sizes.clear()

    async def _apply(self, message: Apply) -> None:
        if message.step != self.step or not self._closed:
            return
        # A divisor counts micro-batches, so it is at least one except for rounding: a tiny one would make finite values
        # infinite.
        if self._tokens and message.divisor > 0.5 and 0 <= message.factor <= 1:
            apply = partial(self.update.apply, self.step, message.divisor, message.factor, self._tokens)
            await self._work(apply)
        self.update.drop()
        self.step += 1
        if 0 < message.loss < math.inf:
            self.loss = message.loss
        self._closed, self._tokens = False, 0
        self._early.older(self.step)
        self._emit("applied", {"step": message.step})

    # Micro-batches

    def _piece(self, peer: PeerId, message: Activation, frame: Frame) -> None:
        if message.step < self.step:
            return
        visit = self._visits.get(message.micro)
        if visit is None or message.step > self.step or message.attempt > visit.route.attempt:
            self._early.put(peer, frame)  # The route travels on another stream.
            return
        entitled = visit.after if message.backward else visit.before
        if message.attempt != visit.route.attempt or peer != entitled:
            return
        assembly = visit.back if message.backward else visit.there
        if assembly.add(message.piece, frame.payload):
            if assembly.complete:
                (self._back if message.backward else self._there).append(visit)
        else:
            self._refuse(visit, message.backward, "payload")

    async def _process(self, visit: RouteHop, *, backward: bool) -> None:
        """Compute a micro-batch and pass the result on."""
        route = visit.route
        if self._visits.get(route.micro) is not visit:
            return
        if backward and not visit.forwarded:
            return self._refuse(visit, backward, "order")
        self._emit("backward" if backward else "forward", {"micro": route.micro, "attempt": route.attempt})
        began, self._busy = self._now(), visit
        try:
            payload: bytes = await self._work(partial(self._backward if backward else self._forward, visit))
        except RefusedMicroBatch as refusal:
            return self._refuse(visit, backward, str(refusal))
        finally:
            self._busy = None
            if self._visits.get(route.micro) is not visit:
                self.layers.forget(route.micro)
        seconds = max(0.0, self._now() - began)
        visit.forwarded = True
        if backward:
            self._emit("counted", {"micro": route.micro, "attempt": route.attempt})
        current = self._visits.get(route.micro) is visit
        if backward or current:  # A counted gradient is counted, even if a link broke meanwhile.
            self._send_queue.control(self.origin, Passed(route.step, route.micro, route.attempt, backward, seconds, ""))
        if not current:
            return
        to = visit.before if backward else visit.after
        for number, piece in enumerate(pieces(payload)):
            self._send_queue.bulk(
                to, Frame(Activation(route.step, route.micro, route.attempt, backward, number), piece)
            )
        self._emit("passed", {"micro": route.micro, "backward": backward})
        if backward:
            self._end(visit)

    def _forward(self, visit: RouteHop) -> bytes:
        x, tokens = self._unpack(visit, visit.there, backward=False)
        y = self.layers.forward(visit.route.micro, x)
        return self._pack(y, tokens, backward=False)

    def _backward(self, visit: RouteHop) -> bytes:
        micro, counts = visit.route.micro, visit.hop.counts
        gradient, _ = self._unpack(visit, visit.back, backward=True)
        back = self.layers.backward(micro, gradient, count=counts)
        if counts:
            self._sizes[micro] = visit.route.batch * visit.route.length
        assert back is not None
        return self._pack(back, None, backward=True)

    def _unpack(self, visit: RouteHop, assembly: PayloadAssembly, *, backward: bool) -> tuple[Tensor, Tensor | None]:
        try:
            return self._boundary.unpack(assembly.payload(), visit.route.batch, visit.route.length, backward=backward)
        except CodecError:
            raise RefusedMicroBatch("payload") from None

    def _pack(self, x: Tensor, tokens: Tensor | None, *, backward: bool) -> bytes:
        try:
            return self._boundary.pack(x, tokens, backward=backward)
        except CodecError:
            raise RefusedMicroBatch("not finite") from None

    def _refuse(self, visit: RouteHop, backward: bool, reason: str) -> None:
        if self._visits.get(visit.route.micro) is visit:
            self._answer(visit.route, reason, backward)
            self._end(visit)

    def _answer(self, route: Route, reason: str, backward: bool = False) -> None:
        self._emit("refused", {"micro": route.micro, "attempt": route.attempt, "reason": reason})
        self._send_queue.control(self.origin, Passed(route.step, route.micro, route.attempt, backward, 0.0, reason))

    def _end(self, visit: RouteHop) -> None:
        del self._visits[visit.route.micro]
        if visit is not self._busy:  # A micro-batch that is being computed still needs its data.
            self.layers.forget(visit.route.micro)
