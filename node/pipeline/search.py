"""Paths for the micro-batches of a replica: build a plan, improve it, mend it when peers die.

Constraints and score are those of SkipPipe (arXiv 2502.19913); the search is ours: annealing on the simulated makespan itself
instead of conflicts. The same instance, seed and number of tries give the same plan.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .arrangement import arranged
from .checker import Paths, violations
from .instance import Instance, InstanceError, Unarranged
from .makespan import makespan
from .routing import build, fill
from .searchkernel import anneal

HOT = 2.0
"""Seconds of the first temperature of instances whose steps last half a minute; others in proportion."""

RESTARTS = 4
TRIES = 2_000_000
"""Random moves of a search, all restarts together: 10 s for 20 peers and 30 micro-batches."""

ARRANGEMENTS = 8

MENDING = 150_000
"""Moves after peers died: about a second."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Paths that break no rule, and the seconds of a step that the simulation expects."""

    paths: Paths
    makespan: float


def search(instance: Instance, *, seed: int = 0, tries: int = TRIES, restarts: int = RESTARTS) -> Plan:
    """The best plan of several restarts, one of them from a coarse plan in which an origin's micro-batches stay together.

    Raises InstanceError when no paths keep the rules.
    """
    first = build(instance)
    if first is None:
        raise InstanceError("no paths keep the rules", "more memory, more peers, fewer paths or shorter ones")
    begins = [first]
    coarse = _coarse(instance, seed, tries // restarts)
    if coarse is not None:
        begins.append(coarse)
    share = max(tries // restarts, 1)
    plans = [improve(instance, begins[turn % len(begins)], seed=seed + turn, tries=share) for turn in range(restarts)]
    return min(plans, key=lambda plan: plan.makespan)


def plan(asked: Instance | Unarranged, *, seed: int = 0, tries: int = TRIES) -> tuple[Instance, Plan]:
    """Search, after peers are put into stages where they are in none: several arrangements are tried, because the arrangement's
    own objective does not know how far all micro-batches have it to their origin. Raises InstanceError.
    """
    if isinstance(asked, Instance):
        return asked, search(asked, seed=seed, tries=tries)
    ways = [arranged(asked, seed=seed + turn, tries=tries) for turn in range(ARRANGEMENTS)]
    looks = [search(way, seed=seed, tries=tries // (4 * ARRANGEMENTS), restarts=1) for way in ways]
    best = min(range(ARRANGEMENTS), key=lambda turn: looks[turn].makespan)
    found = search(ways[best], seed=seed, tries=tries)
    return ways[best], min(found, looks[best], key=lambda plan: plan.makespan)


def improve(instance: Instance, paths: Sequence[Sequence[int]], *, seed: int = 0, tries: int = TRIES) -> Plan:
    """Anneal a plan that breaks no rule; what comes back is no worse. Raises ValueError when it does break one."""
    broken = violations(instance, paths)
    if broken:
        raise ValueError(f"no plan to improve: {broken[0].name}: {broken[0].text}")
    if not paths:
        return Plan((), 0.0)
    table = np.array(paths, np.int64)
    hot = HOT * makespan(instance, paths) / 40
    value = anneal(
        table,
        instance.stage,
        instance.delays,
        instance.work,
        instance.memory,
        instance.rounds,
        instance.gap,
        instance.swaps,
        hot,
        tries,
        seed,
    )
    return Plan(tuple(tuple(path) for path in table.tolist()), value)


def without(instance: Instance, dead: Collection[int]) -> Instance:
    """The same peers with the same numbers, the dead ones in no stage. Raises InstanceError when no origin is left."""
    return replace(instance, stages=tuple(tuple(p for p in stage if p not in dead) for stage in instance.stages))


def mend(
    instance: Instance, paths: Sequence[Sequence[int]], dead: Collection[int], *, seed: int = 0, tries: int = MENDING
) -> tuple[Instance, Plan]:
    """A plan for those that are left. Paths through the dead are gone; their origins get new ones where there is room, so
    there may be fewer than before. Raises InstanceError when no origin is left, or no path.
    """
    left = without(instance, dead)
    whole = tuple(tuple(path) for path in paths if not set(dead).intersection(path))
    lost = tuple(path[0] for path in paths if path[0] not in dead and set(dead).intersection(path))
    begins = [fill(left, whole, lost)]
    origins = tuple(path[0] for path in whole) + lost
    for count in range(len(origins), len(begins[0]), -1):
        # What is kept may stand in the way of the others: begin anew, with as many as there is room for.
        anew = build(left, origins[:count])
        if anew is not None:
            begins.append(anew)
            break
    share = max(tries // len(begins), 1)
    plans = [improve(left, begin, seed=seed, tries=share) for begin in begins if begin]
    if not plans:
        raise InstanceError("no path is left", "a micro-batch visits as many stages as before")
    return left, min(plans, key=lambda plan: plan.makespan / len(plan.paths))


def _coarse(instance: Instance, seed: int, tries: int) -> Paths | None:
    """A plan in which the paths of an origin are one, annealed as such."""
    group = instance.per_start
    if group == 1 or (instance.memory < group).any():
        return None
    single = replace(instance, memory=instance.memory // group, per_start=1)
    paths = build(single)
    if paths is None:
        return None
    plan = improve(single, paths, seed=seed, tries=max(tries, 1))
    together = tuple(path for path in plan.paths for _ in range(group))
    return together if not violations(instance, together) else None
