"""Simulated annealing over paths, compiled; and the rules that a path keeps, as the search asks for them.

`checker.py` says the same rules once more and by name: tests hold the two equal.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.kernels import inline, kernel

from .eventkernel import simulate

MOST_AHEAD = 4
"""Stages that one hop may span (CC2)."""

MOST_BEHIND = 2
"""Visits behind the frontier that a path may have, each by one stage (CC3)."""

MOVES = 5


@kernel
def keeps_rules(path: NDArray[np.int64], stage: NDArray[np.int64]) -> bool:
    """Whether a path begins at stage 0, visits no stage twice, jumps and swaps no more than allowed (CC1 to CC3).

    `path` (length,): peers; `stage` (peers,): where each peer is, -1 for nowhere.
    """
    if stage[path[0]] != 0:
        return False
    frontier, before, behind = 0, 0, 0
    for place in range(1, path.shape[0]):
        here = stage[path[place]]
        if here <= 0 or abs(here - before) > MOST_AHEAD:
            return False
        for other in range(1, place):
            if stage[path[other]] == here:
                return False
        if here < frontier:
            behind += 1
            if frontier - here > 1 or behind > MOST_BEHIND:
                return False
        frontier = max(frontier, here)
        before = here
    return True


@inline
def _draw(state: NDArray[np.uint64]) -> np.uint64:
    """The next 64 bits of a splitmix64 (Steele, Lea and Flood 2014)."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    bits = state[0]
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.uint64 = bits ^ (bits >> np.uint64(31))
    return mixed


@inline
def below(state: NDArray[np.uint64], bound: int) -> int:
    """From 0 up to `bound`, which is small beside 2^64."""
    return np.int64(_draw(state) % np.uint64(bound))  # type: ignore[return-value]


@inline
def fraction(state: NDArray[np.uint64]) -> float:
    """In (0, 1]."""
    return (np.float64(_draw(state) >> np.uint64(11)) + 1.0) * 2.0**-53


@inline
def _in_order(path: NDArray[np.int64], stage: NDArray[np.int64]) -> None:
    """Sort what follows the origin by stage."""
    for place in range(2, path.shape[0]):
        peer = path[place]
        hole = place
        while hole > 1 and stage[path[hole - 1]] > stage[peer]:
            path[hole] = path[hole - 1]
            hole -= 1
        path[hole] = peer


@kernel
def anneal(
    paths: NDArray[np.int64],
    stage: NDArray[np.int64],
    delays: NDArray[np.float64],
    work: NDArray[np.float64],
    memory: NDArray[np.int64],
    rounds: int,
    gap: float,
    hot: float,
    tries: int,
    seed: int,
) -> float:
    """Change `paths` (n, length) in place into the best that `tries` random moves find; returns its makespan in seconds.

    The paths must keep the rules and the loads (`memory` bounds how many paths share a peer, of stage 0 excepted); so does what
    comes back. `hot`: seconds of the first temperature; it falls to nothing.
    """
    count, length = paths.shape
    peers = stage.shape[0]
    state = np.array([seed], np.uint64)
    starts = np.empty((count * rounds, 2 * length + 1))
    load = np.zeros(peers, np.int64)
    for path in range(count):
        for place in range(length):
            load[paths[path, place]] += 1
    value = simulate(paths, delays, work, memory, rounds, gap, np.inf, starts)
    best, found = value, paths.copy()
    one, two = np.empty(length, np.int64), np.empty(length, np.int64)
    for turn in range(tries):
        a, b = below(state, count), below(state, count)
        i, j = 1 + below(state, length - 1), 1 + below(state, length - 1)
        move = below(state, MOVES)
        one[:] = paths[a]
        two[:] = paths[b]
        taken = -1
        if move == 0:  # two paths exchange peers of one stage; of stage 0: all that follows it
            i = below(state, length)
            for place in range(length):
                if stage[two[place]] == stage[one[i]]:
                    j = place
            if stage[two[j]] != stage[one[i]] or two[j] == one[i]:
                continue
            one[i], two[j] = two[j], one[i]
        elif move == 1 or move == 2:  # two paths exchange stages
            if stage[two[j]] == stage[one[i]]:
                continue
            one[i], two[j] = two[j], one[i]
            if move == 2:
                _in_order(one, stage)
                _in_order(two, stage)
        elif move == 3:  # one path goes in another order
            if i == j:
                continue
            b = a
            one[i], one[j] = one[j], one[i]
        else:  # one path goes over another peer
            taken = below(state, peers)
            if stage[taken] <= 0 or load[taken] >= memory[taken] or taken == one[i]:
                continue
            b = a
            one[i] = taken
        if a == b and (move == 1 or move == 2):
            continue
        if not keeps_rules(one, stage) or (b != a and not keeps_rules(two, stage)):
            continue
        limit = value - hot * (1.0 - turn / tries) * np.log(fraction(state))
        gone = paths[a, i]
        old_one, old_two = paths[a].copy(), paths[b].copy()
        if b != a:
            paths[b] = two
        paths[a] = one
        new = simulate(paths, delays, work, memory, rounds, gap, limit, starts)
        if new > limit or not np.isfinite(new):
            paths[b] = old_two
            paths[a] = old_one
            continue
        value = new
        if taken >= 0:
            load[taken] += 1
            load[gone] -= 1
        if value < best:
            best = value
            found[:] = paths
    paths[:] = found
    return best
