"""Moves of hosts to a stage with long queues, without a planner (SWARM, arXiv 2301.11913, 3.2).

In every period each peer announces how many micro-batches wait for it. All peers derive the same move from the same
numbers. SWARM released no code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from thinwire.node.pipeline.step.measurements import Measurements
from thinwire.swarm.messages.registry import PeerId

Peer = TypeVar("Peer", PeerId, int)

PERIOD = 300.0
"""Seconds between two moves."""

UNEVEN = 1.2
"""Least ratio between the highest and the lowest load of a stage for a move."""

HURRY = 0.1
"""Part of a period after which a stage without a holder gets one."""


@dataclass(frozen=True, slots=True)
class HostMove(Generic[Peer]):
    """Move of `peer` from stage `source` to stage `target`, which it fetches after its present work."""

    peer: Peer
    source: int
    target: int


def move(
    queues: Sequence[Mapping[Peer, float]], able: Callable[[Peer, int], bool] = lambda peer, stage: True
) -> HostMove[Peer] | None:
    """Return the move of a period, or None.

    The most loaded stage gets the peer with the least work from the least loaded stage that can spare a peer. A stage without
    members counts as the most loaded one, even if the other loads are balanced.

    - `queues`: by stage, the micro-batches that wait at each peer.
    - `able`: returns whether a peer can hold a stage.
    """
    target = stage_for_joiner(queues)
    loads = [sum(waiting.values()) for waiting in queues]
    free = [[peer for peer in waiting if len(waiting) > 1 and able(peer, target)] for waiting in queues]
    spare = [stage for stage, peers in enumerate(free) if peers and stage != target]
    if not spare:
        return None
    source = min(spare, key=lambda stage: (loads[stage], -len(queues[stage]), stage))
    if queues[target] and not loads[target] > UNEVEN * loads[source]:
        return None
    peer = min(free[source], key=lambda name: (queues[source][name], name))
    return HostMove(peer, source, target)


def stage_for_joiner(queues: Sequence[Mapping[Peer, float]]) -> int:
    """Return the stage for a joiner: one without members, else the most loaded one with fewest members."""
    return min(range(len(queues)), key=lambda s: (bool(queues[s]), -sum(queues[s].values()), len(queues[s]), s))


class Rebalancer:
    """Moves of an origin's hosts, from its measurements of how long micro-batches wait for each host.

    The measurements are those of `Measurements.waited`. If a host has not moved within a period after it was asked, it has no
    room for that stage, and is not asked for that stage again. `period`: seconds between two moves.
    """

    def __init__(self, measurements: Measurements, now: Callable[[], float], *, period: float = PERIOD) -> None:
        self._measurements, self._now, self._period = measurements, now, period
        self._since, self._asked_at = now(), -math.inf
        self._empty: float | None = None
        self._asked: dict[PeerId, int] = {}
        self._stays: set[tuple[PeerId, int]] = set()

    def due(self, holders: Mapping[int, Sequence[PeerId]]) -> HostMove[PeerId] | None:
        """Return the useful move of this period when it is over; earlier for a stage without a holder.

        `holders`: by stage, the reachable ones. Call it between two steps; the caller makes the peer hold the stage.
        """
        now, stages = self._now(), sorted(holders)
        empty = any(not holders[stage] for stage in stages)
        self._empty = (now if self._empty is None else self._empty) if empty else None
        hurry = self._empty is not None and now - self._empty >= HURRY * self._period
        if now - self._since < self._period and not (hurry and now - self._asked_at >= self._period):
            return None
        self._since, waited = now, self._measurements.waited()
        where = {peer: stage for stage in stages for peer in holders[stage]}
        self._stays |= {(peer, target) for peer, target in self._asked.items() if where.get(peer, target) != target}
        queues = [{peer: waited.get(peer, 0.0) for peer in holders[stage]} for stage in stages]
        found = move(queues, lambda peer, to: (peer, stages[to]) not in self._stays) if stages else None
        if found is None:
            self._asked = {}
            return None
        source, target = stages[found.source], stages[found.target]
        self._asked, self._asked_at = {found.peer: target}, now
        return HostMove(found.peer, source, target)
