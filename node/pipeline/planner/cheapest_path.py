"""Cheapest path of one micro-batch that keeps CC1 to CC3: exact dynamic programming over visits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from thinwire.node.pipeline.planner.anneal_kernel import MOST_AHEAD
from thinwire.node.pipeline.planner.problem import Problem
from thinwire.node.pipeline.planner.simulate_kernel import BACKWARD, LOSS

Floats: TypeAlias = NDArray[np.float64]

NEW, SEEN, BEHIND = 0, 1, 2
"""Position of a path: at its frontier with the stage before it left out, or visited; or one behind.

Other visited stages do not affect the possible next visits.
"""
FLAGS = 3
"""Number of positions."""


@dataclass(frozen=True, slots=True, eq=False)
class GraphEdge:
    """Kind of hop: positions before and after, visits behind that it adds, `cost` (peers, peers).

    `cost`: seconds there and back, infinite if there is no such hop.
    """

    before: int
    after: int
    behind: int
    cost: Floats


def hops(instance: Problem) -> tuple[GraphEdge, ...]:
    """Return all hops that the rules allow."""
    cost = instance.delays + instance.delays.T
    at, to = instance.stage[:, None], instance.stage[None, :]
    near = (at >= 0) & (to > 0) & (abs(to - at) <= MOST_AHEAD)

    def hop(before: int, after: int, allowed: NDArray[np.bool_], behind: int = 0) -> GraphEdge:
        return GraphEdge(before, after, behind, np.where(near & allowed, cost, np.inf))

    return (
        hop(NEW, SEEN, to == at + 1),
        hop(NEW, NEW, to > at + 1),
        hop(SEEN, SEEN, to == at + 1),
        hop(SEEN, NEW, to > at + 1),
        hop(BEHIND, SEEN, to == at + 2),
        hop(BEHIND, NEW, to > at + 2),
        hop(NEW, BEHIND, to == at - 1, behind=1),
    )


def cheapest(
    instance: Problem, allowed: tuple[GraphEdge, ...], origin: int, price: Floats
) -> tuple[tuple[int, ...] | None, float]:
    """Return the path and its seconds (forward, loss and backward); None and infinity if there is none.

    `price` (peers,) is added to visits; infinite prices forbid them.
    """
    visit = (1 + BACKWARD) * instance.work + price
    swaps = instance.swaps + 1
    cost = np.full((FLAGS, swaps, instance.peers), np.inf)
    cost[NEW, 0, origin] = (1 + LOSS + BACKWARD) * instance.work[origin]
    sources = []
    for _ in range(1, instance.length):
        new = np.full_like(cost, np.inf)
        source = np.zeros((*cost.shape, 3), np.int64)
        for hop in allowed:
            for swap in range(swaps - hop.behind):
                costs = cost[hop.before, swap][:, None] + hop.cost
                here = costs.argmin(axis=0)
                least = np.take_along_axis(costs, here[None], axis=0)[0] + visit
                better = least < new[hop.after, swap + hop.behind]
                new[hop.after, swap + hop.behind][better] = least[better]
                entries = source[hop.after, swap + hop.behind]
                entries[better] = [hop.before, swap, 0]
                entries[better, 2] = here[better]
        cost = new
        sources.append(source)
    back = instance.delays[:, origin] + instance.delays[origin]
    whole = cost + back
    last = np.unravel_index(int(whole.argmin()), whole.shape)
    total = float(whole[last])
    if not np.isfinite(total):
        return None, np.inf
    flag, swap, peer = (int(index) for index in last)
    path = [peer]
    for source in reversed(sources):
        flag, swap, peer = source[flag, swap, peer].tolist()
        path.append(peer)
    return tuple(reversed(path)), total
