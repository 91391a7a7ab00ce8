"""Which way the micro-batches of each step take: planned from what the origin has measured, anew when that has changed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeAlias

from thinwire.swarm.protocol import PeerId

from ..presence import Emit
from ..waiting import Work
from .checker import Paths
from .crew import Crew, Visits
from .instance import MOST_BEHIND, Instance, InstanceError
from .makespan import makespan
from .search import MENDING, Plan, improve, mend, search
from .survey import Survey

Stages: TypeAlias = Mapping[int, tuple[PeerId, ...]]

MOVED = 0.2
"""A measurement that has moved by more than this part calls for a new plan..."""

WEIGHT = 0.02
"""...if it has moved by more than this part of a step, too."""

SHARE = 20
"""So many times as long as planning took nothing but peers that come or go calls for another: measurements never rest."""


@dataclass(frozen=True, slots=True)
class Course:
    """The ways of a step's micro-batches. `lanes`: micro-batches that follow each other, the next when the one before is back;
    `seconds`: how long all that is to take.
    """

    visits: tuple[Visits, ...]
    lanes: tuple[tuple[int, ...], ...]
    seconds: float


class Pilot:
    """Plans for an origin. The same measurements, and seed, give the same plans.

    `skip`: the part of the stages that each micro-batch goes past; `swaps`: visits out of order that its path may have;
    `room`: micro-batches that a host holds at a time; `every`: steps between two plans, if nothing calls for one sooner;
    `tries`: moves of a search (200,000 are a second).
    """

    def __init__(
        self,
        survey: Survey,
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
        self.survey, self._skip, self._swaps, self._room = survey, skip, swaps, room
        self._every, self._tries, self._seed, self._emit = every, tries, seed, emit
        self.whys: Counter[str] = Counter()
        """Why there was a new plan, and how often: at first, peers, mended, moved (measurements), age."""
        self.newest = ""
        """Why there was the last one."""
        self._age, self._calm, self._failed = 0, -math.inf, ""
        self._planned: _Planned | None = None

    @property
    def plans(self) -> int:
        """How often there was a new plan."""
        return self.whys.total()

    @property
    def paths(self) -> int:
        """Of the plan in use."""
        return len(self._planned.paths) if self._planned is not None else 0

    async def course(self, micros: int, crew: Crew, work: Work, step: int) -> Course | None:
        """The ways of `micros` micro-batches over those that can be asked in step `step`; None when there is nothing to choose.

        Planning is done in `work`, and only when who is there has changed, or what is known of them, or after `every` steps.
        """
        stages = _stages(crew, step)
        there = sum(1 for stage in stages.values() if stage)
        length = min(max(2, round((1 - self._skip) * (1 + max(stages, default=0)))), 1 + there)
        if length < 2 or micros < 1:
            return None
        began, plans = self.survey.now(), self.plans
        try:
            found: _Planned = await work(partial(self._plan, micros, stages, length, began < self._calm))
        except InstanceError as error:
            if str(error) != self._failed:
                self._failed = str(error)
                self._emit("no plan", {"reason": self._failed})
            return None
        self._planned, self._failed = found, ""
        if self.plans > max(1, plans):  # the first is made of nothing that is known, and takes compiling, too
            ended = self.survey.now()
            self._calm = ended + SHARE * (ended - began)
        return found.course(micros)

    def _plan(self, micros: int, stages: Stages, length: int, calm: bool) -> _Planned:
        last, self._age = self._planned, self._age + 1
        asked, here = (micros, length, tuple(stages)), frozenset(_peers(stages))
        if last is None or last.asked != asked or not here <= last.here:
            return self._anew(micros, stages, length, "peers" if last else "first")
        measured = self._instance(last.stages, length, len(last.paths), micros)
        dead = {number for number, peer in enumerate(last.peers, 1) if peer not in here}
        if any(not dead.isdisjoint(path) for path in last.paths):
            try:
                left, plan = mend(measured, last.paths, dead, seed=self._seed, tries=min(self._tries, MENDING))
            except InstanceError:
                return self._anew(micros, stages, length, "peers")
            left = replace(left, rounds=math.ceil(micros / len(plan.paths)))
            plan = Plan(plan.paths, makespan(left, plan.paths))
            return self._take(_Planned(asked, last.stages, here, left, plan), "mended")
        if calm:
            return last
        if self._age >= self._every:
            return self._anew(micros, stages, length, "age")
        if last.moved(measured):
            return self._anew(micros, stages, length, "moved")
        return last

    def _anew(self, micros: int, stages: Stages, length: int, why: str) -> _Planned:
        """Search, and beside that improve what there was, as far as it can still be gone."""
        room = sum(min(self._room * len(members), micros) for members in stages.values())
        paths = min(micros, max(1, room // (length - 1)))
        last, asked = self._planned, (micros, length, tuple(stages))
        while True:
            rounds = math.ceil(micros / paths)
            instance = self._instance(stages, length, math.ceil(micros / rounds), micros)
            try:
                best = search(instance, seed=self._seed + self.plans, tries=self._tries // 2, restarts=2)
                break
            except InstanceError:
                if paths == 1:
                    raise
                paths -= max(1, paths // 8)  # the rules leave less room than it seems
        if last is not None and last.asked == asked and last.stages == stages:
            if len(last.paths) == len(best.paths):
                old = improve(instance, last.paths, seed=self._seed + self.plans, tries=self._tries // 2)
                best = min(best, old, key=lambda plan: plan.makespan)
        return self._take(_Planned(asked, stages, frozenset(_peers(stages)), instance, best), why)

    def _take(self, found: _Planned, why: str) -> _Planned:
        self.whys[why], self.newest, self._age = self.whys[why] + 1, why, 0
        facts = {"why": why, "paths": len(found.paths), "seconds": round(found.plan.makespan, 3)}
        self._emit("planned", facts)
        return found

    def _instance(self, stages: Stages, length: int, paths: int, micros: int) -> Instance:
        return self.survey.instance(
            list(stages.values()),
            length=length,
            paths=paths,
            rounds=math.ceil(micros / paths),
            room=self._room,
            swaps=self._swaps,
        )


@dataclass(frozen=True, slots=True)
class _Planned:
    """A plan, what was asked (micro-batches, length, stages), of whom, who of them was there, and what was known then."""

    asked: tuple[int, int, tuple[int, ...]]
    stages: Stages
    here: frozenset[PeerId]
    instance: Instance
    plan: Plan

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return _peers(self.stages)

    @property
    def paths(self) -> Paths:
        return self.plan.paths

    def course(self, micros: int) -> Course:
        """Micro-batches take the paths in turn."""
        peers, names = (b"", *self.peers), list(self.stages)
        ways = [[(names[int(self.instance.stage[p]) - 1], peers[p]) for p in path[1:]] for path in self.paths]
        count = len(ways)
        lanes = tuple(tuple(range(path, micros, count)) for path in range(min(count, micros)))
        return Course(tuple(ways[micro % count] for micro in range(micros)), lanes, self.plan.makespan)

    def moved(self, measured: Instance) -> bool:
        """Whether something that these paths use is no longer what it was, and the step not either because of it."""
        least = WEIGHT * self.plan.makespan / self.instance.rounds
        pairs = {pair for path in self.paths for pair in pairwise((*path, path[0]))}
        values = [(self.instance.delays[pair], measured.delays[pair]) for pair in sorted(pairs)]
        values += [(self.instance.work[p], measured.work[p]) for p in sorted({p for path in self.paths for p in path})]
        if any(abs(new - old) > max(MOVED * old, least) for old, new in values):
            return True
        return abs(makespan(measured, self.paths) - self.plan.makespan) > MOVED * self.plan.makespan


def _stages(crew: Crew, step: int) -> Stages:
    """Who can be asked in a step, by stage."""
    return {stage: tuple(crew.able(stage, step, {})) for stage in sorted(crew.holders)}


def _peers(stages: Stages) -> tuple[PeerId, ...]:
    return tuple(peer for members in stages.values() for peer in members)
