"""The cheapest path of one micro-batch that keeps CC1 to CC3, compiled: exact, layer by layer of the path."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.kernels import kernel

from .searchkernel import MOST_AHEAD, MOST_BEHIND

NEW, SEEN, BEHIND = 0, 1, 2
"""Where a path stands: at its frontier with the stage before it left out, or visited; or in that stage, one behind. What else
it has visited does not matter to what it may visit next.
"""


@kernel
def route(
    origin: int,
    edge: NDArray[np.float64],
    node: NDArray[np.float64],
    stage: NDArray[np.int64],
    path: NDArray[np.int64],
) -> float:
    """Fill `path` (length,) with the cheapest path of `origin`; returns its cost, infinite when there is none.

    `edge` (peers, peers): cost of a hop, there and back; `node` (peers,): cost of a visit, infinite where it is forbidden;
    `stage` (peers,): where each peer is, -1 for nowhere. The hop from the last peer to the origin counts too.
    """
    length, peers = path.shape[0], stage.shape[0]
    swaps = MOST_BEHIND + 1
    cost = np.full((length, peers, 3, swaps), np.inf)
    came = np.full((length, peers, 3, swaps), -1, np.int64)
    cost[0, origin, NEW, 0] = node[origin]
    for layer in range(1, length):
        for here in range(peers):
            at = stage[here]
            for flag in range(3):
                frontier = at + 1 if flag == BEHIND else at
                for swap in range(swaps):
                    so_far = cost[layer - 1, here, flag, swap]
                    if so_far == np.inf:
                        continue
                    for there in range(peers):
                        to = stage[there]
                        if to <= 0 or abs(to - at) > MOST_AHEAD:
                            continue
                        if to > frontier:
                            after, swapped = (SEEN if to == frontier + 1 else NEW), swap
                        elif to == frontier - 1 and flag == NEW and swap < MOST_BEHIND:
                            after, swapped = BEHIND, swap + 1
                        else:
                            continue
                        new = so_far + edge[here, there] + node[there]
                        if new < cost[layer, there, after, swapped]:
                            cost[layer, there, after, swapped] = new
                            came[layer, there, after, swapped] = (here * 3 + flag) * swaps + swap
    best, last = np.inf, -1
    for here in range(peers):
        for flag in range(3):
            for swap in range(swaps):
                whole = cost[length - 1, here, flag, swap] + edge[here, origin]
                if whole < best:
                    best, last = whole, (here * 3 + flag) * swaps + swap
    if last < 0:
        return np.inf
    for layer in range(length - 1, -1, -1):
        here, flag, swap = last // (3 * swaps), last // swaps % 3, last % swaps
        path[layer] = here
        last = came[layer, here, flag, swap]
    return best
