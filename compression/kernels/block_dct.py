"""Kernels that transform the elements of a section to DCT coefficients of its blocks and back.

`dct.py` has the arithmetic, `common.py` the rules for kernels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.kernels.common import kernel
from thinwire.compression.kernels.dct import columns, rows_back, transpose


@kernel
def analyse(
    values: NDArray[np.float32],
    cols: int,
    first: int,
    last: int,
    dt: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Compute out[b] = DᵀBD for the blocks first ≤ b < last of a section. Padding is zero.

    values: the section's elements in rows of `cols`, of which the last may be short. dt: Dᵀ. out: (count, side, side).
    """
    side = out.shape[1]
    across = (cols + side - 1) // side
    block, half = np.empty((side, side), np.float32), np.empty((side, side), np.float32)
    odd = np.empty((side, side), np.float32)
    for b in range(first, last):
        left = b % across * side
        wide = min(side, cols - left)
        for i in range(side):
            start = (b // across * side + i) * cols + left
            there = max(0, min(wide, values.size - start))
            line, source = block[i], values[min(start, values.size) : min(start, values.size) + there]
            for j in range(there):
                line[j] = source[j]
            for j in range(there, side):
                line[j] = np.float32(0.0)
        columns(block, dt, half, odd)
        transpose(half, block)
        columns(block, dt, half, odd)
        transpose(half, out[b])


@kernel
def synthesise(
    coefficients: NDArray[np.float32],
    cols: int,
    first: int,
    last: int,
    d: NDArray[np.float32],
    scale: np.float32,
    values: NDArray[np.float32],
) -> None:
    """Add scale·DQDᵀ to values, in float32, for the blocks first ≤ b < last; arguments as in `analyse`."""
    side = coefficients.shape[1]
    across = (cols + side - 1) // side
    block, half = np.empty((side, side), np.float32), np.empty((side, side), np.float32)
    odd = np.empty((side, side), np.float32)
    for b in range(first, last):
        rows_back(coefficients[b], d, half, odd)
        transpose(half, block)
        rows_back(block, d, half, odd)
        transpose(half, block)
        left = b % across * side
        wide = min(side, cols - left)
        for i in range(side):
            start = (b // across * side + i) * cols + left
            there = max(0, min(wide, values.size - start))
            line, target = block[i], values[min(start, values.size) : min(start, values.size) + there]
            for j in range(there):
                target[j] = target[j] + scale * line[j]
