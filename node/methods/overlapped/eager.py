"""Eager updates (arXiv 2502.12996): a round takes all of the next round's inner steps.

A replica makes the outer step on the mean of the previous round, in which its new pseudo-gradient replaces its old one.
Their share in the mean is s = 1/M:

    Outer_m(mean Δʳ⁻¹ + s Δ_mʳ − s Δ_mʳ⁻¹)

The outer step is linear, so this is the common step on the mean, θ̄ (bit-identical everywhere), plus a private step on
the rest, e. A replica trains from θ̄ + e. Without momentum e is −η s Δ_mʳ. A process that restarts loses e and starts
from θ̄. A contribution is taken out with the same share with which it was put in.
"""

from __future__ import annotations

import numpy as np
from thinwire.compression.core.types import Floats
from thinwire.compression.kernels.common import outer_step
from thinwire.node.methods.overlapped.one_round_late import OneRoundLateReplica
from thinwire.node.state.replica_buffers import Read


class EagerReplica(OneRoundLateReplica):
    """Replica with θ̄ and its momentum, and private vectors. Made by `begin`.

    start: parameters that the model was set to, θ̄ + e. ahead, drift: e and its momentum. sent: the last contribution.
    """

    ahead: Floats
    drift: Floats
    _share: float
    """Share with which `ahead` has the last contribution."""

    def reset(self) -> None:
        super().reset()
        self.ahead, self.drift = (np.zeros(self.size, np.float32) for _ in range(2))
        self._share = 0.0

    def share(self, peers: int) -> float:
        """Return the expected share of one contribution in the mean of the next round."""
        return 1.0 / peers

    def measure(self, read: Read, peers: int) -> None:
        """Store the training since `start`, and the last contribution if it failed, as the next contribution.

        Raises FloatingPointError, with nothing changed, if a parameter is not finite.
        """
        outer, delta, share = self.outer, self.take(read), self.share(peers)
        self.sent *= np.float32(self._share)
        change = np.float32(share) * delta - self.sent
        outer_step(self.ahead, self.drift, change, *outer.sgd)
        self.send(delta)
        self._share = share
        np.add(self.theta, self.ahead, out=self.start)
