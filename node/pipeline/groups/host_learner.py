"""Learner of a peer that holds a stage other than the first; its origin drives the inner steps."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from thinwire.collectives.transport.payload_assembly import PayloadAssembly
from thinwire.compression.core.codec import CodecError
from thinwire.node.pipeline.groups.stage_learner import StageLearner
from thinwire.node.pipeline.model.frozen_embedding import FrozenEmbedding
from thinwire.node.pipeline.model.held_stage import HeldStage
from thinwire.node.pipeline.model.stage_optimizer import StageOptimizer
from thinwire.node.pipeline.step.host import Host
from thinwire.node.pipeline.step.step_context import StepContext
from thinwire.node.runtime.asyncio_extra import cancelled
from thinwire.node.training.learner import NOTHING, StepReport, WorkShare
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import short
from thinwire.swarm.identity.stage_claim import Seat
from thinwire.swarm.messages.registry import FrozenRows, PeerId, StageAssignment

AGAIN_SECONDS = 2.0
"""Seconds of silence of an origin after which the host repeats that it is ready."""


class HostLearner(StageLearner):
    """Learner and Handler of Presence. It works for its origin only while it makes inner steps.

    Its steps are counted by the turns of the swarm's rounds, like the origin's, so that a group ends them together.

    `round`: returns the last round in the stage's outer state. `orphaned`: called before steps and while the origin is
    silent; returns True if the origin is out of reach and has no successor, see `follow`. `able`: returns True if this
    peer can hold another stage, and its own stage has enough other holders.
    """

    def __init__(
        self,
        holding: HeldStage,
        host: Host,
        context: StepContext,
        *,
        round: Callable[[], int] = int,
        orphaned: Callable[[], bool] = lambda: False,
        able: Callable[[int], bool] = lambda stage: False,
    ) -> None:
        super().__init__(holding)
        self.host = host
        self._send_queue, self._work, self._now = context.send_queue, context.work, context.now
        self._coming, self._assembly = 0, holding.assembly
        """Tag of the frozen rows that are in transit to us, and their assembly."""
        self._at, self._until, self._last_frame_at, self._lone = 0, 0, 0.0, False
        self._round, self._orphaned, self._able = round, orphaned, able
        self._next: int | None = None

    @property
    def summary(self) -> str:
        """Describe the state in the group, for people."""
        recovered = f"; the stage was recovered, from: {self.source}" if self.source else ""
        moving = f"; moves to stage {self._next}" if self._next is not None else ""
        return f"inner step {self.host.step} of the group of {short(self.host.origin)}{recovered}{moving}"

    @property
    def next(self) -> Seat | None:
        """Return the seat that the origin wants us to take, if we can; asked between two turns."""
        if self._next is not None and not self._able(self._next):
            self._next = None
        return Seat(self._next, self.host.origin) if self._next is not None else None

    @property
    def update(self) -> StageOptimizer:
        """Inner optimizer of the stage."""
        return self.host.update

    # Learner

    def assign(self, share: WorkShare) -> None:
        """Ignore the data share: the origin has the data."""
        self._at = share.step

    async def steps(self, n: int, stop: asyncio.Event) -> StepReport:
        """Work until the origin has ended `n` inner steps, whether or not this peer took part in them."""
        host, began = self.host, self._now()
        first, target = host.step, self._at + n
        if stop.is_set() or not n:
            return NOTHING
        self._lone = self._orphaned()
        self._until = target
        if not self._lone:
            self._post()
        waking = asyncio.ensure_future(self._wake(stop))

        def over() -> bool:
            return stop.is_set() or self._lone or host.step >= target or host.ordered >= target

        try:
            while not over():
                await host.run(lambda: over() or self._arrived)
                if self._arrived:
                    found, self._coming = self._assembly, 0
                    await self._work(partial(self._freeze, found))
                    self._post()
        finally:
            self._until = 0
            await cancelled(waking)
        self._at += n if host.step == target else max(0, host.step - first)
        if host.step < target:
            host.abandon()
        tokens, made = host.update.take_tokens(), min(n, max(0, host.step - first))
        loss = host.loss if made else math.nan
        return StepReport(made, loss, loss, tokens, self._now() - began) if made or tokens else NOTHING

    @property
    def _arrived(self) -> bool:
        """Return True if new frozen rows have arrived completely."""
        return bool(self._coming) and self._assembly.complete

    def _freeze(self, found: PayloadAssembly) -> None:
        """Use the received rows. If they are invalid or have another tag, this peer is not ready."""
        with suppress(CodecError):
            self._holding.freeze(FrozenEmbedding.of(found.payload()))

    def _piece(self, message: FrozenRows, frame: Frame) -> None:
        if message.tag != self._coming:
            self._coming, self._assembly = message.tag, self._holding.assembly
        self._assembly.add(message.piece, frame.payload)
        if self._assembly.complete:
            self.host.wake()

    async def _wake(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.host.wake()

    def skip_to(self, round: int, peers: int) -> None:
        """Do nothing: the origin announces the number of the next step."""

    # Handler

    def on_frame(self, peer: PeerId, frame: Frame) -> None:
        """Pass frames of pipelines to the host, and frozen rows to their assembly."""
        if peer == self.host.origin:
            self._last_frame_at, message = self._now(), frame.message
            if (
                isinstance(message, StageAssignment)
                and message.stage != self._holding.stage
                and self._able(message.stage)
            ):
                self._next = message.stage
            if isinstance(message, FrozenRows):
                return self._piece(message, frame)
        self.host.on_frame(peer, frame)

    def on_link_down(self, peer: PeerId, *, gone: bool) -> None:
        """Take note of a broken link, above all to the origin."""
        self.host.on_link_down(peer, gone=gone)
        if peer == self.host.origin:
            self._last_frame_at = -math.inf

    def on_link_up(self, peer: PeerId) -> None:
        """Repeat to the origin that this peer is ready."""
        if peer == self.host.origin and self._until:
            self._post()

    def on_tick(self) -> None:
        """Repeat that this peer is ready. Without a link to the origin end the steps."""
        if self._until and self._now() > self._last_frame_at + AGAIN_SECONDS:
            self._lone = self._orphaned()
            if self._lone:
                self.host.wake()
            else:
                self._post()

    def follow(self, origin: PeerId) -> None:
        """Work for another origin from now on."""
        self._next = None
        self.host.follow(origin)
        if self._until:
            self._post()

    def rest(self) -> None:
        """End the steps in progress, because the stage's state is about to be replaced."""
        self._lone = True
        self.host.wake()

    def _post(self) -> None:
        self._last_frame_at = self._now()
        post = StageAssignment(
            self.host.step, self._until, self._holding.stage, self._holding.frozen.tag, self._round(), self.source
        )
        self._send_queue.control(self.host.origin, post)
