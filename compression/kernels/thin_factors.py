"""Bit-reproducible products with thin factors, and their orthonormalisation.

`common.py` has the rules for kernels. A factor of rank r of a matrix (rows × cols) is stored transposed, so that all loops
run along memory: p is (r, rows), q is (r, cols).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.kernels.common import kernel

LANES = 16
"""Number of partial sums of a dot product. Fixed, because it determines the rounding."""

DEPENDENT = 1e-5
"""Threshold of dependence.

A vector is dependent on others if less than this share of its norm is left after projecting them out.
"""


@kernel
def project(m: NDArray[np.float32], q: NDArray[np.float32], p: NDArray[np.float32]) -> None:
    """Compute p = (M·Qᵀ)ᵀ in float32: 16 interleaved partial sums, then their sum in order."""
    rows, cols = m.shape
    whole = cols - cols % LANES
    sums = np.empty(LANES, np.float32)
    for i in range(rows):
        line = m[i]
        for s in range(q.shape[0]):
            other = q[s]
            sums[:] = np.float32(0.0)
            start = 0
            # Unrolling by four reads and writes the sums less often; the order of additions stays the same.
            while start + 4 * LANES <= whole:
                a, b = line[start : start + 4 * LANES], other[start : start + 4 * LANES]
                for k in range(LANES):
                    far, last = k + 2 * LANES, k + 3 * LANES
                    near = sums[k] + a[k] * b[k] + a[k + LANES] * b[k + LANES]
                    sums[k] = near + a[far] * b[far] + a[last] * b[last]
                start += 4 * LANES
            for j in range(start, whole, LANES):
                for k in range(LANES):
                    sums[k] += line[j + k] * other[j + k]
            for j in range(whole, cols):
                sums[j - whole] += line[j] * other[j]
            total = np.float32(0.0)
            for k in range(LANES):
                total += sums[k]
            p[s, i] = total


@kernel
def project_back(m: NDArray[np.float32], p: NDArray[np.float32], q: NDArray[np.float32]) -> None:
    """Compute q = P·M in float32, row after row of M."""
    rows, cols = m.shape
    whole = rows - rows % 4
    for s in range(p.shape[0]):
        line = q[s]
        line[:] = np.float32(0.0)
    for i in range(0, whole, 4):
        a, b, c, d = m[i], m[i + 1], m[i + 2], m[i + 3]
        for s in range(p.shape[0]):
            f, g, h, e, line = p[s, i], p[s, i + 1], p[s, i + 2], p[s, i + 3], q[s]
            for j in range(cols):
                line[j] = line[j] + f * a[j] + g * b[j] + h * c[j] + e * d[j]
    for i in range(whole, rows):
        a = m[i]
        for s in range(p.shape[0]):
            f, line = p[s, i], q[s]
            for j in range(cols):
                line[j] = line[j] + f * a[j]


@kernel
def accumulate(p: NDArray[np.float32], q: NDArray[np.float32], sign: np.float32, out: NDArray[np.float32]) -> None:
    """Add sign·PᵀQ to out in float32, one rank after the other; sign is 1 or −1."""
    rows, cols = out.shape
    whole = p.shape[0] - p.shape[0] % 4
    for i in range(rows):
        target = out[i]
        for s in range(0, whole, 4):
            a, b, c, d = q[s], q[s + 1], q[s + 2], q[s + 3]
            f, g, h, e = sign * p[s, i], sign * p[s + 1, i], sign * p[s + 2, i], sign * p[s + 3, i]
            for j in range(cols):
                target[j] = target[j] + f * a[j] + g * b[j] + h * c[j] + e * d[j]
        for s in range(whole, p.shape[0]):
            f, a = sign * p[s, i], q[s]
            for j in range(cols):
                target[j] = target[j] + f * a[j]


@kernel
def orthonormalise(p: NDArray[np.float32]) -> None:
    """Orthonormalise the rows of p (r ≤ columns) in place: Gram–Schmidt in float64, each row twice.

    A dependent or zero row s is replaced with the first unit vector, starting at the s-th, that is independent enough.
    It costs no more to send and restores directions that the factor had lost.
    """
    rank, n = p.shape
    rows = p.astype(np.float64)
    for s in range(rank):
        row = rows[s]
        whole = math.sqrt(_dot(row, row))
        left = _reduce(rows, s)
        unit = s
        # At least one of the n unit vectors keeps 1 / n of its square outside of a subspace of fewer than n dimensions.
        while not left > DEPENDENT * whole:
            row[:] = 0.0
            row[unit % n] = 1.0
            whole, left = 1.0, _reduce(rows, s)
            if left * left * 2 * n < 1.0 and unit < s + n:
                left = 0.0
            unit += 1
        for j in range(n):
            row[j] = row[j] / left
    for s in range(rank):
        for j in range(n):
            p[s, j] = np.float32(rows[s, j])


@kernel
def _reduce(rows: NDArray[np.float64], s: int) -> float:
    """Project the rows before s out of row s, twice, and return the norm of the rest."""
    row = rows[s]
    for _ in range(2):
        for t in range(s):
            other = rows[t]
            share = _dot(row, other)
            for j in range(row.size):
                row[j] = row[j] - share * other[j]
    return math.sqrt(_dot(row, row))


@kernel
def _dot(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    sums = np.zeros(LANES, np.float64)
    whole = a.size - a.size % LANES
    for j in range(0, whole, LANES):
        for lane in range(LANES):
            sums[lane] += a[j + lane] * b[j + lane]
    for j in range(whole, a.size):
        sums[j - whole] += a[j] * b[j]
    total = 0.0
    for lane in range(LANES):
        total += sums[lane]
    return total
