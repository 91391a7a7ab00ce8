"""Factors that clip the norms of contributions to their median."""

from __future__ import annotations

import math
from collections.abc import Sequence

CLIP_FROM = 3
"""Minimum number of contributors for clipping norms to their median.

Of two contributors with different norms neither is known to be wrong.
"""


def limits(norms: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the largest norm with which each contribution counts, τ·max(1, w / median of the weights).

    τ: lower median of the norms. A contribution of more tokens than usual may be longer in proportion: it stands for more
    inner steps. Weights: > 0. All limits are infinite if fewer than CLIP_FROM norms are non-zero. Zero norms do not enter
    the medians; otherwise a part of the model in which half of the peers have no gradient would never be trained.
    """
    present = [(norm, weight) for norm, weight in zip(norms, weights, strict=True) if norm > 0.0]
    if len(present) < CLIP_FROM:
        return [math.inf] * len(norms)
    middle = (len(present) - 1) // 2
    usual, typical = sorted(norm for norm, _ in present)[middle], sorted(weight for _, weight in present)[middle]
    return [usual * max(1.0, weight / typical) for weight in weights]


def clipping(norms: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the factor of each contribution, min(1, its limit / its norm); see `limits`."""
    most = limits(norms, weights)
    return [1.0 if norm <= limit else limit / norm for norm, limit in zip(norms, most, strict=True)]
