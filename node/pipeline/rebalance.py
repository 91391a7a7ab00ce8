"""Who moves to a stage that starves, where there is no plan (SWARM, arXiv 2301.11913, section 3.2, which released no code).

Every period each peer tells how many micro-batches wait for it. From the same numbers all draw the same conclusion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from thinwire.swarm.protocol import PeerId

from .survey import Survey

Peer = TypeVar("Peer", PeerId, int)

PERIOD = 300.0
"""Seconds between two moves."""

UNEVEN = 1.2
"""Nobody moves unless the most loaded stage has so many times the load of the least loaded one."""

HURRY = 0.1
"""A stage that nobody holds gets somebody after this part of a period."""


@dataclass(frozen=True, slots=True)
class Move(Generic[Peer]):
    """`peer` leaves stage `source` for stage `target`: it finishes what it has, fetches that stage, and switches."""

    peer: Peer
    source: int
    target: int


def move(
    queues: Sequence[Mapping[Peer, float]], able: Callable[[Peer, int], bool] = lambda peer, stage: True
) -> Move[Peer] | None:
    """The one move of a period, None where none is called for. `queues`: by stage, the micro-batches that wait at each peer;
    `able`: whether a peer can hold a stage.

    Of the least loaded stages that can spare a peer, whoever has least to do goes to the most loaded one. A stage without
    members is loaded most of all: it gets somebody however even the others are.
    """
    target = newcomer(queues)
    loads = [sum(waiting.values()) for waiting in queues]
    free = [[peer for peer in waiting if len(waiting) > 1 and able(peer, target)] for waiting in queues]
    spare = [stage for stage, peers in enumerate(free) if peers and stage != target]
    if not spare:
        return None
    source = min(spare, key=lambda stage: (loads[stage], -len(queues[stage]), stage))
    if queues[target] and not loads[target] > UNEVEN * loads[source]:
        return None
    peer = min(free[source], key=lambda name: (queues[source][name], name))
    return Move(peer, source, target)


def newcomer(queues: Sequence[Mapping[Peer, float]]) -> int:
    """The stage that a joining peer takes: one without members, else the most loaded, of those the one with fewest members."""
    return min(range(len(queues)), key=lambda s: (bool(queues[s]), -sum(queues[s].values()), len(queues[s]), s))


class Balance:
    """The moves of an origin's hosts: it sees itself how long micro-batches wait for whom (see Survey.waited).

    `period`: seconds between two moves.

    Who was asked to move, and has not after a period, has no room for that stage: it is not asked for it again.
    """

    def __init__(self, survey: Survey, now: Callable[[], float], *, period: float = PERIOD) -> None:
        self._survey, self._now, self._period = survey, now, period
        self._since, self._asked_at = now(), -math.inf
        self._empty: float | None = None
        self._asked: dict[PeerId, int] = {}
        self._stays: set[tuple[PeerId, int]] = set()

    def due(self, holders: Mapping[int, Sequence[PeerId]]) -> Move[PeerId] | None:
        """Between two steps: the move of this period, when it is over and one is called for; sooner for a stage that has had no
        holder for a while. `holders`: by stage, who is in reach. The caller sees to it that the peer comes to hold it.
        """
        now, stages = self._now(), sorted(holders)
        empty = any(not holders[stage] for stage in stages)
        self._empty = (now if self._empty is None else self._empty) if empty else None
        hurry = self._empty is not None and now - self._empty >= HURRY * self._period
        if now - self._since < self._period and not (hurry and now - self._asked_at >= self._period):
            return None
        self._since, waited = now, self._survey.waited()
        where = {peer: stage for stage in stages for peer in holders[stage]}
        self._stays |= {(peer, target) for peer, target in self._asked.items() if where.get(peer, target) != target}
        queues = [{peer: waited.get(peer, 0.0) for peer in holders[stage]} for stage in stages]
        found = move(queues, lambda peer, to: (peer, stages[to]) not in self._stays) if stages else None
        if found is None:
            self._asked = {}
            return None
        source, target = stages[found.source], stages[found.target]
        self._asked, self._asked_at = {found.peer: target}, now
        return Move(found.peer, source, target)
