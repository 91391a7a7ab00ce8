"""Which peers are a stage together, and in which order the stages stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .arrangekernel import arrange as _arrange
from .arrangekernel import match, way
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
    groups = [peers[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    costs = np.array([[_apart(delays, a, b) if a is not b else 0.0 for b in groups] for a in groups])
    order = np.empty(len(groups), np.int64)
    way(costs, order)
    stages = [sorted(groups[0].tolist())]
    for number in order[1:].tolist():
        stages.append(_aligned(delays, stages[-1], groups[number]))
    return Arrangement(tuple(tuple(stage) for stage in stages), cost)


def arranged(asked: Unarranged, *, seed: int = 0) -> Instance:
    """The instance with its peers in stages."""
    found = arrange(asked.instance.delays, asked.sizes, sync=asked.sync, seed=seed)
    return replace(asked.instance, stages=found.stages)


def _apart(delays: NDArray[np.float64], one: NDArray[np.int64], two: NDArray[np.int64]) -> float:
    few, many = (one, two) if len(one) <= len(two) else (two, one)
    return float(match(delays, few, many, np.empty(len(many), np.int64)))


def _aligned(delays: NDArray[np.float64], before: Sequence[int], members: NDArray[np.int64]) -> list[int]:
    """`members`, those first that are matched with the first of `before`."""
    earlier = np.array(before, np.int64)
    few, many = (earlier, members) if len(earlier) <= len(members) else (members, earlier)
    partner = np.empty(len(many), np.int64)
    match(delays, few, many, partner)
    place = {}
    for index, other in enumerate(partner.tolist()):
        if other >= 0:
            mine, theirs = (index, other) if few is earlier else (other, index)
            place[int(members[mine])] = theirs
    return sorted(members.tolist(), key=lambda peer: (place.get(peer, len(before)), peer))
