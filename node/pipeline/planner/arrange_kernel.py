"""Cost of an arrangement of peers in stages, compiled: objective of DT-FM (arXiv 2206.01288)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.kernels.common import kernel
from thinwire.node.pipeline.planner.anneal_kernel import below, fraction

EXACT = 12
"""Largest number of stages with an exact shortest path; with more, a nearest-neighbour path is used."""

GUIDE = 0.5
"""Weight of the mean delays inside stages, beside that of the longest one, during the search."""


@kernel
def match(
    delays: NDArray[np.float64],
    peers: NDArray[np.int64],
    ends: NDArray[np.int64],
    a: int,
    b: int,
    partner: NDArray[np.int64],
) -> float:
    """Pair each peer of stage `a` with one of stage `b`; minimize and return the longest delay.

    `peers` (n,): stage s has those from `ends[s]` to below `ends[s + 1]`, `b` at least as many as `a`; `partner` (as
    many as `b` has) is filled with places in `a`, -1 for none. The matching grows by one peer at a time, along the path
    whose longest hop is shortest.
    """
    few, many = ends[a + 1] - ends[a], ends[b + 1] - ends[b]
    for column in range(many):
        partner[column] = -1
    longest = 0.0
    reach, done, before = np.empty(many), np.empty(many, np.bool_), np.empty(many, np.int64)
    for index in range(few):
        for column in range(many):
            reach[column], done[column], before[column] = np.inf, False, -1
        row, so_far, last = index, longest, -1
        while True:
            nearest = -1
            for column in range(many):
                if done[column]:
                    continue
                through = max(so_far, delays[peers[ends[a] + row], peers[ends[b] + column]])
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
def shortest_path(costs: NDArray[np.float64], order: NDArray[np.int64]) -> float:
    """Write the shortest path over all stages from stage 0 into `order` (stages,); return its length.

    `costs`: (stages, stages).
    """
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
    # Held and Karp 1962: the best path over each set of stages, for each last stage.
    sets = 1 << (stages - 1)
    best = np.full((sets, stages), np.inf)
    previous = np.zeros((sets, stages), np.int64)
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
                    previous[wider, there] = here
    visited, here = sets - 1, 1
    for stage in range(1, stages):
        if best[visited, stage] < best[visited, here]:
            here = stage
    total: float = best[visited, here]
    for place in range(stages - 1, 0, -1):
        order[place] = here
        here, visited = previous[visited, here], visited & ~(1 << (here - 1))
    return total


@kernel
def stage_distance(
    delays: NDArray[np.float64], peers: NDArray[np.int64], ends: NDArray[np.int64], a: int, b: int
) -> float:
    """Return the distance of two stages: the longest hop of their best matching."""
    if ends[a + 1] - ends[a] > ends[b + 1] - ends[b]:
        a, b = b, a
    partner = np.empty(ends[b + 1] - ends[b], np.int64)
    return match(delays, peers, ends, a, b, partner)


@kernel
def _inside(
    delays: NDArray[np.float64],
    peers: NDArray[np.int64],
    ends: NDArray[np.int64],
    stage: int,
    longest: NDArray[np.float64],
    mean: NDArray[np.float64],
) -> None:
    """Compute the longest delay inside a stage, and the mean of its delays."""
    most, total = 0.0, 0.0
    for i in range(ends[stage], ends[stage + 1]):
        for j in range(ends[stage], ends[stage + 1]):
            most = max(most, delays[peers[i], peers[j]])
            total += delays[peers[i], peers[j]]
    size = ends[stage + 1] - ends[stage]
    longest[stage] = most
    mean[stage] = total / (size * size)


@kernel
def _largest(values: NDArray[np.float64]) -> float:
    largest = 0.0
    for value in values:
        largest = max(largest, value)
    return largest


@kernel
def _refresh(
    delays: NDArray[np.float64],
    peers: NDArray[np.int64],
    ends: NDArray[np.int64],
    stage: int,
    longest: NDArray[np.float64],
    mean: NDArray[np.float64],
    costs: NDArray[np.float64],
) -> None:
    """Recompute what depends on the members of a stage after a change."""
    stages = ends.shape[0] - 1
    if stage == stages:
        return
    _inside(delays, peers, ends, stage, longest, mean)
    for other in range(stages):
        if other != stage:
            costs[stage, other] = costs[other, stage] = stage_distance(delays, peers, ends, stage, other)


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
    """Change the order of `peers` in place by annealing; return the cost.

    The cost is `sync` times the longest delay inside a stage, plus twice the shortest path over the stages; the
    distance of two stages is the longest hop of their best matching. `peers` (n,): stage s has those from `ends[s]` to
    below `ends[s + 1]`; peers after the last stage are in none.
    """
    stages, count = ends.shape[0] - 1, peers.shape[0]
    state = np.empty(1, np.uint64)
    state[0] = seed
    order, stage_of, found = np.empty(stages, np.int64), np.full(count, stages), np.empty(count, np.int64)
    longest, mean, costs = np.zeros(stages), np.zeros(stages), np.zeros((stages, stages))
    for stage in range(stages):
        for place in range(ends[stage], ends[stage + 1]):
            stage_of[place] = stage
        _inside(delays, peers, ends, stage, longest, mean)
        for other in range(stage):
            costs[stage, other] = costs[other, stage] = stage_distance(delays, peers, ends, stage, other)
    best, best_guide, value = np.inf, np.inf, np.inf
    i, j = 0, 0
    for turn in range(tries + 1):
        if turn:
            i, j = below(state, count), below(state, count)
            if stage_of[i] == stage_of[j]:
                continue
            peers[i], peers[j] = peers[j], peers[i]
            _refresh(delays, peers, ends, stage_of[i], longest, mean, costs)
            _refresh(delays, peers, ends, stage_of[j], longest, mean, costs)
        cost = sync * _largest(longest) + 2 * shortest_path(costs, order)
        # The longest delay gives no direction while several stages share it; the means do.
        guide = cost
        for stage in range(stages):
            guide += GUIDE * sync * mean[stage] / stages
        if turn and guide > value - hot * (1.0 - turn / tries) * np.log(fraction(state)):
            peers[i], peers[j] = peers[j], peers[i]
            _refresh(delays, peers, ends, stage_of[i], longest, mean, costs)
            _refresh(delays, peers, ends, stage_of[j], longest, mean, costs)
            continue
        value = guide
        if cost < best or (cost == best and guide < best_guide):
            best, best_guide = cost, guide
            for place in range(count):
                found[place] = peers[place]
    for place in range(count):
        peers[place] = found[place]
    return best
