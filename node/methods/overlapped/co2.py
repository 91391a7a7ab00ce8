"""CO2 (arXiv 2401.16265): a round takes all of the next round's inner steps; late steps count less.

    Λ = 1 + ‖x_t − x_{t−1}‖ / (‖x_{t−1} − x̄_{t−1}‖ + ε);  m ← clip(β m + (x_{t−1} − x̄_{t−1}) / Λ, ±φ);  x_{t+1} = x_t − α m

Round t is trained from x_t, and x̄_t is the mean of its results, so x_t − x̄_t is the mean of the contributions. After
the commit θ̄ is x_{t+1}, and the previous step is α times the momentum. So the state is θ̄ and m: a joiner fetches
these and trains from θ̄. Private are only the parameters from which the replica trains, and its last contribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.kernels.common import fp32_check
from thinwire.node.methods.overlapped.one_round_late import OneRoundLateReplica
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica_buffers import Read
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import PeerId, Proposal
from thinwire.swarm.method_specs.co2 import CO2

TINY = 1e-12
"""ε: makes the penalty finite when nothing was trained."""


class Co2Replica(OneRoundLateReplica):
    """Replica with θ̄ and its momentum, see OneRoundLateReplica. `clip`: φ, 0 for none. Made by `begin`."""

    clip: float

    def _begin(self, manifest: Manifest, layout: Layout) -> None:
        self.clip = manifest.method(CO2).momentum_clip
        super()._begin(manifest, layout)

    def measure(self, read: Read, peers: int) -> None:
        """Make the training since `start` the next contribution; the model continues from θ̄."""
        self.send(self.take(read))
        self.start[:] = self.theta

    def penalty(self, results: Sequence[Buffer]) -> float:
        """Return Λ of the next step, bit-identical on all peers."""
        gap = self.outer.sgd.lr * length([self.momentum])
        return 1.0 + gap / (length(mean for _, _, mean in self.coder.decoded(results)) + TINY)

    def _outer_step(self, results: Sequence[Buffer], proposal: Proposal, me: PeerId, since: Read | None) -> bool:
        """Make the CO2 step; it ignores `nesterov`."""
        outer, clip = self.outer, self.clip
        share, beta, alpha = (np.float32(x) for x in (1 / self.penalty(results), outer.sgd.momentum, outer.sgd.lr))
        for low, high, mean in self.coder.decoded(results):
            buffer = self.momentum[low:high]
            buffer *= beta
            mean *= share
            buffer += mean
            if clip:
                np.clip(buffer, -np.float32(clip), np.float32(clip), out=buffer)
            self.theta[low:high] -= alpha * buffer
        return True


def length(parts: Iterable[Floats]) -> float:
    """Return the L2 norm of a finite vector in parts, bit-identical on all machines."""
    return math.sqrt(sum(fp32_check(part.view(np.uint32))[1] for part in parts))
