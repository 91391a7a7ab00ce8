"""One-round overlap with eager updates (arXiv 2502.12996): the exchange of one round takes all the next one's inner steps.

A replica does not wait for the mean of what all have just trained. It makes the outer step on the mean of the round before, and
puts its own new pseudo-gradient in the place of its old one, of which it knows the share s = 1/M in the mean:

    Outer_m(mean Δʳ⁻¹ + s Δ_mʳ − s Δ_mʳ⁻¹)

The outer step is linear, so this is the step of all on the mean, θ̄, which is the same bits everywhere, and a step of one's own
on the rest, e: a replica trains from θ̄ + e. Of e nothing is told to anybody, and who forgets it starts from θ̄. Without momentum
it is −η s Δ_mʳ. The share is the one that the last group gives; what was put in with it is what is taken out again.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Self, cast

import numpy as np
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounding import encode
from thinwire.collectives.shards import Grid
from thinwire.collectives.statesync import Fetched
from thinwire.compression.codec import Buffer, Codec, Floats
from thinwire.compression.kernels import outer_step
from thinwire.node.overlap import OverlappedRounds
from thinwire.node.rounds import Rounds
from thinwire.node.session import Session
from thinwire.node.waiting import Work
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import PeerId

from .fragments import Layout
from .outer import Read, Replica, Write


class EagerReplica(Replica):
    """θ̄ and its momentum, and what is this peer's alone: see the module. Made by `begin`.

    start: what the model was set to, θ̄ + e. ahead, drift: e and its momentum. sent: the last contribution, of which e has
    `share`.
    """

    start: Floats
    ahead: Floats
    drift: Floats
    sent: Floats
    share: float
    _open: bool

    @classmethod
    def begin(cls, manifest: Manifest, layout: Layout, codec: Any, theta: Floats, members: Sequence[PeerId]) -> Self:
        """See Replica."""
        replica = super().begin(manifest, layout, codec, theta, members)
        replica.reset()
        return replica

    def reset(self) -> None:
        """See Replica: the model starts from θ̄."""
        self.start = self.theta.copy()
        self.ahead, self.drift, self.sent = (np.zeros(self.size, np.float32) for _ in range(3))
        self.share, self._open = 0.0, False

    def prepare(self, read: Read, share: float, *, lr: float, momentum: float, nesterov: bool) -> None:
        """Take what was trained since `start` as the next contribution, with the last one where that came to nothing, and move
        `start` on. `share`: what the contribution will have in the mean.

        Raises FloatingPointError, with nothing changed, when a parameter is not finite.
        """
        delta = np.empty(self.size, np.float32)
        read(0, delta.size, delta)
        np.subtract(self.start, delta, out=delta)
        if not np.isfinite(np.dot(delta, delta)):
            raise FloatingPointError("the pseudo-gradient is not finite")
        if self._open:
            delta += self.sent
        self.sent *= np.float32(self.share)
        change = np.float32(share) * delta - self.sent
        outer_step(self.ahead, self.drift, change, lr, momentum, nesterov)
        self.sent, self.share, self._open = delta, share, True
        np.add(self.theta, self.ahead, out=self.start)

    def encode(self, read: Read, grid: Grid, codec: Codec) -> Iterator[memoryview]:
        """What `prepare` has taken, chunk by chunk."""
        for index in range(len(grid)):
            start, stop = grid.span(index)
            payload = np.empty(codec.nbytes(stop - start), np.uint8)
            encode(codec, self.sent[start:stop], payload)
            yield payload.data

    def apply(
        self,
        results: Sequence[Buffer],
        grid: Grid,
        codec: Codec,
        *,
        members: Sequence[PeerId],
        lr: float,
        momentum: float,
        nesterov: bool,
    ) -> None:
        """See Replica."""
        super().apply(results, grid, codec, members=members, lr=lr, momentum=momentum, nesterov=nesterov)
        self._open = False

    def install(self, fetched: Fetched) -> int:
        """See Replica."""
        changed = super().install(fetched)
        self.reset()
        return changed


class EagerRounds(OverlappedRounds):
    """What `Rounds` is where a replica starts from what all have agreed on."""

    def __init__(self, session: Session, manifest: Manifest, *, read: Read, write: Write, work: Work) -> None:
        super().__init__(session, manifest, read=read, write=write, work=work)
        self._last = manifest.run.rounds

    @property
    def _replica(self) -> EagerReplica:
        return cast(EagerReplica, self._session.replica)

    @property
    def _share(self) -> float:
        """What one contribution has in the mean of the next round, as far as can be known now."""
        return 1.0 / len({*self._replica.members, *self._session.ready, self._session.me})

    def _prepare(self) -> None:
        outer, replica = self._outer, self._replica
        replica.prepare(self._read, self._share, lr=outer.lr, momentum=outer.momentum, nesterov=outer.nesterov)
        self._write(replica.start)

    async def _average(self, average: Callable[[float | None], Coroutine[Any, Any, Outcome]]) -> Outcome:
        """See OverlappedRounds; what would be trained during the run's last round is for no other, so nothing is."""
        if self._replica.round + 1 != self._last:
            return await super()._average(average)
        self._told = self._given
        return await Rounds._average(self, average)

    async def _follow(self) -> None:
        """The model goes on from where it is: the next contribution is measured first. After the run's last round it is θ̄."""
        replica = self._replica
        if replica.round == self._last:
            await self._work(lambda: self._write(replica.theta))
