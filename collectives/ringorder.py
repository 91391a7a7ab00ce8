"""In which order data goes round a ring: the slowest link as fast as can be, then round it in the least time.

A ring is as fast as its slowest link, so the mean of all, or of their inverses, is the wrong thing to optimise first. What it
takes to fill and to empty it are the times of all links, one after the other; where these are not known, the sum of all rates
is to be as large as can be. Exact up
to EXACT peers, by dynamic programming over subsets (Held and Karp, "A dynamic programming approach to sequencing problems",
1962), first with links that are fast enough or not, then with those that are. Beyond, local search from the order given:
segments are turned round (2-opt) or moved (or-opt) as long as that helps. Pure functions: the same figures give the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

EXACT = 12
"""Most peers for which the best order is found for certain."""

SEGMENT = 3
"""Longest segment that is moved as a whole."""

STEEP = 1e-3
"""What slow links cost beside the slowest ones, so that there is a way down where the number of those stays the same."""

Rates = NDArray[np.float64]
"""rates[i, j]: bytes/s from i to j; 0 or not finite where that is not known. The diagonal says nothing."""

Trips = NDArray[np.float64]
"""trips[i, j]: seconds from i to j, likewise."""

CLASSES = 2
"""Classes of rates in each doubling, where times are known: what rates differ by within one is not worth a longer way."""


def best(rates: Rates, trips: Trips | None = None) -> list[int]:
    """An order of 0 … n - 1, beginning with 0, each sending to the next and the last to the first.

    A rate that is not known counts as the median of those that are, a time that is not known as the longest: records tell the
    nearest first. Where nothing is known, the order is the one given. Raises ValueError for figures that are no square matrix.
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
    """What an order is worth: its slowest link, then the sum of all."""
    links = [float(rates[a, b]) for a, b in pairwise([*order, order[0]])]
    return min(links), sum(links)


def _filled(rates: Rates, guess: Callable[[Rates], np.float64]) -> Rates | None:
    """All figures known; None where that would say nothing about any order."""
    found = np.array(rates, np.float64)
    if found.ndim != 2 or found.shape[0] != found.shape[1]:
        raise ValueError(f"figures of links are a square matrix, not {found.shape}")
    np.fill_diagonal(found, 0.0)
    good = np.isfinite(found) & (found > 0)
    if len(found) < 3 or not good.any():
        return None
    found[~good] = guess(found[good])
    return found


def _exact(rates: Rates, worth: Rates) -> list[int]:
    """The slowest link as fast, then the sum of what links are worth as large as they can be."""
    limits = np.unique(rates[~np.eye(len(rates), dtype=bool)])
    low, high = 0, len(limits) - 1  # a ring of the slowest links there are is always one
    while low < high:
        middle = (low + high + 1) // 2
        if _possible(rates >= limits[middle]):
            low = middle
        else:
            high = middle - 1
    return _largest_sum(np.where(rates >= limits[low], worth, -np.inf))


def _possible(allowed: NDArray[np.bool_]) -> bool:
    """Whether there is a ring of allowed links. ends[s]: the peers, as bits, where a path from 0 through the set s can end."""
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
    """The ring with the largest sum; -inf are links that must not be."""
    count = len(rates)
    sums = np.full((1 << count, count), -np.inf)
    came = np.zeros((1 << count, count), np.int64)
    sums[1, 0] = 0.0
    for group in range(3, 1 << count, 2):
        for peer in range(1, count):
            if group >> peer & 1:
                through = sums[group ^ 1 << peer] + rates[:, peer]
                came[group, peer] = at = int(through.argmax())
                sums[group, peer] = through[at]
    group, order = (1 << count) - 1, list[int]()
    peer = int((sums[group] + rates[:, 0]).argmax())
    while group > 1:
        order.append(peer)
        group, peer = group ^ 1 << peer, int(came[group, peer])
    return [0, *reversed(order)]


def _nearest(times: Trips) -> list[int]:
    """From 0 to the nearest one, and from each to the nearest that is left: where the search begins."""
    order, left = [0], set(range(1, len(times)))
    while left:
        order.append(min(left, key=lambda peer: (times[order[-1], peer], peer)))
        left.remove(order[-1])
    return order


def _searched(rates: Rates, worth: Rates, start: Sequence[int]) -> list[int]:
    """Links as slow as the slowest one are got rid of until that does not help; then, without any slower, the sum grows."""
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
    """Local search: no segment turned round, and none of up to SEGMENT moved elsewhere, lowers the costs any more.

    The first peer stays where it is. What is gained is more than rounding, so that it ends.
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
    """The segment that begins at `at` and is best turned round, turned round; the same order when none is."""
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
    """The segment of `length` at `at`, put where it fits best; the same order when it stays."""
    if at + length > len(order):
        return order
    segment, rest = order[at : at + length], np.concatenate((order[:at], order[at + length :]))
    first, last, after = segment[0], segment[-1], np.roll(rest, -1)
    added = costs[rest, first] + costs[last, after] - costs[rest, after]
    place = int(added.argmin())
    if added[place] - added[at - 1] >= least:
        return order
    return np.concatenate((rest[: place + 1], segment, rest[place + 1 :]))
