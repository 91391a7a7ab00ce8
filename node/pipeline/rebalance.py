"""Who moves to a stage that starves, where there is no plan (SWARM, arXiv 2301.11913, section 3.2, which released no code).

Every period each peer tells how many micro-batches wait for it. From the same numbers all draw the same conclusion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from thinwire.swarm.protocol import PeerId

from .crew import Crew
from .survey import Survey

Peer = TypeVar("Peer", PeerId, int)

PERIOD = 300.0
"""Seconds between two moves."""

UNEVEN = 1.2
"""Nobody moves unless the most loaded stage has so many times the load of the least loaded one."""


@dataclass(frozen=True, slots=True)
class Move(Generic[Peer]):
    """`peer` leaves stage `source` for stage `target`: it finishes what it has, fetches that stage, and switches."""

    peer: Peer
    source: int
    target: int


def move(queues: Sequence[Mapping[Peer, float]]) -> Move[Peer] | None:
    """The one move of a period, None where none is called for. `queues`: by stage, the micro-batches that wait at each peer.

    Of the least loaded stages that can spare a peer, whoever has least to do goes to the most loaded one. A stage without
    members is loaded most of all: it gets somebody however even the others are.
    """
    target = newcomer(queues)
    loads = [sum(waiting.values()) for waiting in queues]
    able = [stage for stage, waiting in enumerate(queues) if len(waiting) > 1 and stage != target]
    if not able:
        return None
    source = min(able, key=lambda stage: (loads[stage], -len(queues[stage]), stage))
    if queues[target] and not loads[target] > UNEVEN * loads[source]:
        return None
    peer = min(queues[source], key=lambda name: (queues[source][name], name))
    return Move(peer, source, target)


def newcomer(queues: Sequence[Mapping[Peer, float]]) -> int:
    """The stage that a joining peer takes: one without members, else the most loaded, of those the one with fewest members."""
    return min(range(len(queues)), key=lambda s: (bool(queues[s]), -sum(queues[s].values()), len(queues[s]), s))


class Balance:
    """The moves of an origin's hosts: it sees itself how long micro-batches wait for whom (see Survey.waited)."""

    def __init__(self, survey: Survey, now: Callable[[], float], *, period: float = PERIOD) -> None:
        self._survey, self._now, self._period = survey, now, period
        self._since = now()

    def due(self, crew: Crew) -> Move[PeerId] | None:
        """Between two steps: the move of this period, when it is over and one is called for. The crew is told here; the caller
        sees to it that the peer comes to hold the new stage (see Host.move).
        """
        if self._now() - self._since < self._period:
            return None
        self._since, waited = self._now(), self._survey.waited()
        stages = sorted(crew.holders)
        here = [[peer for peer in crew.holders[stage] if peer not in crew.lost] for stage in stages]
        found = move([{peer: waited.get(peer, 0.0) for peer in peers} for peers in here]) if stages else None
        if found is None:
            return None
        source, target = stages[found.source], stages[found.target]
        crew.holders[source].remove(found.peer)
        crew.holders[target].append(found.peer)
        return Move(found.peer, source, target)
