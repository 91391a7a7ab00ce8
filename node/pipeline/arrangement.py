"""Which peers are a stage together, and in which order the stages stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from .arrangekernel import apart, match, way
from .arrangekernel import arrange as _arrange
from .instance import Instance, Unarranged

TRIES = 20_000


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Peers of each stage, stage 0 first; and the seconds that it is judged by."""

    stages: tuple[tuple[int, ...], ...]
    cost: float


def arrange(
    delays: NDArray[np.float64], sizes: Sequence[int], *, sync: float = 1.0, seed: int = 0, tries: int = TRIES
) -> Arrangement:
    """Peers to stages so that what a stage exchanges inside and what stages hand on take least time.

    `delays` (peers, peers): seconds of a boundary's activations; `sync`: how many times as long the exchange of a stage's
    fragment takes. Stage 0 has `sizes[0]` peers; the other sizes may change places. Peers that do not fit are in no stage.
    In each stage peers stand by who is best matched with whom of the stage before.
    """
    delays = np.maximum(delays, delays.T)
    ends = np.cumsum([0, *sizes])
    peers = np.arange(len(delays))
    hot = 0.2 * float(delays.max())
    cost = _arrange(peers, ends, delays, sync, hot, tries, seed)
    costs = np.zeros((len(sizes), len(sizes)))
    for a, b in permutations(range(len(sizes)), 2):
        costs[a, b] = apart(delays, peers, ends, a, b)
    order = np.empty(len(sizes), np.int64)
    way(costs, order)
    stages = [sorted(peers[: ends[1]].tolist())]
    for number in order[1:].tolist():
        stages.append(_aligned(delays, stages[-1], peers[ends[number] : ends[number + 1]].tolist()))
    return Arrangement(tuple(tuple(stage) for stage in stages), cost)


def arranged(asked: Unarranged, *, seed: int = 0, tries: int = TRIES) -> Instance:
    """The instance with its peers in stages."""
    found = arrange(asked.instance.delays, asked.sizes, sync=asked.sync, seed=seed, tries=min(tries, TRIES))
    return replace(asked.instance, stages=found.stages)


def _aligned(delays: NDArray[np.float64], before: list[int], members: list[int]) -> list[int]:
    """`members`, those first that are matched with the first of `before`."""
    few, many = (before, members) if len(before) <= len(members) else (members, before)
    partner = np.empty(len(many), np.int64)
    match(delays, np.array(few + many), np.array([0, len(few), len(few) + len(many)]), 0, 1, partner)
    place = {}
    for index, other in enumerate(partner.tolist()):
        if other >= 0:
            mine, theirs = (index, other) if few is before else (other, index)
            place[members[mine]] = theirs
    return sorted(members, key=lambda peer: (place.get(peer, len(before)), peer))
