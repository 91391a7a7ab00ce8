"""A stage whose every holder died: where its parameters come from, and how they are made up where nobody has them.

CheckFree (Blagoev et al. 2025, arXiv 2506.15461): a lost stage begins anew as the mean of its neighbours, weighted by the size
of their last gradients: who still learns most counts most. CheckFree+: every other micro-batch visits the first two and the
last two stages after the origin in the other order, so each of those can stand in for its neighbour.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.codec import Floats

from ..fragments import Layout, Piece

Source: TypeAlias = Literal["holder", "copy", "checkpoint", "twin", "average", "old copy", "old checkpoint", "nothing"]
"""Where a stage can be had from; a copy is what somebody keeps for the day when it is needed, see `Buddy`."""

LEAST = 1e-4
"""Added to both weights, so that there is a mean where neither neighbour has a gradient."""

FASTER = 1.1
"""What the learning rate of a stage that was made up is multiplied by; its optimizer begins anew."""


_LAYER = re.compile(r"blocks\.([0-9]+)\.")


@dataclass(frozen=True, slots=True)
class Rescue:
    """`source` of the lost stage, and the stages that it is taken from: its twin, or the two that are averaged."""

    source: Source
    stages: tuple[int, ...] = ()

    @property
    def anew(self) -> bool:
        """Whether the parameters are made up: a fresh optimizer, and a learning rate `FASTER` times as high."""
        return self.source in ("twin", "average", "nothing")


def rescue(
    stage: int,
    stages: int,
    *,
    lost: Collection[int],
    holders: int = 0,
    copy: int | None = None,
    checkpoint: int | None = None,
    recent: int,
    swapped: bool = False,
) -> Rescue:
    """The best source there is. In order: another holder; the newer one of a copy and a checkpoint, if no older than `recent`
    rounds; made up; the newer one whatever its age; "nothing": the stage begins anew as it was at first.

    `lost`: all stages without a holder, this one among them; `holders`: peers that train it, full replicas too; `copy` and
    `checkpoint`: ages in rounds of the newest ones, None for none; `swapped`: every other micro-batch went by `plus`.
    """
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} of {stages}")
    if holders > 0:
        return Rescue("holder")
    kept: Source | None = None if copy is None else "copy"
    if checkpoint is not None and (copy is None or checkpoint < copy):
        kept = "checkpoint"
    age = min(found for found in (copy, checkpoint, recent + 1) if found is not None)
    if kept is not None and age <= recent:
        return Rescue(kept)
    twin = _twin(stage, stages)
    if swapped and twin is not None and twin not in lost:
        return Rescue("twin", (twin,))
    if 0 < stage < stages - 1 and stage - 1 not in lost and stage + 1 not in lost:
        return Rescue("average", (stage - 1, stage + 1))
    return Rescue("nothing" if kept is None else "old copy" if kept == "copy" else "old checkpoint")


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


def between(
    layout: Layout, before: tuple[Layout, Floats], after: tuple[Layout, Floats], before_norm: float, after_norm: float
) -> Floats:
    """The parameters of a stage with this layout as the `average` of its neighbours', each given as layout and vector.

    Layer by layer: the i-th of n is made of the one at the same place of each neighbour's m, the i·m/n-th, rounded down. Raises
    ValueError when a neighbour has no layers, or other ones.
    """
    theta = np.empty(layout.total, np.float32)
    own, sides = _layers(layout), [(_layers(side), vector) for side, vector in (before, after)]
    if not all(layers for layers, _ in sides):
        raise ValueError("a neighbour has no layers")
    for place, layer in enumerate(own):
        ones, twos = (
            {name: vector[piece.start : piece.stop] for name, piece in side[place * len(side) // len(own)].items()}
            for side, vector in sides
        )
        for name, piece in layer.items():
            if name not in ones or name not in twos:
                raise ValueError(f"a neighbour has no {name}")
            theta[piece.start : piece.stop] = average(ones[name], twos[name], before_norm, after_norm)
    return theta


def _layers(layout: Layout) -> list[dict[str, Piece]]:
    """A stage's layers in order, as their parameters by the names that they have in a layer; without what is of no layer."""
    found: dict[int, dict[str, Piece]] = {}
    for piece in layout.pieces:
        match = _LAYER.match(piece.name)
        if match:
            found.setdefault(int(match[1]), {})[piece.name[match.end() :]] = piece
    return [found[layer] for layer in sorted(found)]
