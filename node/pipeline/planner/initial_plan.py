"""First plan: every micro-batch on its cheapest path; then overloaded peers are relieved.

This is one branch of a conflict-based search. The *fastest* visitors of an overloaded peer are moved away: they can
afford a detour.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from thinwire.node.pipeline.planner.cheapest_path import Floats, cheapest, hops
from thinwire.node.pipeline.planner.constraints import Paths, violations
from thinwire.node.pipeline.planner.problem import Problem
from thinwire.node.pipeline.planner.simulate_kernel import BACKWARD


def build(instance: Problem, origins: tuple[int, ...] = ()) -> Paths | None:
    """Return valid paths, `per_start` of each origin or one of each of `origins`; None if none were found."""
    origins = origins or tuple(peer for peer in instance.stages[0] for _ in range(instance.per_start))
    for paths in (_repaired(instance, origins), _balanced(instance, origins)):
        if paths is not None and not violations(instance, paths):
            return paths
    return None


def fill(instance: Problem, kept: Paths, origins: tuple[int, ...]) -> Paths:
    """Return `kept` and then a path of each of `origins` for which there is room."""
    paths, allowed = list(kept), hops(instance)
    for origin in origins:
        path, _ = cheapest(instance, allowed, origin, np.where(_room(instance, paths), 0.0, np.inf))
        if path is not None:
            paths.append(path)
    return tuple(paths)


def _room(instance: Problem, paths: list[tuple[int, ...]]) -> NDArray[np.bool_]:
    loads = np.zeros(instance.peers, np.int64)
    for path in paths:
        for peer in path[1:]:
            loads[peer] += 1
    return loads < instance.memory


def _repaired(instance: Problem, origins: tuple[int, ...]) -> Paths | None:
    price: list[Floats] = [np.zeros(instance.peers)] * len(origins)
    allowed = hops(instance)
    first = {origin: cheapest(instance, allowed, origin, price[0]) for origin in set(origins)}
    routed = [first[origin] for origin in origins]
    paths = [path for path, _ in routed if path is not None]
    costs = [cost for _, cost in routed]
    if len(paths) < len(origins):
        return None
    for stage in _over(instance, paths):
        members = list(instance.stages[stage])
        visitors = [number for number, path in enumerate(paths) if not set(members).isdisjoint(path)]
        moved = False
        for number in sorted(visitors, key=lambda number: (costs[number], number)):
            barred = price[number].copy()
            barred[members] = np.inf
            path, cost = cheapest(instance, allowed, origins[number], barred)
            if path is not None:
                paths[number], costs[number], price[number], moved = path, cost, barred, True
                break
        if not moved:
            return None
    return tuple(_relieved(instance, paths, costs))


def _over(instance: Problem, paths: list[tuple[int, ...]]) -> Iterator[int]:
    """Yield the most overloaded stage until none is; the caller changes `paths` in between."""
    while True:
        over = [0] * len(instance.stages)
        for path in paths:
            for peer in path[1:]:
                over[int(instance.stage[peer])] += 1
        over = [load - instance.capacity(stage) if stage else 0 for stage, load in enumerate(over)]
        if max(over) <= 0:
            return
        yield over.index(max(over))


def _relieved(instance: Problem, paths: list[tuple[int, ...]], costs: list[float]) -> list[tuple[int, ...]]:
    """Relieve overloaded peers: their fastest visitors move to near peers of the stage with room."""
    both = instance.delays + instance.delays.T
    loads = np.zeros(instance.peers, np.int64)
    for path in paths:
        for peer in path[1:]:
            loads[peer] += 1
    for peer in np.flatnonzero(loads > instance.memory).tolist():
        if instance.stage[peer] <= 0:
            continue
        visitors = sorted((number for number, path in enumerate(paths) if peer in path), key=lambda n: (costs[n], n))
        for number in visitors[: int(loads[peer] - instance.memory[peer])]:
            path = paths[number]
            place = path.index(peer)
            before, after = path[place - 1], path[(place + 1) % len(path)]
            others = [o for o in instance.stages[int(instance.stage[peer])] if loads[o] < instance.memory[o]]
            other = min(others, key=lambda o: (both[before, o] + both[o, after] + (1 + BACKWARD) * instance.work[o], o))
            paths[number] = (*path[:place], other, *path[place + 1 :])
            loads[peer] -= 1
            loads[other] += 1
    return paths


def _balanced(instance: Problem, origins: tuple[int, ...]) -> Paths | None:
    """Build one path after the other through the stages with most room: works even if few exist."""
    paths: list[tuple[int, ...]] = []
    allowed = hops(instance)
    penalty = 1e3 * (1 + float(instance.delays.max()) + float(instance.work.max())) * instance.length
    for origin in origins:
        room = _room(instance, paths)
        loads = np.bincount([peer for path in paths for peer in path[1:]] or [0], minlength=instance.peers)
        if not paths:
            loads[:] = 0
        left = [sum(int(instance.memory[p] - loads[p]) for p in stage) for stage in instance.stages]
        most = max(left[1:])
        price = np.full(instance.peers, np.inf)
        for number, stage in enumerate(instance.stages[1:], 1):
            for peer in stage:
                if room[peer]:
                    price[peer] = penalty * (most - left[number])
        path, _ = cheapest(instance, allowed, origin, price)
        if path is None:
            return None
        paths.append(path)
    return tuple(paths)
