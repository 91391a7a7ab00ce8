"""One-round overlap with eager updates (arXiv 2502.12996): the exchange of one round takes all the next one's inner steps.

A replica does not wait for the mean of what all have just trained. It makes the outer step on the mean of the round before, and
puts its own new pseudo-gradient in the place of its old one, of which it knows the share s = 1/M in the mean:

    Outer_m(mean Δʳ⁻¹ + s Δ_mʳ − s Δ_mʳ⁻¹)

The outer step is linear, so this is the step of all on the mean, θ̄, which is the same bits everywhere, and a step of one's own
on the rest, e: a replica trains from θ̄ + e. Of e nothing is told to anybody, and who forgets it starts from θ̄. Without momentum
it is −η s Δ_mʳ. The share is the one that the last group gives; what was put in with it is what is taken out again.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from thinwire.compression.codec import Floats
from thinwire.compression.kernels import outer_step

from .late import LateReplica, LateRounds
from .outer import Read


class EagerReplica(LateReplica):
    """Besides θ̄ and its momentum it has what is this peer's alone: see the module. Made by `begin`.

    start: what the model was set to, θ̄ + e. ahead, drift: e and its momentum. sent: the last contribution, of which e has
    `share`.
    """

    ahead: Floats
    drift: Floats
    share: float

    def reset(self) -> None:
        """See Replica: the model starts from θ̄."""
        super().reset()
        self.ahead, self.drift = (np.zeros(self.size, np.float32) for _ in range(2))
        self.share = 0.0

    def prepare(self, read: Read, share: float, *, lr: float, momentum: float, nesterov: bool) -> None:
        """Take what was trained since `start` as the next contribution, with the last one where that came to nothing, and move
        `start` on. `share`: what the contribution will have in the mean.

        Raises FloatingPointError, with nothing changed, when a parameter is not finite.
        """
        delta = self.take(read)
        self.sent *= np.float32(self.share)
        change = np.float32(share) * delta - self.sent
        outer_step(self.ahead, self.drift, change, lr, momentum, nesterov)
        self.send(delta)
        self.share = share
        np.add(self.theta, self.ahead, out=self.start)


class EagerRounds(LateRounds):
    """What `Rounds` is where a replica starts from what all have agreed on."""

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
