"""Simulated annealing over paths, compiled, with the rules of paths in the form that the search needs.

`constraints.py` has the same rules by name; tests compare the two.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.kernels.common import kernel
from thinwire.node.pipeline.planner.simulate_kernel import simulate

MOST_AHEAD = 4
"""Largest number of stages that one hop may span (CC2)."""

MOVES = 5
"""Kinds of random moves."""


@kernel
def keeps_rules(paths: NDArray[np.int64], row: int, stage: NDArray[np.int64], swaps: int) -> bool:
    """Return True if a path starts at stage 0, visits no stage twice, and keeps rules CC1 to CC3.

    `paths` (n, length): peers; row `row` is checked; `stage` (peers,): stage of each peer, -1 for none; `swaps`: visits
    behind the frontier.
    """
    if stage[paths[row, 0]] != 0:
        return False
    frontier, before, behind = 0, 0, 0
    for place in range(1, paths.shape[1]):
        here = stage[paths[row, place]]
        if here <= 0 or abs(here - before) > MOST_AHEAD:
            return False
        for other in range(1, place):
            if stage[paths[row, other]] == here:
                return False
        if here < frontier:
            behind += 1
            if frontier - here > 1 or behind > swaps:
                return False
        frontier = max(frontier, here)
        before = here
    return True


@kernel
def _draw(state: NDArray[np.uint64]) -> np.uint64:
    """Return the next 64 bits of a splitmix64 generator (Steele, Lea and Flood 2014)."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    bits = state[0]
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.uint64 = bits ^ (bits >> np.uint64(31))
    return mixed


@kernel
def below(state: NDArray[np.uint64], bound: int) -> int:
    """Return a random integer from 0 to below `bound`, which must be small beside 2^64."""
    return np.int64(_draw(state) % np.uint64(bound))  # type: ignore[return-value]


@kernel
def fraction(state: NDArray[np.uint64]) -> float:
    """Return a random number in (0, 1]."""
    return (np.float64(_draw(state) >> np.uint64(11)) + 1.0) * 2.0**-53


@kernel
def _in_order(paths: NDArray[np.int64], row: int, stage: NDArray[np.int64]) -> None:
    """Sort the visits after the origin by stage."""
    for place in range(2, paths.shape[1]):
        peer = paths[row, place]
        hole = place
        while hole > 1 and stage[paths[row, hole - 1]] > stage[peer]:
            paths[row, hole] = paths[row, hole - 1]
            hole -= 1
        paths[row, hole] = peer


@kernel
def _copy(source: NDArray[np.int64], row: int, target: NDArray[np.int64], to: int) -> None:
    for place in range(source.shape[1]):
        target[to, place] = source[row, place]


@kernel
def anneal(
    paths: NDArray[np.int64],
    stage: NDArray[np.int64],
    delays: NDArray[np.float64],
    work: NDArray[np.float64],
    memory: NDArray[np.int64],
    rounds: int,
    gap: float,
    swaps: int,
    hot: float,
    tries: int,
    seed: int,
) -> float:
    """Improve `paths` (n, length) in place with `tries` random moves; return the makespan in seconds.

    Input and output keep the rules and the loads (`memory` limits the paths that share a peer, except in stage 0).
    `hot`: first temperature in seconds; it falls to zero.
    """
    count, length = paths.shape
    peers = stage.shape[0]
    state = np.empty(1, np.uint64)
    state[0] = seed
    starts = np.empty((count * rounds, 2 * length + 1))
    load = np.zeros(peers, np.int64)
    for path in range(count):
        for place in range(length):
            load[paths[path, place]] += 1
    value = simulate(paths, delays, work, memory, rounds, gap, np.inf, starts)
    best, found = value, np.empty((count, length), np.int64)
    for path in range(count):
        _copy(paths, path, found, path)
    pair = np.empty((4, length), np.int64)  # The two paths that a move changes: new values, and old values.
    for turn in range(tries):
        a, b = below(state, count), below(state, count)
        i, j = 1 + below(state, length - 1), 1 + below(state, length - 1)
        move = below(state, MOVES)
        if move > 2:  # A single path.
            b = a
        elif move > 0 and a == b:
            continue
        for row in range(0, 4, 2):
            _copy(paths, a, pair, row)
            _copy(paths, b, pair, row + 1)
        taken, gone = -1, pair[0, i]
        if move == 0:  # Two paths exchange peers of one stage; for stage 0, everything after the origin.
            i = below(state, length)
            for place in range(length):
                if stage[pair[1, place]] == stage[pair[0, i]]:
                    j = place
            if stage[pair[1, j]] != stage[pair[0, i]] or pair[1, j] == pair[0, i]:
                continue
            pair[0, i], pair[1, j] = pair[1, j], pair[0, i]
        elif move < 3:  # Two paths exchange stages.
            if stage[pair[1, j]] == stage[pair[0, i]]:
                continue
            pair[0, i], pair[1, j] = pair[1, j], pair[0, i]
            if move == 2:
                _in_order(pair, 0, stage)
                _in_order(pair, 1, stage)
        elif move == 3:  # One path changes its order.
            if i == j:
                continue
            pair[0, i], pair[0, j] = pair[0, j], pair[0, i]
        else:  # One path uses another peer.
            taken = below(state, peers)
            if stage[taken] <= 0 or load[taken] >= memory[taken] or taken == gone:
                continue
            pair[0, i] = taken
        if not keeps_rules(pair, 0, stage, swaps) or (b != a and not keeps_rules(pair, 1, stage, swaps)):
            continue
        limit = value - hot * (1.0 - turn / tries) * np.log(fraction(state))
        _copy(pair, 1, paths, b)
        _copy(pair, 0, paths, a)
        new = simulate(paths, delays, work, memory, rounds, gap, limit, starts)
        if new > limit or new == np.inf:
            _copy(pair, 3, paths, b)
            _copy(pair, 2, paths, a)
            continue
        value = new
        if taken >= 0:
            load[taken] += 1
            load[gone] -= 1
        if value < best:
            best = value
            for path in range(count):
                _copy(paths, path, found, path)
    for path in range(count):
        _copy(found, path, paths, path)
    return best
