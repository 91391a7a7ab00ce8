"""Assignment of peers to stages, and the order of the stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
from numpy.typing import NDArray
from thinwire.node.pipeline.planner.arrange_kernel import arrange as _arrange
from thinwire.node.pipeline.planner.arrange_kernel import match, shortest_path, stage_distance
from thinwire.node.pipeline.planner.problem import Problem, UnarrangedProblem

TRIES = 20_000


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Peers of each stage, stage 0 first, and the cost in seconds."""

    stages: tuple[tuple[int, ...], ...]
    cost: float


def arrange(
    delays: NDArray[np.float64], sizes: Sequence[int], *, sync: float = 1.0, seed: int = 0, tries: int = TRIES
) -> Arrangement:
    """Assign peers to stages so that exchanges inside and transfers between stages take least time.

    `delays` (peers, peers): seconds of a boundary's activations; `sync`: ratio of the exchange of a stage's fragment to
    that. Stage 0 has `sizes[0]` peers; the other sizes may change places. Peers that do not fit are in no stage. The
    peers of each stage are ordered by their best match in the stage before.
    """
    delays = np.maximum(delays, delays.T)
    ends = np.cumsum([0, *sizes])
    peers = np.arange(len(delays))
    hot = 0.2 * float(delays.max())
    cost = _arrange(peers, ends, delays, sync, hot, tries, seed)
    costs = np.zeros((len(sizes), len(sizes)))
    for a, b in permutations(range(len(sizes)), 2):
        costs[a, b] = stage_distance(delays, peers, ends, a, b)
    order = np.empty(len(sizes), np.int64)
    shortest_path(costs, order)
    stages = [sorted(peers[: ends[1]].tolist())]
    for number in order[1:].tolist():
        stages.append(_aligned(delays, stages[-1], peers[ends[number] : ends[number + 1]].tolist()))
    return Arrangement(tuple(tuple(stage) for stage in stages), cost)


def arranged(asked: UnarrangedProblem, *, seed: int = 0, tries: int = TRIES) -> Problem:
    """Return the problem with its peers in stages."""
    found = arrange(asked.instance.delays, asked.sizes, sync=asked.sync, seed=seed, tries=min(tries, TRIES))
    return replace(asked.instance, stages=found.stages)


def _aligned(delays: NDArray[np.float64], before: list[int], members: list[int]) -> list[int]:
    """Return `members`, ordered like their matches in `before`."""
    few, many = (before, members) if len(before) <= len(members) else (members, before)
    partner = np.empty(len(many), np.int64)
    match(delays, np.array(few + many), np.array([0, len(few), len(few) + len(many)]), 0, 1, partner)
    place = {}
    for index, other in enumerate(partner.tolist()):
        if other >= 0:
            mine, theirs = (index, other) if few is before else (other, index)
            place[members[mine]] = theirs
    return sorted(members, key=lambda peer: (place.get(peer, len(before)), peer))
