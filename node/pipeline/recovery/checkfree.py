"""Reconstruction of a lost stage from its neighbours (CheckFree).

CheckFree (Blagoev et al. 2025, arXiv 2506.15461): a lost stage restarts from the mean of its neighbours, weighted by
the norms of their last gradients, so that a neighbour that still learns counts more. The paper's CheckFree+, in which
every other micro-batch visits the first and the last stages in swapped order, is not implemented: the first and the last
stage have no mean here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.core.types import Floats
from thinwire.node.state.fragments import layer_of
from thinwire.node.state.layout import Layout, Piece

LEAST = 1e-4
"""Added to both weights, so that there is a mean even if no neighbour has a gradient."""


def average(
    before: NDArray[np.float32], after: NDArray[np.float32], before_norm: float, after_norm: float
) -> NDArray[np.float32]:
    """Return (w1 before + w2 after) / (w1 + w2), summed in float64; all vectors have shape (n,).

    The weights are norms of the last gradients before clipping: after clipping both are often 1. Raises ValueError if
    the shapes differ, or a norm is negative or not a number.
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
    """Return a stage's parameters as the `average` of its neighbours, each given as layout and vector.

    Layer by layer: layer i of n is made from layer floor(i·m/n) of each neighbour's m layers. Raises ValueError if a
    neighbour has no layers, or different ones.
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
    """Return a stage's layers in order, with names inside a layer; parameters of no layer are left out."""
    found: dict[int, dict[str, Piece]] = {}
    for piece in layout.pieces:
        if (layer := layer_of(piece.name)) is not None:
            name, number = layer
            found.setdefault(number, {})[piece.name.removeprefix(f"{name}{number}.")] = piece
    return [found[number] for number in sorted(found)]
