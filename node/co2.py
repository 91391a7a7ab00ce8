"""CO2 (arXiv 2401.16265): a round is under way during all of the next one's inner steps, and what comes late counts less.

    Λ = 1 + ‖x_t − x_{t−1}‖ / (‖x_{t−1} − x̄_{t−1}‖ + ε);  m ← clip(β m + (x_{t−1} − x̄_{t−1}) / Λ, ±φ);  x_{t+1} = x_t − α m

x_t is what round t is trained from, and x̄_t the mean of what all have made of it, so x_t − x̄_t is the mean of what they send.
All of it is θ̄'s: when that mean is here, θ̄ is x_{t+1}, and what it came there by is the step before, which is α times the
momentum. So the state is θ̄ and m and nothing else: a joiner gets these, trains from θ̄, and is where the others are; and a
replica has for itself only from where it trains and what it has sent last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
from thinwire.collectives.shards import Grid
from thinwire.compression.codec import Buffer, Codec, Floats
from thinwire.compression.kernels import fp32_check
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import PeerId

from .fragments import Layout
from .late import LateReplica, LateRounds

TINY = 1e-12
"""ε: what keeps the penalty finite when nothing was trained."""


class Co2Replica(LateReplica):
    """θ̄ and its momentum; see LateReplica. `clip`: φ, 0 for none. Made by `begin`."""

    clip: float

    @classmethod
    def begin(cls, manifest: Manifest, layout: Layout, codec: Any, theta: Floats, members: Sequence[PeerId]) -> Self:
        """See Replica."""
        replica = super().begin(manifest, layout, codec, theta, members)
        replica.clip = manifest.outer.clip
        return replica

    def penalty(self, results: Sequence[Buffer], grid: Grid, codec: Codec, lr: float) -> float:
        """Λ of the next step, the same bits everywhere."""
        gap = lr * length([self.momentum])
        return 1.0 + gap / (length(mean for _, _, mean in self.means(results, grid, codec)) + TINY)

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
        """See Replica. There is no `nesterov`."""
        share, beta, alpha = (np.float32(x) for x in (1 / self.penalty(results, grid, codec, lr), momentum, lr))
        for low, high, mean in self.means(results, grid, codec):
            buffer = self.momentum[low:high]
            buffer *= beta
            mean *= share
            buffer += mean
            if self.clip:
                np.clip(buffer, -np.float32(self.clip), np.float32(self.clip), out=buffer)
            self.theta[low:high] -= alpha * buffer
        self.moved(members)


class Co2Rounds(LateRounds):
    """What `Rounds` is where all wait: the model starts from θ̄ as it is when the next contribution has been read."""

    def _prepare(self) -> None:
        replica = self._session.replica
        assert isinstance(replica, Co2Replica)
        replica.send(replica.take(self._read))
        replica.start[:] = replica.theta
        self._write(replica.start)


def length(parts: Iterable[Floats]) -> float:
    """The L2 norm of a vector in parts, of finite numbers; the same bits on every machine."""
    return math.sqrt(sum(fp32_check(part.view(np.uint32))[1] for part in parts))
