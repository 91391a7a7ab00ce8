"""Delayed Nesterov (Liu et al., arXiv 2401.09135): contributions come one by one, momentum moves once for all of them.

A contributor of a round is an arrival, and its g the mean of the round's. Of N arrivals, `arrivals` or as many as took part:

    each:         Δ ← Δ + g;  θ̄ ← θ̄ − η g / N
    every N-th:   m ← β m + Δ / N;  θ̄ ← θ̄ − η β m;  Δ ← 0

So N arrivals make one step of Nesterov on their mean, in whatever rounds they come. With Nesterov on every arrival each would
add to a momentum that the next one follows too: four equal ones move θ̄ by 12.1 times their length, these by 1.9.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from thinwire.compression.core.types import Buffer, Floats
from thinwire.node.methods.asynchronous.fedbuff import FedBuffReplica
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica import Read
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import MAX_GROUP, Open, PeerId


class DelayedNesterovReplica(FedBuffReplica):
    """After parameters and momentum the state has Δ, and how many arrivals are in it. Made by `begin`."""

    @classmethod
    def extra_size(cls, manifest: Manifest, layout: Layout) -> int:
        """Elements of Δ and of the count."""
        return layout.total + 1

    @property
    def waiting(self) -> Floats:
        """Δ (a view)."""
        return self.extra[: self.size]

    @property
    def arrived(self) -> int:
        """Arrivals in Δ, whatever a fetched state says."""
        return int(np.clip(np.nan_to_num(self.extra[self.size]), 0, MAX_GROUP))

    def _outer_step(self, results: Sequence[Buffer], opened: Open, me: PeerId, since: Read | None) -> bool:
        """Move theta by each arrival, and the momentum once for `outer.buffer_size` of them."""
        outer, whole, before, arrivals = self.outer, self.whole(opened.members), self.arrived, len(opened.contributors)
        lr, beta, part = np.float32(outer.sgd.lr), np.float32(outer.sgd.momentum), np.float32(1 / whole)
        *full, rest = dealt(before, arrivals, whole)
        for low, high, mean in self._means(results):
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
    """How many of the arrivals go into each step of the momentum, when `before` are waiting; at last how many are left over."""
    while before + arrivals >= whole:
        new = max(0, whole - before)
        yield new
        before, arrivals = 0, arrivals - new
    yield arrivals
