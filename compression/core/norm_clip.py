"""Factors that clip the norms of contributions to their median."""

from __future__ import annotations

from collections.abc import Sequence

CLIP_FROM = 3
"""Minimum number of contributors for clipping norms to their median.

Of two contributors with different norms neither is known to be wrong.
"""


def clipping(norms: Sequence[float]) -> list[float]:
    """Return the factor of each contribution, min(1, lower median of the norms / its norm).

    All factors are 1 if fewer than CLIP_FROM norms are non-zero. Zero norms do not enter the median; otherwise a part of
    the model in which half of the peers have no gradient would never be trained.
    """
    present = sorted(norm for norm in norms if norm > 0.0)
    if len(present) < CLIP_FROM:
        return [1.0] * len(norms)
    median = present[(len(present) - 1) // 2]
    return [1.0 if norm <= median else median / norm for norm in norms]
