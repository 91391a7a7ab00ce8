"""Search for the paths of a replica's micro-batches: build, improve, and mend a plan.

Constraints and score are those of SkipPipe (arXiv 2502.19913). The search is ours: annealing on the simulated makespan
itself instead of conflicts. Equal problem, seed and number of tries give equal plans.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from thinwire.node.pipeline.planner.anneal_kernel import anneal
from thinwire.node.pipeline.planner.constraints import Paths, violations
from thinwire.node.pipeline.planner.initial_plan import build, fill
from thinwire.node.pipeline.planner.makespan import makespan
from thinwire.node.pipeline.planner.problem import Problem, ProblemError, UnarrangedProblem
from thinwire.node.pipeline.planner.stage_arrangement import arranged

HOT = 2.0
"""First temperature in seconds for problems with steps of half a minute; proportional for others."""

RESTARTS = 4
"""Annealing runs of a search, from which the best plan is taken."""

TRIES = 2_000_000
"""Random moves of a search, all restarts together: 10 s for 20 peers and 30 micro-batches."""

ARRANGEMENTS = 8
"""Arrangements of the peers in stages that are compared by a short search."""

MENDING = 150_000
"""Moves after peers died: about a second."""


@dataclass(frozen=True, slots=True)
class PathPlan:
    """Valid paths, and the simulated seconds of a step."""

    paths: Paths
    makespan: float


def search(instance: Problem, *, seed: int = 0, tries: int = TRIES, restarts: int = RESTARTS) -> PathPlan:
    """Return the best plan of several restarts, one from a plan that keeps an origin's paths together.

    Raises ProblemError if no paths keep the rules.
    """
    first = build(instance)
    if first is None:
        raise ProblemError("no paths keep the rules", "more memory, more peers, fewer paths or shorter ones")
    begins = [first]
    coarse = _coarse(instance, seed, tries // restarts)
    if coarse is not None:
        begins.append(coarse)
    share = max(tries // restarts, 1)
    plans = [improve(instance, begins[turn % len(begins)], seed=seed + turn, tries=share) for turn in range(restarts)]
    return min(plans, key=lambda plan: plan.makespan)


def plan(asked: Problem | UnarrangedProblem, *, seed: int = 0, tries: int = TRIES) -> tuple[Problem, PathPlan]:
    """Assign peers to stages if necessary, and search. Raises ProblemError.

    Several arrangements are tried, because the objective of an arrangement ignores the distance of micro-batches to
    their origin.
    """
    if isinstance(asked, Problem):
        return asked, search(asked, seed=seed, tries=tries)
    problems = [arranged(asked, seed=seed + turn, tries=tries) for turn in range(ARRANGEMENTS)]
    short = [search(one, seed=seed, tries=tries // (4 * ARRANGEMENTS), restarts=1) for one in problems]
    best = min(range(ARRANGEMENTS), key=lambda turn: short[turn].makespan)
    found = search(problems[best], seed=seed, tries=tries)
    return problems[best], min(found, short[best], key=lambda plan: plan.makespan)


def improve(instance: Problem, paths: Sequence[Sequence[int]], *, seed: int = 0, tries: int = TRIES) -> PathPlan:
    """Anneal a valid plan; the result is no worse. Raises ValueError for an invalid plan."""
    broken = violations(instance, paths)
    if broken:
        raise ValueError(f"no plan to improve: {broken[0].name}: {broken[0].text}")
    if not paths:
        return PathPlan((), 0.0)
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
    return PathPlan(tuple(tuple(path) for path in table.tolist()), value)


def without(instance: Problem, dead: Collection[int]) -> Problem:
    """Return the same peers, dead ones in no stage. Raises ProblemError if no origin is left."""
    return replace(instance, stages=tuple(tuple(p for p in stage if p not in dead) for stage in instance.stages))


def mend(
    instance: Problem, paths: Sequence[Sequence[int]], dead: Collection[int], *, seed: int = 0, tries: int = MENDING
) -> tuple[Problem, PathPlan]:
    """Return a plan for the remaining peers. Raises ProblemError if no origin or no path is left.

    Paths through dead peers are removed; their origins get new ones if there is room, so there may be fewer than
    before.
    """
    left = without(instance, dead)
    whole = tuple(tuple(path) for path in paths if not set(dead).intersection(path))
    lost = tuple(path[0] for path in paths if path[0] not in dead and set(dead).intersection(path))
    begins = [fill(left, whole, lost)]
    origins = tuple(path[0] for path in whole) + lost
    for count in range(len(origins), len(begins[0]), -1):
        # The kept paths may block the others: start again, with as many paths as there is room for.
        rebuilt = build(left, origins[:count])
        if rebuilt is not None:
            begins.append(rebuilt)
            break
    share = max(tries // len(begins), 1)
    plans = [improve(left, begin, seed=seed, tries=share) for begin in begins if begin]
    if not plans:
        raise ProblemError("no path is left", "a micro-batch visits as many stages as before")
    return left, min(plans, key=lambda plan: plan.makespan / len(plan.paths))


def _coarse(instance: Problem, seed: int, tries: int) -> Paths | None:
    """Return a plan in which the paths of an origin are one, annealed in that form."""
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
