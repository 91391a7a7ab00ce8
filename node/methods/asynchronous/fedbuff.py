"""Buffered asynchronous averaging (FedBuff, arXiv 2106.06639): a round is of whoever is ready, the others train on.

Everybody takes part in every round: owns chunks, votes, and follows its verdict, whether it contributes or not. A round opens
when the first contribution has come and `grace` is over, or all have contributed. So state, digests and quorums are those of
DiLoCo; what differs is from where a contribution was measured. A peer trains from θ̄ as it was when its last one came into a
round, and keeps that, while its replica follows the rounds of others:

    Δ = (start − θ) / (1 + s)^a                s: steps since `start`; given up when there are more than `staleness`
    θ̄ ← Outer(θ̄, k / n · mean Δ)                k: contributors of the round, n: `arrivals`, or all who took part in it
    s ← s + k / n                                for those who were not in it

Who sends Δ has scaled it: that it is s steps old nobody else could check, as nobody can check its tokens. The weights in
the record are tokens. As k of n were in the round it moves θ̄ by as much of a whole step; with all of them it is DiLoCo's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.state_sync import FetchedState
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.kernels.base import outer_step
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica import Read, Replica
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import Open, PeerId
from thinwire.swarm.methods.buffered_async import AsynchronousSpec


class FedBuffReplica(Replica):
    """θ̄ and its momentum, and this peer's alone: what its model was set to, `start`, and its `age`, the whole steps that θ̄
    has been moved by since: n contributions make one, in however many rounds. Made by `begin`.
    """

    asynchronous: ClassVar[bool] = True
    start: Floats
    age: float
    spec: AsynchronousSpec

    def _begin(self, manifest: Manifest, layout: Layout) -> None:
        """Start from θ̄."""
        self.spec = manifest.method(AsynchronousSpec)
        self.reset()

    def reset(self) -> None:
        """Start from θ̄."""
        self.start, self.age = self.theta.copy(), 0.0

    def install(self, fetched: FetchedState) -> int:
        """Take over a fetched state, and start from it."""
        changed = super().install(fetched)
        self.reset()
        return changed

    def contribution(self, read: Read, *, attempt: int, peers: int) -> Iterable[memoryview]:
        """Encode what was trained since `start`, scaled by its age."""
        return self._encode_from(self.start, read, (1 + self.age) ** -self.spec.staleness_exponent)

    def whole(self, members: Sequence[PeerId]) -> int:
        """Contributions that make a whole step, in a round with these members."""
        return self.spec.buffer_size or len(members)

    def commit(self, outcome: Outcome, me: PeerId, since: Read | None = None) -> bool:
        """Commit the next round; the model's start is older by the part of a step that it made."""
        stepped = super().commit(outcome, me, since)
        self.age += len(outcome.contributors) / self.whole(self.members)
        return stepped

    def _outer_step(self, results: Sequence[Buffer], opened: Open, me: PeerId, since: Read | None) -> bool:
        """Make the part of a step that these contributors are of a whole one."""
        outer, share = self.outer, np.float32(len(opened.contributors) / self.whole(opened.members))
        for low, high, mean in self._means(results):
            mean *= share
            outer_step(self.theta[low:high], self.momentum[low:high], mean, *outer.sgd)
        return True
