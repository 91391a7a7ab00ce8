"""Rules that treat each coordinate by itself. Rows: decoded contributions, (n, d) in float32.

Sorting changes no bits and sums are in float64, row after row, so results do not depend on the machine. A negative zero
is replaced by a positive one first: their order after sorting depends on the processor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.core.types import Floats

Rows = NDArray[np.float32]


def combination(rows: Rows, coefficients: Sequence[float]) -> Floats:
    """Return Σ c·x, rounded once."""
    sums = np.zeros(rows.shape[1])
    for row, coefficient in zip(rows, coefficients, strict=True):
        if coefficient:
            sums += coefficient * row.astype(np.float64)
    return sums.astype(np.float32)


def median(rows: Rows) -> Floats:
    """Return the lower median of each coordinate. Unweighted. Yin et al. (arXiv 1803.01498)."""
    found: Floats = _sorted(rows)[(len(rows) - 1) // 2]
    return found


def trimmed_mean(rows: Rows, liars: int) -> Floats:
    """Return the mean of each coordinate without its f smallest and f largest values. Unweighted.

    Yin et al. (arXiv 1803.01498). The values that remain are summed: a sum of all minus the extremes would cancel.
    """
    kept = _sorted(rows)[liars : len(rows) - liars]
    return combination(kept, [1.0 / len(kept)] * len(kept))


def around_median(rows: Rows, liars: int) -> Floats:
    """Return the mean of the n − 2f values of each coordinate nearest to its lower median.

    Unweighted. The second step of Bulyan. Equally near values: the smaller first.
    """
    ordered = _sorted(rows)
    distances = np.abs(ordered.astype(np.float64) - ordered[(len(ordered) - 1) // 2])
    nearest = np.argsort(distances, axis=0, kind="stable")[: len(ordered) - 2 * liars]
    kept = np.take_along_axis(ordered, nearest, axis=0)
    return combination(kept, [1.0 / len(kept)] * len(kept))


def _sorted(rows: Rows) -> Rows:
    return np.sort(rows + np.float32(0.0), axis=0)
