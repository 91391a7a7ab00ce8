"""Duration of a step with a plan, and the schedule of each peer: the event simulation, with names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from thinwire.node.pipeline.planner.constraints import Paths
from thinwire.node.pipeline.planner.problem import Problem
from thinwire.node.pipeline.planner.simulate_kernel import BACKWARD, LOSS, simulate

Kind: TypeAlias = Literal["forward", "loss", "backward"]


@dataclass(frozen=True, slots=True)
class MicroBatchPass:
    """Work of a peer on a path's micro-batch in one round, from `start` to `end` in seconds."""

    peer: int
    path: int
    round: int
    kind: Kind
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Duration of the step in seconds, and its operations in the order of their start."""

    makespan: float
    operations: tuple[MicroBatchPass, ...]

    def busy(self, peer: int) -> float:
        """Return the seconds that a peer works."""
        return sum(op.end - op.start for op in self.operations if op.peer == peer)


def _starts(instance: Problem, paths: Sequence[Sequence[int]]) -> tuple[float, NDArray[np.float64]]:
    table = np.array(paths, np.int64).reshape(len(paths), -1)
    starts = np.full((len(paths) * instance.rounds, 2 * table.shape[1] + 1), np.nan)
    took = simulate(
        table, instance.delays, instance.work, instance.memory, instance.rounds, instance.gap, np.inf, starts
    )
    return took, starts


def makespan(instance: Problem, paths: Sequence[Sequence[int]]) -> float:
    """Return the seconds of a step, infinite in a deadlock. All paths have one length."""
    return _starts(instance, paths)[0] if len(paths) else 0.0


def play(instance: Problem, paths: Sequence[Sequence[int]]) -> Timeline:
    """Simulate the whole step. Raises ValueError if it never ends; valid plans always end."""
    if not len(paths):
        return Timeline(0.0, ())
    took, starts = _starts(instance, paths)
    if not np.isfinite(took):
        raise ValueError("micro-batches wait for each other's slots for ever")
    length = len(paths[0])
    operations = []
    for row, times in enumerate(starts.tolist()):
        number, turn = divmod(row, instance.rounds)
        for step, start in enumerate(times):
            kind: Kind = "forward" if step < length else "loss" if step == length else "backward"
            peer = paths[number][min(step, 2 * length - step) % length]
            factor = 1.0 if step < length else LOSS if step == length else BACKWARD
            end = start + factor * float(instance.work[peer])
            operations.append(MicroBatchPass(peer, number, turn, kind, start, end))
    operations.sort(key=lambda op: (op.start, op.peer, op.path))
    return Timeline(took, tuple(operations))


def full(instance: Problem) -> Paths:
    """Return paths that skip nothing: an origin's path uses the same place in every stage, in turn."""
    return tuple(
        (origin, *(stage[place % len(stage)] for stage in instance.stages[1:] if stage))
        for place, origin in enumerate(instance.stages[0])
        for _ in range(instance.per_start)
    )
