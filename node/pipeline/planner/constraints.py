"""Constraints of a plan, with violations by name: CC1 to CC3 and TC1 of SkipPipe (arXiv 2502.19913)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from thinwire.node.pipeline.planner.anneal_kernel import MOST_AHEAD
from thinwire.node.pipeline.planner.problem import Problem

Paths: TypeAlias = tuple[tuple[int, ...], ...]
"""Peers that each path visits, its origin first."""


@dataclass(frozen=True, slots=True)
class ConstraintViolation:
    """Violation of `rule` (CC1, CC2, CC3 or TC1) by `name`; `path`: None if several paths do it together."""

    rule: str
    name: str
    path: int | None
    text: str


def violations(instance: Problem, paths: Sequence[Sequence[int]]) -> list[ConstraintViolation]:
    """Return all violations, those of single paths first; empty for a valid plan."""
    found = [broken for number, path in enumerate(paths) for broken in _of_path(instance, number, path)]
    known = [[peer for peer in path if 0 <= peer < instance.peers] for path in paths]
    return [*found, *_of_loads(instance, known)]


def _of_path(instance: Problem, number: int, path: Sequence[int]) -> Iterator[ConstraintViolation]:
    strangers = [peer for peer in path if not 0 <= peer < instance.peers or instance.stage[peer] < 0]
    if strangers:
        yield ConstraintViolation("CC2", "no stage", number, f"peer {strangers[0]} is in no stage")
        return
    stages = [int(instance.stage[peer]) for peer in path]
    if len(path) != instance.length:
        yield ConstraintViolation("CC2", "length", number, f"{len(path)} stages instead of {instance.length}")
    if not path:
        return
    if stages[0] != 0:
        yield ConstraintViolation("CC1", "origin", number, f"it begins at stage {stages[0]}")
    if 0 in stages[1:]:
        yield ConstraintViolation("CC1", "stage 0 in the middle", number, "stage 0 is visited again")
    twice = [stage for stage, visits in Counter(stages).items() if visits > 1 and stage]
    if twice:
        yield ConstraintViolation("CC2", "stage twice", number, f"stage {twice[0]} is visited twice")
    far = [(a, b) for a, b in zip(stages, stages[1:], strict=False) if abs(a - b) > MOST_AHEAD]
    if far:
        yield ConstraintViolation("CC2", "gap", number, f"from stage {far[0][0]} to stage {far[0][1]}")
    behind = []
    frontier = stages[0]
    for stage in stages[1:]:
        if 0 < stage < frontier:
            behind.append(frontier - stage)
        frontier = max(frontier, stage)
    if any(distance > 1 for distance in behind):
        yield ConstraintViolation("CC3", "swap distance", number, f"a visit is {max(behind)} stages behind")
    if len(behind) > instance.swaps:
        yield ConstraintViolation("CC3", "swaps", number, f"{len(behind)} visits are behind")


def _of_loads(instance: Problem, paths: Sequence[Sequence[int]]) -> Iterator[ConstraintViolation]:
    loads = Counter(peer for path in paths for peer in path[1:])
    starts = Counter(path[0] for path in paths if path)
    for number in range(1, len(instance.stages)):
        load, room = sum(loads[peer] for peer in instance.stages[number]), instance.capacity(number)
        if load > room:
            yield ConstraintViolation(
                "CC2", "stage load", None, f"stage {number} has {load} visits and room for {room}"
            )
    for peer, load in sorted(loads.items()):
        if instance.stage[peer] > 0 and load > instance.memory[peer]:
            text = f"peer {peer} has {load} visits and room for {instance.memory[peer]}"
            yield ConstraintViolation("TC1", "peer load", None, text)
    for peer, load in sorted(starts.items()):
        if load > instance.per_start:
            yield ConstraintViolation(
                "TC1", "starts", None, f"peer {peer} begins {load} paths instead of {instance.per_start}"
            )
