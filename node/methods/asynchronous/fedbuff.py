"""Buffered asynchronous averaging (FedBuff, arXiv 2106.06639): a round takes the peers that are ready.

Every peer owns chunks, votes and applies the commit in every round, with or without a contribution. A round opens
`exchange.straggler_timeout` after the first contribution, or when all have contributed. State, digests and quorums are
those of DiLoCo. A peer trains from θ̄ as it was after its last contribution (`start`), while its replica follows the
rounds of others:

    Δ = (start − θ) / (1 + s)^a                s: age of `start` in whole steps; dropped above `outer.staleness`
    θ̄ ← Outer(θ̄, k / n · mean Δ)                k: contributors of the round, n: `outer.buffer_size` or the number of members
    s ← s + k / n                                for peers without a contribution in the round

The contributor scales Δ, since no other peer can check its age. Weights in the record are tokens. With k = n this is
DiLoCo.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.state_sync.state_sync import FetchedState
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.kernels.common import outer_step
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica import Replica
from thinwire.node.state.replica_buffers import Read
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import PeerId, Proposal
from thinwire.swarm.method_specs.buffered_async import AsynchronousSpec


class FedBuffReplica(Replica):
    """Replica with θ̄ and its momentum, and two private values: `start` and `age`. Made by `begin`.

    start: parameters that the model was set to. age: whole steps that θ̄ has made since; n contributions count as one
    step.
    """

    asynchronous: ClassVar[bool] = True
    start: Floats
    age: float
    spec: AsynchronousSpec

    def _begin(self, manifest: Manifest, layout: Layout) -> None:
        self.spec = manifest.method(AsynchronousSpec)
        self.reset()

    def reset(self) -> None:
        """Let the model start from θ̄."""
        self.start, self.age = self.theta.copy(), 0.0

    def install(self, fetched: FetchedState) -> int:
        """Take over a fetched state and start from it. Returns the bytes that changed."""
        changed = super().install(fetched)
        self.reset()
        return changed

    def contribution(self, read: Read, *, attempt: int, peers: int) -> Iterable[memoryview]:
        """Encode the difference to `start`, scaled by its age."""
        return self.coder.differences(self.start, read, (1 + self.age) ** -self.spec.staleness_exponent)

    def whole(self, members: Sequence[PeerId]) -> int:
        """Return the contributions that make a whole step in a round with these members."""
        return self.spec.buffer_size or len(members)

    def commit(self, outcome: Outcome, me: PeerId, since: Read | None = None) -> bool:
        """Commit the next round; `start` ages by the part of a step that the round made."""
        stepped = super().commit(outcome, me, since)
        self.age += len(outcome.contributors) / self.whole(self.members)
        return stepped

    def _outer_step(self, results: Sequence[Buffer], proposal: Proposal, me: PeerId, since: Read | None) -> bool:
        """Make the part k / n of an outer step."""
        outer, share = self.outer, np.float32(len(proposal.contributors) / self.whole(proposal.members))
        for low, high, mean in self.coder.decoded(results):
            mean *= share
            outer_step(self.theta[low:high], self.momentum[low:high], mean, *outer.sgd)
        return True
