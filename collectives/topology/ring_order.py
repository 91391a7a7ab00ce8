"""Order of the peers in a ring: the slowest link as fast as possible, then the least total time.

A ring is as fast as its slowest link, so the mean of all rates, or of their inverses, would be the wrong primary
objective. Filling and emptying the ring takes the sum of the times of all links; if these are unknown, the sum of all
rates is maximised instead. The result is exact up to EXACT peers, by dynamic programming over subsets (Held and Karp,
"A dynamic programming approach to sequencing problems", 1962), first on which links are fast enough, then on the value
of these links. Beyond that, a local search starts from the given order and reverses (2-opt) or moves (or-opt) segments
as long as that helps. Pure functions: equal figures give equal orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

EXACT = 12
"""Maximum number of peers for which the optimum is guaranteed."""

SEGMENT = 3
"""Longest segment that is moved as a whole."""

STEEP = 1e-3
"""Relative cost of slow links other than the slowest.

With it the search improves an order even where the number of slowest links does not change.
"""

Rates = NDArray[np.float64]
"""rates[i, j]: bytes/s from i to j; 0 or non-finite if unknown. The diagonal is ignored."""

Trips = NDArray[np.float64]
"""trips[i, j]: seconds from i to j; 0 or non-finite if unknown."""

CLASSES = 2
"""Classes of rates per doubling, if times are known; within a class the shorter route wins."""


def best(rates: Rates, trips: Trips | None = None) -> list[int]:
    """Return an order of 0 … n - 1 that starts with 0; each peer sends to the next, the last to the first.

    An unknown rate counts as the median of the known ones, an unknown time as the longest, because the nearest peers
    are announced first. If nothing is known, the order is the given one. Raises ValueError unless the figures are
    square matrices.
    """
    known = _filled(rates, np.median)
    times = _filled(trips, np.max) if trips is not None else None
    if times is None:
        if known is None:
            return list(range(len(rates)))
        return _exact(known, known) if len(known) <= EXACT else _searched(known, known, list(range(len(known))))
    known = np.ones_like(times) if known is None else 2.0 ** (np.floor(CLASSES * np.log2(known)) / CLASSES)
    return _exact(known, -times) if len(known) <= EXACT else _searched(known, -times, _nearest(times))


def score(order: Sequence[int], rates: Rates) -> tuple[float, float]:
    """Return the value of an order: its slowest link, then the sum of all links."""
    links = [float(rates[a, b]) for a, b in pairwise([*order, order[0]])]
    return min(links), sum(links)


def _filled(rates: Rates, guess: Callable[[Rates], np.float64]) -> Rates | None:
    """Return the figures with unknown ones filled in; None if they do not distinguish any orders."""
    found = np.array(rates, np.float64)
    if found.ndim != 2 or found.shape[0] != found.shape[1]:
        raise ValueError(f"link figures must be a square matrix, not one of shape {found.shape}")
    np.fill_diagonal(found, 0.0)
    good = np.isfinite(found) & (found > 0)
    if len(found) < 3 or not good.any():
        return None
    found[~good] = guess(found[good])
    return found


def _exact(rates: Rates, worth: Rates) -> list[int]:
    """Maximise the rate of the slowest link, then the sum of the links' worth."""
    limits = np.unique(rates[~np.eye(len(rates), dtype=bool)])
    low, high = 0, len(limits) - 1  # a ring of the slowest links always exists
    while low < high:
        middle = (low + high + 1) // 2
        if _possible(rates >= limits[middle]):
            low = middle
        else:
            high = middle - 1
    return _largest_sum(np.where(rates >= limits[low], worth, -np.inf))


def _possible(allowed: NDArray[np.bool_]) -> bool:
    """Return True if a ring of allowed links exists.

    ends[s]: bit set of the peers where a path from 0 through the set s can end.
    """
    count = len(allowed)
    into = [sum(1 << a for a in range(count) if a != b and allowed[a, b]) for b in range(count)]
    ends = [0] * (1 << count)
    ends[1] = 1
    for group in range(3, 1 << count, 2):
        found = 0
        for peer in range(1, count):
            bit = 1 << peer
            if group & bit and ends[group ^ bit] & into[peer]:
                found |= bit
        ends[group] = found
    return bool(ends[-1] & into[0])


def _largest_sum(rates: Rates) -> list[int]:
    """Return the ring with the largest sum; -inf marks forbidden links."""
    count = len(rates)
    sums = np.full((1 << count, count), -np.inf)
    previous = np.zeros((1 << count, count), np.int64)
    sums[1, 0] = 0.0
    for group in range(3, 1 << count, 2):
        for peer in range(1, count):
            if group >> peer & 1:
                through = sums[group ^ 1 << peer] + rates[:, peer]
                previous[group, peer] = at = int(through.argmax())
                sums[group, peer] = through[at]
    group, order = (1 << count) - 1, list[int]()
    peer = int((sums[group] + rates[:, 0]).argmax())
    while group > 1:
        order.append(peer)
        group, peer = group ^ 1 << peer, int(previous[group, peer])
    return [0, *reversed(order)]


def _nearest(times: Trips) -> list[int]:
    """Return the nearest-neighbour order from 0, the start of the search."""
    order, left = [0], set(range(1, len(times)))
    while left:
        order.append(min(left, key=lambda peer: (times[order[-1], peer], peer)))
        left.remove(order[-1])
    return order


def _searched(rates: Rates, worth: Rates, start: Sequence[int]) -> list[int]:
    """Local search: remove the slowest links while possible, then increase the sum without slower links."""
    order = np.array(start)
    while True:
        slowest = score(order.tolist(), rates)[0]
        tried = _improved(order, (rates <= slowest) + STEEP * (np.min(rates) / rates) ** 8)
        if score(tried.tolist(), rates)[0] <= slowest:
            break
        order = tried
    order = _improved(order, np.where(rates >= slowest, -worth, np.sum(np.abs(worth))))
    return [int(peer) for peer in order]


def _improved(order: NDArray[np.int64], costs: Rates) -> NDArray[np.int64]:
    """Local search until neither reversing a segment nor moving one of up to SEGMENT peers helps.

    The first peer stays in place. A gain must exceed rounding errors, so that the search ends.
    """
    least = -1e-9 * (1.0 + float(np.abs(costs).sum()) / len(order))
    while True:
        before = order
        for at in range(1, len(order) - 1):
            order = _turned(order, costs, at, least)
            for length in range(1, SEGMENT + 1):
                order = _moved(order, costs, at, length, least)
        if order is before:
            return order


def _turned(order: NDArray[np.int64], costs: Rates, at: int, least: float) -> NDArray[np.int64]:
    """Reverse the best segment that starts at `at`; return the same order if no reversal helps."""
    after = np.roll(order, -1)
    along = np.concatenate(([0.0], np.cumsum(costs[order[at:-1], order[at + 1 :]])))
    against = np.concatenate(([0.0], np.cumsum(costs[order[at + 1 :], order[at:-1]])))
    last, following = order[at:], after[at:]
    gains = against - along
    gains += costs[order[at - 1], last] + costs[order[at], following]
    gains -= costs[order[at - 1], order[at]] + costs[last, following]
    end = int(gains.argmin())
    if gains[end] >= least:
        return order
    return np.concatenate((order[:at], order[at : at + end + 1][::-1], order[at + end + 1 :]))


def _moved(order: NDArray[np.int64], costs: Rates, at: int, length: int, least: float) -> NDArray[np.int64]:
    """Move the segment of `length` at `at` to its best place; return the same order if it stays."""
    if at + length > len(order):
        return order
    segment, rest = order[at : at + length], np.concatenate((order[:at], order[at + length :]))
    first, last, after = segment[0], segment[-1], np.roll(rest, -1)
    added = costs[rest, first] + costs[last, after] - costs[rest, after]
    place = int(added.argmin())
    if added[place] - added[at - 1] >= least:
        return order
    return np.concatenate((rest[: place + 1], segment, rest[place + 1 :]))
