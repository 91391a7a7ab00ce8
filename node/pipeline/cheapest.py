"""The cheapest path of one micro-batch that keeps CC1 to CC3: exact, one visit after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .eventkernel import BACKWARD, LOSS
from .instance import Instance
from .searchkernel import MOST_AHEAD

Floats: TypeAlias = NDArray[np.float64]

NEW, SEEN, BEHIND = 0, 1, 2
"""Where a path stands: at its frontier with the stage before it left out, or visited; or in that stage, one behind. What else
it has visited does not matter to what it may visit next.
"""
FLAGS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Hop:
    """One kind of hop: from which standing to which, how many visits behind it adds, and `cost` (peers, peers) there and back,
    infinite where there is no such hop.
    """

    before: int
    after: int
    behind: int
    cost: Floats


def hops(instance: Instance) -> tuple[Hop, ...]:
    """All that the rules allow."""
    cost = instance.delays + instance.delays.T
    at, to = instance.stage[:, None], instance.stage[None, :]
    near = (at >= 0) & (to > 0) & (abs(to - at) <= MOST_AHEAD)

    def hop(before: int, after: int, allowed: NDArray[np.bool_], behind: int = 0) -> Hop:
        return Hop(before, after, behind, np.where(near & allowed, cost, np.inf))

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
    instance: Instance, allowed: tuple[Hop, ...], origin: int, price: Floats
) -> tuple[tuple[int, ...] | None, float]:
    """The path and its seconds, forward, loss and backward; `price` (peers,) is added to visits, infinite forbids them.

    None, and infinity, when no path is allowed.
    """
    visit = (1 + BACKWARD) * instance.work + price
    swaps = instance.swaps + 1
    cost = np.full((FLAGS, swaps, instance.peers), np.inf)
    cost[NEW, 0, origin] = (1 + LOSS + BACKWARD) * instance.work[origin]
    came = []
    for _ in range(1, instance.length):
        new = np.full_like(cost, np.inf)
        source = np.zeros((*cost.shape, 3), np.int64)
        for hop in allowed:
            for swap in range(swaps - hop.behind):
                ways = cost[hop.before, swap][:, None] + hop.cost
                here = ways.argmin(axis=0)
                least = np.take_along_axis(ways, here[None], axis=0)[0] + visit
                better = least < new[hop.after, swap + hop.behind]
                new[hop.after, swap + hop.behind][better] = least[better]
                entries = source[hop.after, swap + hop.behind]
                entries[better] = [hop.before, swap, 0]
                entries[better, 2] = here[better]
        cost = new
        came.append(source)
    back = instance.delays[:, origin] + instance.delays[origin]
    whole = cost + back
    last = np.unravel_index(int(whole.argmin()), whole.shape)
    total = float(whole[last])
    if not np.isfinite(total):
        return None, np.inf
    flag, swap, peer = (int(index) for index in last)
    path = [peer]
    for source in reversed(came):
        flag, swap, peer = source[flag, swap, peer].tolist()
        path.append(peer)
    return tuple(reversed(path)), total
