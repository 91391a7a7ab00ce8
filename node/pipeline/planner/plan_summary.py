"""Summary of a pipeline plan: seconds, comparison with the full pipeline, and the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
from thinwire.node.pipeline.planner.constraints import Paths
from thinwire.node.pipeline.planner.makespan import Timeline, full, makespan, play
from thinwire.node.pipeline.planner.path_search import TRIES, plan
from thinwire.node.pipeline.planner.problem import Problem, UnarrangedProblem
from thinwire.node.pipeline.planner.simulate_kernel import BACKWARD, LOSS

STRANGE = 20.0
"""Ratio to the median delay above which a link is reported: it is broken, or a figure is mistyped."""


class PlanSummary(msgspec.Struct, frozen=True):
    """Figures of a plan.

    `makespan`: seconds of a step; `full`: with the pipeline that skips nothing and has as many micro-batches; `factor`:
    ratio of the two; `alone`: median seconds of one micro-batch alone, of which `links` between peers; `working` (peers,):
    fraction of the step in which each peer works.
    """

    name: str
    stages: tuple[tuple[int, ...], ...]
    paths: Paths
    microbatches: int
    makespan: float
    full: float
    factor: float
    alone: float
    links: float
    working: tuple[float, ...]
    notes: tuple[str, ...]


def look(
    asked: Problem | UnarrangedProblem, *, seed: int = 0, tries: int = TRIES
) -> tuple[Problem, Timeline, PlanSummary]:
    """Plan, and simulate the plan. Raises ProblemError if nothing can be planned."""
    instance, found = plan(asked, seed=seed, tries=tries)
    timeline = play(instance, found.paths)
    whole = makespan(instance, full(instance))
    links = [_links(instance, path) for path in found.paths]
    alone = [_work(instance, path) + on_links for path, on_links in zip(found.paths, links, strict=True)]
    middle = sorted(range(len(alone)), key=alone.__getitem__)[len(alone) // 2]
    summary = PlanSummary(
        name=instance.name,
        stages=instance.stages,
        paths=found.paths,
        microbatches=len(found.paths) * instance.rounds,
        makespan=timeline.makespan,
        full=whole,
        factor=whole / timeline.makespan,
        alone=alone[middle],
        links=links[middle],
        working=tuple(timeline.busy(peer) / timeline.makespan for peer in range(instance.peers)),
        notes=tuple(_notes(instance, alone, isinstance(asked, UnarrangedProblem))),
    )
    return instance, timeline, summary


def _links(instance: Problem, path: Sequence[int]) -> float:
    hops = zip(path, (*path[1:], path[0]), strict=True)
    return float(sum(instance.delays[a, b] + instance.delays[b, a] for a, b in hops))


def _work(instance: Problem, path: Sequence[int]) -> float:
    return float(sum((1 + BACKWARD) * instance.work[peer] for peer in path) + LOSS * instance.work[path[0]])


def _notes(instance: Problem, alone: list[float], arranged: bool) -> list[str]:
    notes = []
    if arranged:
        notes.append("the planner put the peers into stages; an instance with partitions keeps those")
    members = [peer for stage in instance.stages for peer in stage]
    pairs = [(a, b) for a in members for b in members if a < b]
    between = [float(max(instance.delays[a, b], instance.delays[b, a])) for a, b in pairs]
    middle = float(np.median(between))
    for (a, b), delay in zip(pairs, between, strict=True):
        if middle > 0 and delay > STRANGE * middle:
            text = f"{delay:.4g} s from peer {instance.label(a)} to {instance.label(b)} are {delay / middle:.0f} times"
            notes.append(f"{text} the median: broken, or mistyped?")
            if any({a, b} in map(set, pairwise((*path, path[0]))) for path in full(instance)):
                notes.append("the full pipeline uses this link, so its time is no useful comparison")
    longest = max(alone) * instance.rounds
    notes.append(
        f"no plan with these paths is faster than {longest:.2f} s, its longest path {instance.rounds} times alone"
    )
    return notes
