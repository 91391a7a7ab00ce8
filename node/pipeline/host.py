"""A peer that holds one stage: it does what the origin's routes say, and trusts nothing that comes along them.

All work is one task after the other: what the origin orders first, then gradients, then activations, each in the order of
their arrival; so what is held between forward and backward is soon worked off (1F1B) if only so many micro-batches are on
their way as there are stages.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from functools import partial

from thinwire.collectives.outbox import Outbox
from thinwire.compression.codec import CodecError
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import Activation, Apply, Close, Passed, PeerId, Route, Tally
from torch import Tensor

from ..presence import Emit
from ..waiting import Work
from .boundary import Boundary
from .early import Early
from .flight import NO_WAY_BACK, NO_WAY_ON
from .parcel import Parcel, pieces
from .stage import Stage
from .update import Update
from .way import Way

Order = Route | Passed | Close | Apply
"""What the origin says."""

ORDERS = 8192
"""Most orders of the origin that wait."""

LARGEST = 1 << 32
"""Most bytes of a micro-batch."""


class Refused(Exception):
    """A micro-batch that cannot be passed on: the reason for the origin."""


class Host:
    """See the module. A Handler of Presence; let `run` work until cancelled.

    `stage` is the number of the stage, `layers` what it computes, `update` the inner optimizer of its parameters. `room`:
    micro-batches that it holds at a time, each of `batch` sequences at most. `step`: the inner step that is next; `loss`:
    what the origin says of the last one. `work` runs what computes; `now`: seconds.
    """

    def __init__(
        self,
        me: PeerId,
        origin: PeerId,
        stage: int,
        layers: Stage,
        update: Update,
        boundary: Boundary,
        *,
        outbox: Outbox,
        work: Work,
        now: Callable[[], float],
        emit: Emit,
        context: int,
        room: int = 16,
        batch: int = 1 << 16,
        step: int = 0,
    ) -> None:
        self.step, self.loss = step, math.nan
        self.me, self.origin, self.stage, self.layers, self.update = me, origin, stage, layers, update
        self._boundary, self._outbox, self._work, self._now, self._emit = boundary, outbox, work, now, emit
        self._context, self._room, self._batch = context, room, batch
        self._ways: dict[int, Way] = {}
        self._busy: Way | None = None
        self._attempts: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        """Tokens of the micro-batches whose gradients were counted."""
        self._closed, self._tokens = False, 0
        self._early = Early()
        self._orders: deque[Order] = deque()
        self._back: deque[Way] = deque()
        self._there: deque[Way] = deque()
        self._awake = asyncio.Event()

    def routed(self, peer: PeerId, frame: Frame) -> None:
        """A checked frame; what is not of a pipeline, or not for us to hear, is ignored."""
        message = frame.message
        if isinstance(message, Activation):
            self._piece(peer, message, frame)
        elif isinstance(message, (Route, Passed, Close, Apply)) and peer == self.origin and len(self._orders) < ORDERS:
            self._orders.append(message)
        else:
            return
        self._awake.set()

    def lost(self, peer: PeerId, *, gone: bool) -> None:
        """The link to a peer broke: what we were to get from it, or to give to it, does not go that way."""
        self._early.forget(peer)
        for way in list(self._ways.values()):
            if peer != self.origin and peer in (way.before, way.after):
                self._refuse(way, way.forwarded, NO_WAY_BACK if peer == way.before else NO_WAY_ON)

    def reached(self, peer: PeerId) -> None:
        """A link is up: nothing begins with that."""

    def ticked(self) -> None:
        """Time passes: nothing here waits for it."""

    def wake(self) -> None:
        """Look anew whether to go on."""
        self._awake.set()

    @property
    def ordered(self) -> int:
        """The step that the origin's next order is about; the one in progress where nothing waits."""
        return self._orders[0].step if self._orders else self.step

    def abandon(self) -> None:
        """Give up what of the step in progress is not applied, because the parameters change: its gradients are of others."""
        for way in list(self._ways.values()):
            self._refuse(way, way.forwarded, "away")
        if self.layers.counted or self._tokens:
            self._emit("gradient lost", {"step": self.step, "reason": "away", "micros": len(self.layers.counted)})
            self.update.drop()
        self.layers.clear()
        self._sizes.clear()
        self._tokens = 0

    def follow(self, origin: PeerId) -> None:
        """From now on work for another origin: what the one before ordered is not about its steps."""
        self.abandon()
        self.origin, self._closed = origin, False
        self._orders.clear()

    async def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Work until cancelled, or until `until` holds between two tasks. Raises what goes wrong here."""
        while not until():
            if self._orders:
                await self._obey(self._orders.popleft())
            elif self._back:
                await self._pass(self._back.popleft(), backward=True)
            elif self._there:
                await self._pass(self._there.popleft(), backward=False)
            else:
                self._awake.clear()
                await self._awake.wait()

    # --- orders

    async def _obey(self, message: Order) -> None:
        match message:
            case Route():
                self._begin(message)
            case Passed():
                way = self._ways.get(message.micro)
                if way is not None and (message.step, message.attempt) == (self.step, way.route.attempt):
                    self._end(way)
            case Close():
                await self._close(message)
            case Apply():
                await self._apply(message)

    def _begin(self, route: Route) -> None:
        """Take up a route, or say why not."""
        if route.step != self.step or self._closed:
            return self._answer(route, "step")
        if route.attempt <= self._attempts.get(route.micro, -1):
            return  # we know a later one
        mine = [hop for hop in route.path if hop.peer == self.me]
        distinct = len({hop.peer for hop in route.path}) == len({hop.stage for hop in route.path}) == len(route.path)
        if not distinct or len(mine) != 1 or mine[0].stage != self.stage:
            return self._answer(route, "path")
        fits = 0 < route.batch <= self._batch and 0 < route.length <= self._context
        if not fits or self._boundary.nbytes(route.batch, route.length, backward=False) > LARGEST:
            return self._answer(route, "shape")
        old = self._ways.get(route.micro)
        if old is not None:
            self._end(old)
        if len(self._ways) >= self._room:
            return self._answer(route, "full")
        self._attempts[route.micro] = route.attempt
        self._ways[route.micro] = Way(route, self.me, self.origin, self._boundary)
        self._emit("routed", {"micro": route.micro, "attempt": route.attempt})
        for peer, frame in self._early.take(route.step, route.micro, route.attempt):
            assert isinstance(frame.message, Activation)
            self._piece(peer, frame.message, frame)

    async def _close(self, message: Close) -> None:
        """Settle whose micro-batches the gradient is of. What is of others is of no use: it cannot be taken out again."""
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
                self._emit("gradient lost", {"step": message.step, "reason": reason, "micros": len(counted)})
            self.update.drop()
        self._settle()
        self._closed, self._tokens = True, tokens
        self._emit("closed", {"step": message.step, "tokens": tokens})
        self._outbox.control(self.origin, Tally(message.step, squares, tokens, reason))

    def _settle(self) -> None:
        """Nothing of the step goes on."""
        for way in list(self._ways.values()):
            self._end(way)
        self.layers.clear()
        self._attempts.clear()
        self._sizes.clear()

    async def _apply(self, message: Apply) -> None:
        if message.step != self.step or not self._closed:
            return
        # A divisor counts micro-batches, and is one at least but for rounding: a tiny one makes what is finite infinite.
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

    # --- micro-batches

    def _piece(self, peer: PeerId, message: Activation, frame: Frame) -> None:
        if message.step < self.step:
            return
        way = self._ways.get(message.micro)
        if way is None or message.step > self.step or message.attempt > way.route.attempt:
            self._early.put(peer, frame)  # the route travels on another stream
            return
        entitled = way.after if message.backward else way.before
        if message.attempt != way.route.attempt or peer != entitled:
            return
        parcel = way.back if message.backward else way.there
        if parcel.add(message.piece, frame.payload):
            if parcel.whole:
                (self._back if message.backward else self._there).append(way)
        else:
            self._refuse(way, message.backward, "payload")

    async def _pass(self, way: Way, *, backward: bool) -> None:
        """Compute, and pass on what comes of it."""
        route = way.route
        if self._ways.get(route.micro) is not way:
            return
        if backward and not way.forwarded:
            return self._refuse(way, backward, "order")
        self._emit("backward" if backward else "forward", {"micro": route.micro, "attempt": route.attempt})
        began, self._busy = self._now(), way
        try:
            payload: bytes = await self._work(partial(self._backward if backward else self._forward, way))
        except Refused as refusal:
            return self._refuse(way, backward, str(refusal))
        finally:
            self._busy = None
            if self._ways.get(route.micro) is not way:
                self.layers.forget(route.micro)
        seconds = max(0.0, self._now() - began)
        way.forwarded = True
        if backward:
            self._emit("counted", {"micro": route.micro, "attempt": route.attempt})
        current = self._ways.get(route.micro) is way
        if backward or current:  # what was counted is counted, whatever link broke meanwhile
            self._outbox.control(self.origin, Passed(route.step, route.micro, route.attempt, backward, seconds, ""))
        if not current:
            return
        to = way.before if backward else way.after
        for number, piece in enumerate(pieces(payload)):
            self._outbox.bulk(to, Frame(Activation(route.step, route.micro, route.attempt, backward, number), piece))
        self._emit("passed", {"micro": route.micro, "backward": backward})
        if backward:
            self._end(way)

    def _forward(self, way: Way) -> bytes:
        x, tokens = self._unpack(way, way.there, backward=False)
        y = self.layers.forward(way.route.micro, x)
        return self._pack(y, tokens, backward=False)

    def _backward(self, way: Way) -> bytes:
        micro, counts = way.route.micro, way.hop.counts
        gradient, _ = self._unpack(way, way.back, backward=True)
        back = self.layers.backward(micro, gradient, count=counts)
        if counts:
            self._sizes[micro] = way.route.batch * way.route.length
        assert back is not None
        return self._pack(back, None, backward=True)

    def _unpack(self, way: Way, parcel: Parcel, *, backward: bool) -> tuple[Tensor, Tensor | None]:
        try:
            return self._boundary.unpack(parcel.payload(), way.route.batch, way.route.length, backward=backward)
        except CodecError:
            raise Refused("payload") from None

    def _pack(self, x: Tensor, tokens: Tensor | None, *, backward: bool) -> bytes:
        try:
            return self._boundary.pack(x, tokens, backward=backward)
        except CodecError:
            raise Refused("not finite") from None

    def _refuse(self, way: Way, backward: bool, reason: str) -> None:
        if self._ways.get(way.route.micro) is way:
            self._answer(way.route, reason, backward)
            self._end(way)

    def _answer(self, route: Route, reason: str, backward: bool = False) -> None:
        self._emit("refused", {"micro": route.micro, "attempt": route.attempt, "reason": reason})
        self._outbox.control(self.origin, Passed(route.step, route.micro, route.attempt, backward, 0.0, reason))

    def _end(self, way: Way) -> None:
        del self._ways[way.route.micro]
        if way is not self._busy:  # else what is being computed still needs it
            self.layers.forget(way.route.micro)
