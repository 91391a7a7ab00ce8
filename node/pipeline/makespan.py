"""How long a step takes by a plan, and who does what when: the event simulation, with names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .checker import Paths
from .eventkernel import BACKWARD, LOSS, simulate
from .instance import Instance

Kind: TypeAlias = Literal["forward", "loss", "backward"]


@dataclass(frozen=True, slots=True)
class Operation:
    """Seconds from `start` to `end` that a peer works on a path's micro-batch of a round."""

    peer: int
    path: int
    round: int
    kind: Kind
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds of the step, and its operations by beginning."""

    makespan: float
    operations: tuple[Operation, ...]

    def busy(self, peer: int) -> float:
        """Seconds that a peer works."""
        return sum(op.end - op.start for op in self.operations if op.peer == peer)


def _starts(instance: Instance, paths: Sequence[Sequence[int]]) -> tuple[float, NDArray[np.float64]]:
    table = np.array(paths, np.int64).reshape(len(paths), -1)
    starts = np.full((len(paths) * instance.rounds, 2 * table.shape[1] + 1), np.nan)
    took = simulate(
        table, instance.delays, instance.work, instance.memory, instance.rounds, instance.gap, np.inf, starts
    )
    return took, starts


def makespan(instance: Instance, paths: Sequence[Sequence[int]]) -> float:
    """Seconds of one step; infinite when micro-batches wait for each other's slots for ever. Paths have one length."""
    return _starts(instance, paths)[0] if len(paths) else 0.0


def play(instance: Instance, paths: Sequence[Sequence[int]]) -> Timeline:
    """The whole step. Raises ValueError when it never ends, which no plan that the checker passes does."""
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
            operations.append(Operation(peer, number, turn, kind, start, end))
    operations.sort(key=lambda op: (op.start, op.peer, op.path))
    return Timeline(took, tuple(operations))


def full(instance: Instance) -> Paths:
    """The paths that skip nothing: each origin's go over the same place in every stage, taken in turn."""
    return tuple(
        (origin, *(stage[place % len(stage)] for stage in instance.stages[1:] if stage))
        for place, origin in enumerate(instance.stages[0])
        for _ in range(instance.per_start)
    )
