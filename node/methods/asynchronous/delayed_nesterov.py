"""Delayed Nesterov (Liu et al., arXiv 2401.09135): the momentum moves once for N contributions.

Every contributor of a round is an arrival, with g the mean of the round. N is `outer.buffer_size`, or the number of
members:

    each arrival:    Δ ← Δ + g;  θ̄ ← θ̄ − η g / N
    each N-th:       m ← β m + Δ / N;  θ̄ ← θ̄ − η β m;  Δ ← 0

So N arrivals make one Nesterov step on their mean, in any number of rounds. If every arrival moved the momentum, four
equal ones would move θ̄ by 12.1 times their length instead of 1.9.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from thinwire.compression.core.types import Buffer, Floats
from thinwire.node.methods.asynchronous.fedbuff import FedBuffReplica
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica_buffers import Read
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import MAX_GROUP, PeerId, Proposal


class DelayedNesterovReplica(FedBuffReplica):
    """Outer state: parameters, momentum, Δ and the number of arrivals in Δ. Made by `begin`."""

    @classmethod
    def extra_size(cls, manifest: Manifest, layout: Layout) -> int:
        """Return the number of elements of Δ and of the count."""
        return layout.total + 1

    @property
    def waiting(self) -> Floats:
        """Δ (a view)."""
        return self.extra[: self.size]

    @property
    def arrived(self) -> int:
        """Number of contributions in Δ, clipped to a valid range: a fetched state may contain any value."""
        return int(np.clip(np.nan_to_num(self.extra[self.size]), 0, MAX_GROUP))

    def _outer_step(self, results: Sequence[Buffer], proposal: Proposal, me: PeerId, since: Read | None) -> bool:
        """Move theta by each arrival, and the momentum once for `outer.buffer_size` of them."""
        outer, whole, before, arrivals = (
            self.outer,
            self.whole(proposal.members),
            self.arrived,
            len(proposal.contributors),
        )
        lr, beta, part = np.float32(outer.sgd.lr), np.float32(outer.sgd.momentum), np.float32(1 / whole)
        *full, rest = dealt(before, arrivals, whole)
        for low, high, mean in self.coder.decoded(results):
            theta, momentum, waiting = self.theta[low:high], self.momentum[low:high], self.waiting[low:high]
            theta -= lr * np.float32(arrivals / whole) * mean
            for new in full:
                waiting += np.float32(new) * mean
                momentum *= beta
                momentum += part * waiting
                theta -= lr * beta * momentum
                waiting[:] = 0.0
            waiting += np.float32(rest) * mean
        self.extra[self.size] = rest if full else before + rest
        return True


def dealt(before: int, arrivals: int, whole: int) -> Iterator[int]:
    """Yield the arrivals for each step of the momentum, then the rest. `before`: arrivals already in Δ."""
    while before + arrivals >= whole:
        new = max(0, whole - before)
        yield new
        before, arrivals = 0, arrivals - new
    yield arrivals
