"""A stage whose every holder died: where its parameters come from, and how they are made up where nobody has them.

CheckFree (Blagoev et al. 2025, arXiv 2506.15461): a lost stage begins anew as the mean of its neighbours, weighted by the size
of their last gradients: who still learns most counts most. CheckFree+: every other micro-batch visits the first two and the
last two stages after the origin in the other order, so each of those can stand in for its neighbour.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Source: TypeAlias = Literal["holder", "checkpoint", "twin", "average", "old checkpoint", "nothing"]

LEAST = 1e-4
"""Added to both weights, so that there is a mean where neither neighbour has a gradient."""

FASTER = 1.1
"""What the learning rate of a stage that was made up is multiplied by; its optimizer begins anew."""


@dataclass(frozen=True, slots=True)
class Rescue:
    """`source` of the lost stage, and the stages that it is taken from: its twin, or the two that are averaged."""

    source: Source
    stages: tuple[int, ...] = ()

    @property
    def anew(self) -> bool:
        """Whether the parameters are made up: a fresh optimizer, and a learning rate `FASTER` times as high."""
        return self.source in ("twin", "average")


def rescue(
    stage: int,
    stages: int,
    *,
    lost: Collection[int],
    holders: int = 0,
    checkpoint: int | None = None,
    recent: int,
    swapped: bool = False,
) -> Rescue:
    """The best source there is. In order: another holder; a checkpoint no older than `recent` rounds; made up; any checkpoint.

    `lost`: all stages without a holder, this one among them; `holders`: peers that have it in full, replicas and buddies too;
    `checkpoint`: age in rounds of the newest one, None for none; `swapped`: every other micro-batch went by `plus`.
    """
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} of {stages}")
    if holders > 0:
        return Rescue("holder")
    if checkpoint is not None and checkpoint <= recent:
        return Rescue("checkpoint")
    twin = _twin(stage, stages)
    if swapped and twin is not None and twin not in lost:
        return Rescue("twin", (twin,))
    if 0 < stage < stages - 1 and stage - 1 not in lost and stage + 1 not in lost:
        return Rescue("average", (stage - 1, stage + 1))
    return Rescue("old checkpoint" if checkpoint is not None else "nothing")


def _twin(stage: int, stages: int) -> int | None:
    """Whose place it takes in `plus`."""
    order = plus(stages)
    return order[stage] if order[stage] != stage else None


def plus(stages: int) -> tuple[int, ...]:
    """The order of odd micro-batches with CheckFree+: 0, 2, 1, 3, …, S - 1, S - 2. With fewer than five stages only the first
    pair is exchanged, and none where there is one after the origin.
    """
    order = list(range(stages))
    if stages > 2:
        order[1], order[2] = 2, 1
    if stages > 4:
        order[-2], order[-1] = stages - 1, stages - 2
    return tuple(order)


def average(
    before: NDArray[np.float32], after: NDArray[np.float32], before_norm: float, after_norm: float
) -> NDArray[np.float32]:
    """(w1 before + w2 after) / (w1 + w2), summed in float64; all vectors (n,).

    The weights are norms of the last gradients before they were clipped: after it they are often both 1. Raises ValueError when
    the vectors differ in shape or a norm is negative or no number.
    """
    if before.shape != after.shape or before.ndim != 1:
        raise ValueError(f"neighbours of shapes {before.shape} and {after.shape}")
    if not (0 <= before_norm < np.inf and 0 <= after_norm < np.inf):
        raise ValueError(f"norms {before_norm} and {after_norm}")
    one, two = before_norm + LEAST, after_norm + LEAST
    mean = (one * before.astype(np.float64) + two * after.astype(np.float64)) / (one + two)
    return mean.astype(np.float32)
