"""Routes of the micro-batches of each step, planned from the origin's measurements."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeAlias

from thinwire.node.pipeline.planner.constraints import Paths
from thinwire.node.pipeline.planner.makespan import makespan
from thinwire.node.pipeline.planner.path_search import MENDING, PathPlan, improve, mend, search
from thinwire.node.pipeline.planner.problem import MOST_BEHIND, Problem, ProblemError
from thinwire.node.pipeline.step.measurements import Measurements
from thinwire.node.pipeline.step.stage_holders import StageHolders, Visits
from thinwire.node.runtime.asyncio_extra import Work
from thinwire.node.runtime.event_log import Emit
from thinwire.swarm.messages.registry import PeerId

Stages: TypeAlias = Mapping[int, tuple[PeerId, ...]]

MOVED = 0.2
"""Change of a measurement, as a fraction, that makes a new plan due, if it is also above WEIGHT."""

WEIGHT = 0.02
"""Fraction of a step: smaller changes of a measurement do not matter."""

SHARE = 20
"""Multiple of the planning time before a new plan for changed measurements: they always change.

Only peers that arrive or depart make a plan due sooner.
"""


@dataclass(frozen=True, slots=True)
class StepRoutes:
    """Routes of a step's micro-batches. `seconds`: expected duration of the step.

    `sequences`: micro-batches that follow each other, each starting when the one before is back.
    """

    visits: tuple[Visits, ...]
    sequences: tuple[tuple[int, ...], ...]
    seconds: float


class RoutePlanner:
    """Planner of an origin. Equal measurements and seeds give equal plans.

    - `skip`: fraction of the stages that each micro-batch skips.
    - `swaps`: number of visits out of order that its path may have.
    - `room`: micro-batches that a host holds at a time.
    - `every`: steps after which a new plan is made without another reason.
    - `tries`: moves of a search (200,000 take a second).
    """

    def __init__(
        self,
        measurements: Measurements,
        *,
        skip: float,
        room: int,
        emit: Emit,
        swaps: int = MOST_BEHIND,
        every: int = 50,
        tries: int = 2 * MENDING,
        seed: int = 0,
    ) -> None:
        if not (0 <= skip < 1 and room > 0 and every > 0 and 0 <= swaps <= MOST_BEHIND):
            raise ValueError(f"no plan skips {skip}, swaps {swaps}, has room for {room} and lasts {every} steps")
        self.measurements, self._skip, self._swaps, self._room = measurements, skip, swaps, room
        self._every, self._tries, self._seed, self._emit = every, tries, seed, emit
        self.reasons: Counter[str] = Counter()
        """Number of new plans by reason: first, peers, mended, moved (measurements), age."""
        self.newest = ""
        """Reason of the last plan."""
        self._age, self._calm, self._failed = 0, -math.inf, ""
        self._planned: _Planned | None = None

    @property
    def plans(self) -> int:
        """Number of plans so far."""
        return self.reasons.total()

    @property
    def paths(self) -> int:
        """Number of paths in the current plan."""
        return len(self._planned.paths) if self._planned is not None else 0

    async def routes(self, micros: int, stage_holders: StageHolders, work: Work, step: int) -> StepRoutes | None:
        """Return the routes of `micros` micro-batches over the available hosts; None without a choice.

        Planning runs in `work`, and only if the hosts or the measurements have changed, or after `every` steps.
        """
        stages = _stages(stage_holders, step)
        there = sum(1 for stage in stages.values() if stage)
        length = min(max(2, round((1 - self._skip) * (1 + max(stages, default=0)))), 1 + there)
        if length < 2 or micros < 1:
            return None
        began, plans = self.measurements.now(), self.plans
        try:
            found: _Planned = await work(partial(self._plan, micros, stages, length, began < self._calm))
        except ProblemError as error:
            if str(error) != self._failed:
                self._failed = str(error)
                self._emit("plan_failed", {"reason": self._failed})
            return None
        self._planned, self._failed = found, ""
        if self.plans > max(1, plans):  # The first plan is based on nothing known, and includes compilation.
            ended = self.measurements.now()
            self._calm = ended + SHARE * (ended - began)
        return found.routes(micros)

    def _plan(self, micros: int, stages: Stages, length: int, calm: bool) -> _Planned:
        last, self._age = self._planned, self._age + 1
        asked, here = (micros, length, tuple(stages)), frozenset(_peers(stages))
        if last is None or last.asked != asked or not here <= last.here:
            return self._search_again(micros, stages, length, "peers" if last else "first")
        measured = self._instance(last.stages, length, len(last.paths), micros)
        dead = {number for number, peer in enumerate(last.peers, 1) if peer not in here}
        if any(not dead.isdisjoint(path) for path in last.paths):
            try:
                left, plan = mend(measured, last.paths, dead, seed=self._seed, tries=min(self._tries, MENDING))
            except ProblemError:
                return self._search_again(micros, stages, length, "peers")
            left = replace(left, rounds=math.ceil(micros / len(plan.paths)))
            plan = PathPlan(plan.paths, makespan(left, plan.paths))
            return self._take(_Planned(asked, last.stages, here, left, plan), "mended")
        if calm:
            return last
        if self._age >= self._every:
            return self._search_again(micros, stages, length, "age")
        if last.moved(measured):
            return self._search_again(micros, stages, length, "moved")
        return last

    def _search_again(self, micros: int, stages: Stages, length: int, reason: str) -> _Planned:
        """Search from scratch, and also improve the old plan, as far as its paths still exist."""
        room = sum(min(self._room * len(members), micros) for members in stages.values())
        paths = min(micros, max(1, room // (length - 1)))
        last, asked = self._planned, (micros, length, tuple(stages))
        while True:
            rounds = math.ceil(micros / paths)
            instance = self._instance(stages, length, math.ceil(micros / rounds), micros)
            try:
                best = search(instance, seed=self._seed + self.plans, tries=self._tries // 2, restarts=2)
                break
            except ProblemError:
                if paths == 1:
                    raise
                paths -= max(1, paths // 8)  # The rules leave less room than it seems.
        if last is not None and last.asked == asked and last.stages == stages:
            if len(last.paths) == len(best.paths):
                old = improve(instance, last.paths, seed=self._seed + self.plans, tries=self._tries // 2)
                best = min(best, old, key=lambda plan: plan.makespan)
        return self._take(_Planned(asked, stages, frozenset(_peers(stages)), instance, best), reason)

    def _take(self, found: _Planned, reason: str) -> _Planned:
        self.reasons[reason], self.newest, self._age = self.reasons[reason] + 1, reason, 0
        facts = {"why": reason, "paths": len(found.paths), "seconds": round(found.plan.makespan, 3)}
        self._emit("planned", facts)
        return found

    def _instance(self, stages: Stages, length: int, paths: int, micros: int) -> Problem:
        return self.measurements.instance(
            list(stages.values()),
            length=length,
            paths=paths,
            rounds=math.ceil(micros / paths),
            room=self._room,
            swaps=self._swaps,
        )


@dataclass(frozen=True, slots=True)
class _Planned:
    """Plan with its question (micro-batches, length, stages), peers, present peers, and measurements."""

    asked: tuple[int, int, tuple[int, ...]]
    stages: Stages
    here: frozenset[PeerId]
    instance: Problem
    plan: PathPlan

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return _peers(self.stages)

    @property
    def paths(self) -> Paths:
        return self.plan.paths

    def routes(self, micros: int) -> StepRoutes:
        """Return routes in which micro-batches use the paths in turn."""
        peers, names = (b"", *self.peers), list(self.stages)
        routes = [[(names[int(self.instance.stage[p]) - 1], peers[p]) for p in path[1:]] for path in self.paths]
        count = len(routes)
        sequences = tuple(tuple(range(path, micros, count)) for path in range(min(count, micros)))
        return StepRoutes(tuple(routes[micro % count] for micro in range(micros)), sequences, self.plan.makespan)

    def moved(self, measured: Problem) -> bool:
        """Return True if a measurement that these paths use has changed, and the step's duration with it."""
        least = WEIGHT * self.plan.makespan / self.instance.rounds
        pairs = {pair for path in self.paths for pair in pairwise((*path, path[0]))}
        values = [(self.instance.delays[pair], measured.delays[pair]) for pair in sorted(pairs)]
        values += [(self.instance.work[p], measured.work[p]) for p in sorted({p for path in self.paths for p in path})]
        if any(abs(new - old) > max(MOVED * old, least) for old, new in values):
            return True
        return abs(makespan(measured, self.paths) - self.plan.makespan) > MOVED * self.plan.makespan


def _stages(stage_holders: StageHolders, step: int) -> Stages:
    """Return the hosts that can be asked in a step, by stage."""
    return {stage: tuple(stage_holders.able(stage, step, {})) for stage in sorted(stage_holders.holders)}


def _peers(stages: Stages) -> tuple[PeerId, ...]:
    return tuple(peer for members in stages.values() for peer in members)
