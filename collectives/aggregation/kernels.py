"""Kernels of the robust rules: Gram matrix, product, eigenvectors; the same bits everywhere.

Every sum is in float64 in a fixed order, as in compression/kernels/common.py. BLAS and LAPACK are not used: their order of
summation depends on the processor.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.kernels.common import LANES, kernel

TILE = 1 << 13
"""Columns of a tile of the Gram matrix: the tiles of some rows fit in the second-level cache."""

SWEEPS = 40
"""Largest number of sweeps of the Jacobi method; a matrix of 64 rows needs about ten."""


@kernel
def add_gram(rows: NDArray[np.float32], gram: NDArray[np.float64]) -> None:
    """Add rows·rowsᵀ to gram, tile after tile; rows: (n, d), gram: (n, n).

    In each tile a product is 64 interleaved partial sums, then their sum in order. A product of two float32 is exact in
    float64.
    """
    n, d = rows.shape
    sums = np.empty(LANES, np.float64)
    for start in range(0, d, TILE):
        stop = min(start + TILE, d)
        whole = stop - (stop - start) % LANES
        for i in range(n):
            for j in range(i + 1):
                sums[:] = 0.0
                for t in range(start, whole, LANES):
                    for lane in range(LANES):
                        sums[lane] += np.float64(rows[i, t + lane]) * np.float64(rows[j, t + lane])
                for lane in range(stop - whole):
                    sums[lane] += np.float64(rows[i, whole + lane]) * np.float64(rows[j, whole + lane])
                total = 0.0
                for lane in range(LANES):
                    total += sums[lane]
                gram[i, j] += total
                if i != j:
                    gram[j, i] += total


@kernel
def product(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a·b; each element is summed in ascending order of the inner index."""
    out = np.zeros((a.shape[0], b.shape[1]), np.float64)
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            total = 0.0
            for k in range(a.shape[1]):
                total += a[i, k] * b[k, j]
            out[i, j] = total
    return out


@kernel
def eigen(matrix: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the eigenvalues of a symmetric matrix in descending order, and the eigenvectors as columns.

    Cyclic Jacobi rotations in fp64, row by row, until every off-diagonal element is below the rounding of the largest
    diagonal one (Golub and Van Loan, Matrix Computations, 8.5). Equal eigenvalues keep the order of their columns.
    """
    n = matrix.shape[0]
    a, vectors = matrix.copy(), np.zeros((n, n), np.float64)
    for i in range(n):
        vectors[i, i] = 1.0
    for _ in range(SWEEPS):
        largest, off = 0.0, 0.0
        for i in range(n):
            largest = max(largest, abs(a[i, i]))
            for j in range(i):
                off = max(off, abs(a[i, j]))
        if off <= 1e-16 * largest:
            break
        for p in range(n):
            for q in range(p + 1, n):
                if a[p, q] == 0.0:
                    continue
                theta = (a[q, q] - a[p, p]) / (2.0 * a[p, q])
                root = abs(theta) + np.sqrt(theta * theta + 1.0) if abs(theta) < 1e150 else 2.0 * abs(theta)
                t = 1.0 / root if theta >= 0.0 else -1.0 / root
                c = 1.0 / np.sqrt(t * t + 1.0)
                s = t * c
                for k in range(n):
                    x, y = a[k, p], a[k, q]
                    a[k, p], a[k, q] = c * x - s * y, s * x + c * y
                for k in range(n):
                    x, y = a[p, k], a[q, k]
                    a[p, k], a[q, k] = c * x - s * y, s * x + c * y
                a[p, q] = a[q, p] = 0.0
                for k in range(n):
                    x, y = vectors[k, p], vectors[k, q]
                    vectors[k, p], vectors[k, q] = c * x - s * y, s * x + c * y
    order = np.arange(n)
    for i in range(1, n):  # insertion sort, stable
        j = i
        while j > 0 and a[order[j], order[j]] > a[order[j - 1], order[j - 1]]:
            order[j], order[j - 1] = order[j - 1], order[j]
            j -= 1
    values, sorted_vectors = np.empty(n, np.float64), np.empty((n, n), np.float64)
    for i in range(n):
        values[i] = a[order[i], order[i]]
        for k in range(n):
            sorted_vectors[k, i] = vectors[k, order[i]]
    return values, sorted_vectors
