"""What an arrangement of peers in stages costs, compiled: DT-FM's objective (Yuan et al. 2022, arXiv 2206.01288)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.kernels import inline, kernel

from .searchkernel import below, fraction

EXACT = 12
"""Up to so many stages the shortest way is exact, beyond it goes to the nearest."""


@kernel
def match(
    delays: NDArray[np.float64], few: NDArray[np.int64], many: NDArray[np.int64], partner: NDArray[np.int64]
) -> float:
    """Pair every peer of `few` with another one of `many` so that the longest delay is least, and return that.

    `partner` (len(many),) gets indices of `few`, -1 for nobody. Grown by one peer at a time, along the path whose longest
    hop is shortest.
    """
    partner[:] = -1
    longest = 0.0
    for index in range(few.shape[0]):
        reach, done = np.full(many.shape[0], np.inf), np.zeros(many.shape[0], np.bool_)
        before = np.full(many.shape[0], -1, np.int64)
        row, so_far, last = index, longest, -1
        while True:
            nearest = -1
            for column in range(many.shape[0]):
                if done[column]:
                    continue
                through = max(so_far, delays[few[row], many[column]])
                if through < reach[column]:
                    reach[column] = through
                    before[column] = last
                if nearest < 0 or reach[column] < reach[nearest]:
                    nearest = column
            so_far, last = reach[nearest], nearest
            done[nearest] = True
            if partner[nearest] < 0:
                break
            row = partner[nearest]
        longest = max(longest, so_far)
        while last >= 0:
            previous = before[last]
            partner[last] = partner[previous] if previous >= 0 else index
            last = previous
    return longest


@kernel
def way(costs: NDArray[np.float64], order: NDArray[np.int64]) -> float:
    """Shortest way over all stages from stage 0 on, into `order` (stages,); returns its length. `costs`: (stages, stages)."""
    stages = costs.shape[0]
    order[0] = 0
    if stages == 1:
        return 0.0
    if stages > EXACT:
        seen = np.zeros(stages, np.bool_)
        seen[0] = True
        length = 0.0
        for place in range(1, stages):
            nearest = -1
            for stage in range(stages):
                if not seen[stage] and (
                    nearest < 0 or costs[order[place - 1], stage] < costs[order[place - 1], nearest]
                ):
                    nearest = stage
            order[place] = nearest
            seen[nearest] = True
            length += costs[order[place - 1], nearest]
        return length
    # Held and Karp 1962: the best way over each set of stages that ends at each of them.
    sets = 1 << (stages - 1)
    best = np.full((sets, stages), np.inf)
    came = np.zeros((sets, stages), np.int64)
    for stage in range(1, stages):
        best[1 << (stage - 1), stage] = costs[0, stage]
    for visited in range(1, sets):
        for here in range(1, stages):
            if best[visited, here] == np.inf:
                continue
            for there in range(1, stages):
                if visited >> (there - 1) & 1:
                    continue
                wider = visited | 1 << (there - 1)
                new = best[visited, here] + costs[here, there]
                if new < best[wider, there]:
                    best[wider, there] = new
                    came[wider, there] = here
    visited, here = sets - 1, 1
    for stage in range(1, stages):
        if best[visited, stage] < best[visited, here]:
            here = stage
    total: float = best[visited, here]
    for place in range(stages - 1, 0, -1):
        order[place] = here
        here, visited = came[visited, here], visited & ~(1 << (here - 1))
    return total


@inline
def _between(delays: NDArray[np.float64], one: NDArray[np.int64], two: NDArray[np.int64]) -> float:
    if one.shape[0] > two.shape[0]:
        one, two = two, one
    return match(delays, one, two, np.empty(two.shape[0], np.int64))


@inline
def _within(delays: NDArray[np.float64], members: NDArray[np.int64]) -> float:
    longest = 0.0
    for a in members:
        for b in members:
            longest = max(longest, delays[a, b])
    return longest


@kernel
def arrange(
    peers: NDArray[np.int64],
    ends: NDArray[np.int64],
    delays: NDArray[np.float64],
    sync: float,
    hot: float,
    tries: int,
    seed: int,
) -> float:
    """Change the order of `peers` in place by annealing; returns its cost: `sync` times the longest delay inside a stage, and
    twice the shortest way over the stages, where two stages are as far apart as the longest hop of their best matching.

    `peers` (n,): the members of stage s are those from `ends[s]` up to `ends[s + 1]`; who stands after them is in no stage.
    """
    stages, count = ends.shape[0] - 1, peers.shape[0]
    state = np.array([seed], np.uint64)
    order = np.empty(stages, np.int64)
    home = np.full(count, stages)
    for stage in range(stages):
        home[ends[stage] : ends[stage + 1]] = stage
    inside = np.zeros(stages)
    costs = np.zeros((stages, stages))
    for a in range(stages):
        inside[a] = _within(delays, peers[ends[a] : ends[a + 1]])
        for b in range(a):
            costs[a, b] = costs[b, a] = _between(delays, peers[ends[a] : ends[a + 1]], peers[ends[b] : ends[b + 1]])
    value: float = sync * inside.max() + 2 * way(costs, order)
    best: float = value
    found = peers.copy()
    for turn in range(tries):
        i, j = below(state, count), below(state, count)
        if home[i] == home[j]:
            continue
        peers[i], peers[j] = peers[j], peers[i]
        old_inside, old_costs = inside.copy(), costs.copy()
        for changed in (home[i], home[j]):
            if changed >= stages:
                continue
            members = peers[ends[changed] : ends[changed + 1]]
            inside[changed] = _within(delays, members)
            for other in range(stages):
                if other != changed:
                    apart = _between(delays, members, peers[ends[other] : ends[other + 1]])
                    costs[changed, other] = costs[other, changed] = apart
        new = sync * inside.max() + 2 * way(costs, order)
        if new > value - hot * (1.0 - turn / tries) * np.log(fraction(state)):
            peers[i], peers[j] = peers[j], peers[i]
            inside, costs = old_inside, old_costs
            continue
        value = new
        if value < best:
            best = value
            found[:] = peers
    peers[:] = found
    return best
