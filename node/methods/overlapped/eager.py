"""One-round overlap with eager updates (arXiv 2502.12996): the exchange of one round takes all the next one's inner steps.

A replica does not wait for the mean of what all have just trained. It makes the outer step on the mean of the round before, and
puts its own new pseudo-gradient in the place of its old one, of which it knows the share s = 1/M in the mean:

    Outer_m(mean Δʳ⁻¹ + s Δ_mʳ − s Δ_mʳ⁻¹)

The outer step is linear, so this is the step of all on the mean, θ̄, which is the same bits everywhere, and a step of one's own
on the rest, e: a replica trains from θ̄ + e. Of e nothing is told to anybody, and who forgets it starts from θ̄. Without momentum
it is −η s Δ_mʳ. The share is the one that the last group gives; what was put in with it is what is taken out again.
"""

from __future__ import annotations

import numpy as np
from thinwire.compression.core.types import Floats
from thinwire.compression.kernels.base import outer_step
from thinwire.node.methods.overlapped.one_round_late import OneRoundLateReplica
from thinwire.node.state.replica import Read


class EagerReplica(OneRoundLateReplica):
    """θ̄ and its momentum, and values that only this peer has: see the module. Made by `begin`.

    start: what the model was set to, θ̄ + e. ahead, drift: e and its momentum. sent: the last contribution.
    """

    ahead: Floats
    drift: Floats
    _share: float
    """Share of the last contribution that is in `ahead`."""

    def reset(self) -> None:
        """Start from θ̄."""
        super().reset()
        self.ahead, self.drift = (np.zeros(self.size, np.float32) for _ in range(2))
        self._share = 0.0

    def share(self, peers: int) -> float:
        """Share that one contribution has in the mean of the next round, as far as it can be known now."""
        return 1.0 / peers

    def measure(self, read: Read, peers: int) -> None:
        """Take what was trained since `start` as the next contribution, with the last one where that came to nothing, and move
        `start`. Raises FloatingPointError, with nothing changed, when a parameter is not finite.
        """
        outer, delta, share = self.outer, self.take(read), self.share(peers)
        self.sent *= np.float32(self._share)
        change = np.float32(share) * delta - self.sent
        outer_step(self.ahead, self.drift, change, *outer.sgd)
        self.send(delta)
        self._share = share
        np.add(self.theta, self.ahead, out=self.start)
