"""Replicas that train on from where they are when they send: what methods have in common in which a round is under way during
all of the next one's inner steps.

θ̄ makes its step as soon as a round commits, the same bits everywhere, as without overlap. The model is set to θ̄ when its next
contribution has been read, so that what it is trained from is one round older than it could be.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Self

import numpy as np
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.shards import Grid
from thinwire.collectives.statesync import Fetched
from thinwire.compression.codec import Codec, Floats
from thinwire.node.overlap import OverlappedRounds
from thinwire.node.rounds import Rounds
from thinwire.node.session import Session
from thinwire.node.waiting import Work
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import PeerId

from .fragments import Layout
from .outer import Read, Replica, Write


class LateReplica(Replica):
    """θ̄ and its momentum, and what is this peer's alone: see the module. Made by `begin`.

    start: what the model was set to. sent: the last contribution.
    """

    start: Floats
    sent: Floats
    _open: bool

    @classmethod
    def begin(cls, manifest: Manifest, layout: Layout, codec: Any, theta: Floats, members: Sequence[PeerId]) -> Self:
        """See Replica."""
        replica = super().begin(manifest, layout, codec, theta, members)
        replica.reset()
        return replica

    def reset(self) -> None:
        """See Replica: the model starts from θ̄."""
        self.start, self.sent = self.theta.copy(), np.zeros(self.size, np.float32)
        self._open = False

    def take(self, read: Read) -> Floats:
        """What was trained since `start`, with the last contribution where that came to nothing.

        Raises FloatingPointError when a parameter is not finite.
        """
        delta = np.empty(self.size, np.float32)
        read(0, delta.size, delta)
        np.subtract(self.start, delta, out=delta)
        if not np.isfinite(np.dot(delta, delta)):
            raise FloatingPointError("the pseudo-gradient is not finite")
        if self._open:
            delta += self.sent
        return delta

    def send(self, delta: Floats) -> None:
        """`delta` is the next contribution; the model goes on from `start`, which the caller moves."""
        self.sent, self._open = delta, True

    def encode(self, read: Read, grid: Grid, codec: Codec) -> Iterator[memoryview]:
        """The last contribution, chunk by chunk."""
        for index in range(len(grid)):
            start, stop = grid.span(index)
            yield self._encoded(codec, self.sent[start:stop])

    def moved(self, members: Sequence[PeerId]) -> None:
        """See Replica."""
        super().moved(members)
        self._open = False

    def install(self, fetched: Fetched) -> int:
        """See Replica."""
        changed = super().install(fetched)
        self.reset()
        return changed


class LateRounds(OverlappedRounds):
    """What `Rounds` is where everybody waits for the mean of what it has just trained."""

    def __init__(self, session: Session, manifest: Manifest, *, read: Read, write: Write, work: Work) -> None:
        super().__init__(session, manifest, read=read, write=write, work=work)
        self._last = manifest.run.rounds

    async def _average(self, average: Callable[[float | None], Coroutine[Any, Any, Outcome]]) -> Outcome:
        """See OverlappedRounds; what would be trained during the run's last round is for no other, so nothing is."""
        if self._session.replica.round + 1 != self._last:
            return await super()._average(average)
        self._told = self._given
        return await Rounds._average(self, average)

    async def _follow(self) -> None:
        """The model goes on from where it is: the next contribution is measured first. After the run's last round it is θ̄."""
        replica = self._session.replica
        if replica.round == self._last:
            await self._work(lambda: self._write(replica.theta))
