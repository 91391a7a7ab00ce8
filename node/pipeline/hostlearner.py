"""What a peer trains that holds a stage of a model other than the first: the inner steps are its origin's."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from thinwire.collectives.outbox import Outbox
from thinwire.compression.codec import CodecError
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity import short
from thinwire.swarm.protocol import FrozenRows, PeerId, Post
from thinwire.swarm.seat import Seat

from ..learner import NOTHING, Share, StepReport
from ..waiting import Work, cancelled
from .frozen import Frozen
from .holding import Holding
from .host import Host
from .parcel import Parcel
from .stagelearner import StageLearner
from .update import Update

AGAIN_SECONDS = 2.0
"""How long an origin is silent before it is told again that we are ready."""


class HostLearner(StageLearner):
    """A Learner, and a Handler of Presence: it works for its origin while it makes inner steps, and at no other time.

    Its steps are counted as the origin's are, by the turns of the swarm's rounds; so all of a group end them together.
    """

    def __init__(self, holding: Holding, host: Host, *, outbox: Outbox, work: Work, now: Callable[[], float]) -> None:
        super().__init__(holding)
        self.host = host
        self._outbox, self._work, self._now = outbox, work, now
        self._coming, self._parcel = 0, holding.parcel
        """Tag of the frozen rows that are on their way to us, and what has come of them."""
        self._at, self._until, self._heard, self._lone = 0, 0, 0.0, False
        self.round: Callable[[], int] = int
        """The last round in the stage's outer state."""
        self.lacking: Callable[[], bool] = lambda: False
        """Called before steps, and while the origin is silent: whether it is out of reach, and nobody in its place. See
        `follow`.
        """
        self.able: Callable[[int], bool] = lambda stage: False
        """Whether we can hold another stage, and ours can do without us."""
        self._next: int | None = None

    @property
    def said(self) -> str:
        """How we do in our group, for people."""
        brought = f"; the stage was brought back, from: {self.source}" if self.source else ""
        going = f"; goes to stage {self._next}" if self._next is not None else ""
        return f"inner step {self.host.step} of the group of {short(self.host.origin)}{brought}{going}"

    @property
    def next(self) -> Seat | None:
        """Where the origin wants us instead, if we can go; asked between two turns."""
        if self._next is not None and not self.able(self._next):
            self._next = None
        return Seat(self._next, self.host.origin) if self._next is not None else None

    @property
    def update(self) -> Update:
        """The stage's inner optimizer."""
        return self.host.update

    # --- as in Learner

    def assign(self, share: Share) -> None:
        """The data is the origin's business."""
        self._at = share.step

    async def steps(self, n: int, stop: asyncio.Event) -> StepReport:
        """Work until `n` inner steps are over for the origin, whether or not we had part in them."""
        host, began = self.host, self._now()
        first, target = host.step, self._at + n
        if stop.is_set() or not n:
            return NOTHING
        self._lone = self.lacking()
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
                    found, self._coming = self._parcel, 0
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
        """Whether there are other frozen rows to be taken up."""
        return bool(self._coming) and self._parcel.whole

    def _freeze(self, found: Parcel) -> None:
        """Take up what has come; with what is no such rows, or not those that it was called, we are not ready."""
        with suppress(CodecError):
            self._holding.freeze(Frozen.of(found.payload()))

    def _piece(self, message: FrozenRows, frame: Frame) -> None:
        if message.tag != self._coming:
            self._coming, self._parcel = message.tag, self._holding.parcel
        self._parcel.add(message.piece, frame.payload)
        if self._parcel.whole:
            self.host.wake()

    async def _wake(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.host.wake()

    def skip_to(self, round: int, peers: int) -> None:
        """The origin says which step is next."""

    # --- as in Handler

    def routed(self, peer: PeerId, frame: Frame) -> None:
        """See Handler."""
        if peer == self.host.origin:
            self._heard, message = self._now(), frame.message
            if isinstance(message, Post) and message.stage != self._holding.stage and self.able(message.stage):
                self._next = message.stage
            if isinstance(message, FrozenRows):
                return self._piece(message, frame)
        self.host.routed(peer, frame)

    def lost(self, peer: PeerId, *, gone: bool) -> None:
        """See Handler."""
        self.host.lost(peer, gone=gone)
        if peer == self.host.origin:
            self._heard = -math.inf

    def reached(self, peer: PeerId) -> None:
        """See Handler."""
        if peer == self.host.origin and self._until:
            self._post()

    def ticked(self) -> None:
        """Say again that we are ready, to an origin that may not have been when we said it. Without one there are no steps."""
        if self._until and self._now() > self._heard + AGAIN_SECONDS:
            self._lone = self.lacking()
            if self._lone:
                self.host.wake()
            else:
                self._post()

    def follow(self, origin: PeerId) -> None:
        """From now on work for another origin."""
        self._next = None
        self.host.follow(origin)
        if self._until:
            self._post()

    def rest(self) -> None:
        """End the steps in progress: the stage's state is to be another one."""
        self._lone = True
        self.host.wake()

    def _post(self) -> None:
        self._heard = self._now()
        post = Post(
            self.host.step, self._until, self._holding.stage, self._holding.frozen.tag, self.round(), self.source
        )
        self._outbox.control(self.host.origin, post)
