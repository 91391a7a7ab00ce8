"""Schedules inside a replica as data (GPipe, 1F1B), their duration, and layers per stage.

GPipe: Huang et al. 2019, arXiv 1811.06965. 1F1B: Narayanan et al. 2019 (PipeDream), doi 10.1145/3341301.3359646. Here
the last stage has the loss, as in those papers; `makespan.py` has replicas whose micro-batches return to their origin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Task: TypeAlias = tuple[Literal["forward", "backward"], int]
"""Kind of work, and the micro-batch."""


def gpipe(stages: int, stage: int, microbatches: int) -> tuple[Task, ...]:
    """All forwards, then all backwards. Every stage holds every micro-batch."""
    _check(stages, stage, microbatches)
    forwards: list[Task] = [("forward", number) for number in range(microbatches)]
    return (*forwards, *(("backward", number) for number in range(microbatches)))


def one_forward_one_backward(stages: int, stage: int, microbatches: int) -> tuple[Task, ...]:
    """1F1B: as many forwards as there are later stages, then backwards and forwards in turn.

    Stage s holds at most stages - s.
    """
    _check(stages, stage, microbatches)
    ahead = min(stages - 1 - stage, microbatches)
    order: list[Task] = [("forward", number) for number in range(ahead)]
    for number in range(microbatches):
        if ahead + number < microbatches:
            order.append(("forward", ahead + number))
        order.append(("backward", number))
    return tuple(order)


def held(order: Sequence[Task]) -> int:
    """Return the largest number of micro-batches whose activations wait for their backward at once."""
    now = most = 0
    for kind, _ in order:
        now += 1 if kind == "forward" else -1
        most = max(most, now)
    return most


def bubble(stages: int, microbatches: int) -> float:
    """Return the idle fraction of stages of equal speed with either schedule and free links."""
    return (stages - 1) / (microbatches + stages - 1)


@dataclass(frozen=True, slots=True)
class Step:
    """Duration of a step in seconds, and the idle fraction of the stages."""

    seconds: float
    idle: float


def play(
    orders: Sequence[Sequence[Task]], forward: Sequence[float], backward: Sequence[float], delay: float = 0.0
) -> Step:
    """Simulate stages that run their tasks in order, each as soon as its input is available.

    `forward`, `backward` (stages,): seconds. `delay`: seconds from stage to stage. Raises ValueError in a deadlock.
    """
    last = len(orders) - 1
    ends: dict[tuple[int, Task], float] = {}
    free, place = [0.0] * len(orders), [0] * len(orders)
    left = sum(len(order) for order in orders)
    while left:
        before = left
        for stage, order in enumerate(orders):
            while place[stage] < len(order):
                kind, number = task = order[place[stage]]
                if kind == "forward":
                    source = None if stage == 0 else (stage - 1, task)
                elif stage == last:
                    source = (stage, ("forward", number))
                else:
                    source = (stage + 1, task)
                if source is not None and source not in ends:
                    break
                there = 0.0 if source is None else ends[source] + (delay if source[0] != stage else 0.0)
                took = forward[stage] if kind == "forward" else backward[stage]
                free[stage] = ends[stage, task] = max(free[stage], there) + took
                place[stage] += 1
                left -= 1
        if left == before:
            raise ValueError("stages wait for each other for ever")
    seconds = max(free, default=0.0)
    busy = sum(
        (forward if kind == "forward" else backward)[stage] for stage, order in enumerate(orders) for kind, _ in order
    )
    return Step(seconds, 1 - busy / (len(orders) * seconds) if seconds else 0.0)


def deal(layers: int, speeds: Sequence[float], ends: float) -> tuple[int, ...]:
    """Distribute layers such that the slowest stage is as fast as possible, at least one layer for each.

    `speeds` (stages,): layers per second; `ends`: cost of embedding, head and loss on the origin, stage 0, in layers;
    the origin gets fewer layers for that. Raises ValueError if there are fewer layers than stages.
    """
    if layers < len(speeds) or not all(speed > 0 for speed in speeds):
        raise ValueError(f"{layers} layers for {len(speeds)} stages")
    parts = [1] * len(speeds)
    for _ in range(layers - len(speeds)):
        # Give the next layer to the stage that finishes it soonest: for equal layers this greedy choice is optimal.
        took = [(part + 1 + (0 if stage else ends)) / speeds[stage] for stage, part in enumerate(parts)]
        parts[took.index(min(took))] += 1
    return tuple(parts)


def _check(stages: int, stage: int, microbatches: int) -> None:
    if not 0 <= stage < stages or microbatches < 1:
        raise ValueError(f"stage {stage} of {stages} with {microbatches} micro-batches")
