"""Kernels that use the entries of sparse payloads: adding to a vector, counting and averaging.

`kernels/topk.py` explains geometries. `tests/kit/reference/sparse.py` has the same arithmetic in numpy; tests check that
the two are equal bit for bit.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numpy.typing import NDArray
from thinwire.compression.kernels.bitops import prefetch
from thinwire.compression.kernels.common import _pointer, inline, kernel
from thinwire.compression.kernels.topk import ACROSS, COLS, SIDE, Geometry, Int, entry, kept

AHEAD = 3
"""Number of chunks between the prefetch of an entry's memory and its use."""


@inline
def fetch(indices: NDArray[np.uint16], geometry: Geometry, chunk: Int, shift: Int, out: NDArray[np.float32]) -> None:
    """Prefetch the memory of a chunk's entries: they lie far apart, and each would be a cache miss."""
    side, cols = geometry[SIDE], geometry[COLS]
    i, j = chunk // geometry[ACROSS], chunk % geometry[ACROSS]
    corner, start = (i * cols + j) * side, entry(geometry, chunk)
    for e in range(start, start + kept(geometry, i, j)):
        at = np.int64(indices[e])
        prefetch(out, corner + (at >> shift) * cols + (at & side - 1))


@inline
def log2(side: Int) -> Int:
    """Return the exponent of a power of two."""
    shift = np.int64(0)
    while 1 << shift < side:
        shift += 1
    return shift


@kernel
def scatter(
    indices: NDArray[np.uint16],
    codes: NDArray[np.uint8],
    levels: NDArray[np.float32],
    geometry: Geometry,
    first: int,
    last: int,
    out: NDArray[np.float32],
) -> None:
    """Add levels[code] to out, the section's flat elements, at the entries of chunks [first, last)."""
    side, cols, across = geometry[SIDE], geometry[COLS], geometry[ACROSS]
    shift = log2(side)
    e = entry(geometry, first)
    for b in range(first, last):
        if b + AHEAD < last:
            fetch(indices, geometry, b + AHEAD, shift, out)
        i, j = b // across, b % across
        corner = (i * cols + j) * side
        for _ in range(kept(geometry, i, j)):
            at = np.int64(indices[e])
            out[corner + (at >> shift) * cols + (at & side - 1)] += levels[codes[e]]
            e += 1


@kernel
def decode_strip(
    indices: NDArray[np.uint16],
    codes: NDArray[np.uint8],
    levels: NDArray[np.float32],
    geometry: Geometry,
    first: int,
    last: int,
    out: NDArray[np.float32],
) -> None:
    """Write levels[code] to out, the elements of the rows of blocks [first, last), at their entries."""
    side, cols, across = geometry[SIDE], geometry[COLS], geometry[ACROSS]
    shift = log2(side)
    e = entry(geometry, first * across)
    for b in range(first * across, last * across):
        i, j = b // across, b % across
        corner = ((i - first) * cols + j) * side
        for _ in range(kept(geometry, i, j)):
            at = np.int64(indices[e])
            out[corner + (at >> shift) * cols + (at & side - 1)] = levels[codes[e]]
            e += 1


@kernel
def mean(
    indices: NDArray[np.uint64],
    codes: NDArray[np.uint64],
    levels: NDArray[np.float64],
    weights: NDArray[np.float64],
    least: float,
    geometry: Geometry,
    first: int,
    last: int,
    out: NDArray[np.float32],
) -> None:
    """Write the weighted mean of the sent entries of chunks [first, last) to out.

    At each coordinate that any contributor sent: Σ levels[r, code] / max(least, Σ weights of the contributors that sent
    it), in float64. Other coordinates are not changed. indices, codes: addresses by contributor. Weights are > 0.
    """
    side, cols, across = geometry[SIDE], geometry[COLS], geometry[ACROSS]
    shift = log2(side)
    # Sum and weight of a coordinate are adjacent, so that one cache line holds both.
    sums = np.zeros((side * side, 2), np.float64)
    start, end = entry(geometry, first), entry(geometry, last)
    for b in range(first, last):
        i, j = b // across, b % across
        corner = (i * cols + j) * side
        stop = start + kept(geometry, i, j)
        for r in range(weights.size):
            places = carray(_pointer(indices[r]), (2 * end,)).view(np.uint16)
            sent = carray(_pointer(codes[r]), (end,))
            if b + AHEAD < last:
                fetch(places, geometry, b + AHEAD, shift, out)
            for e in range(start, stop):
                at = np.int64(places[e])
                sums[at, 0] += levels[r, sent[e]]
                sums[at, 1] += weights[r]
        for r in range(weights.size):
            places = carray(_pointer(indices[r]), (2 * end,)).view(np.uint16)
            for e in range(start, stop):
                at = np.int64(places[e])
                # The first contributor of a coordinate writes the sum of all; the weight is then zero for the others.
                if sums[at, 1] > 0.0:
                    below = max(least, sums[at, 1])
                    out[corner + (at >> shift) * cols + (at & side - 1)] = np.float32(sums[at, 0] / below)
                    sums[at, 0] = sums[at, 1] = 0.0
        start = stop


@kernel
def senders(indices: NDArray[np.uint64], geometry: Geometry, first: int, last: int, out: NDArray[np.int64]) -> None:
    """Count the contributors that sent each entry of chunks [first, last).

    out[r] is increased by the sum of these numbers over the entries of contributor r. indices: addresses by contributor.
    Sums of integers, so that their order does not matter.
    """
    side = geometry[SIDE]
    counts = np.zeros(side * side, np.int64)
    start, end = entry(geometry, first), entry(geometry, last)
    for b in range(first, last):
        stop = start + kept(geometry, b // geometry[ACROSS], b % geometry[ACROSS])
        for r in range(indices.size):
            places = carray(_pointer(indices[r]), (2 * end,)).view(np.uint16)
            for e in range(start, stop):
                counts[places[e]] += 1
        for r in range(indices.size):
            places = carray(_pointer(indices[r]), (2 * end,)).view(np.uint16)
            for e in range(start, stop):
                out[r] += counts[places[e]]
        for r in range(indices.size):
            places = carray(_pointer(indices[r]), (2 * end,)).view(np.uint16)
            for e in range(start, stop):
                counts[places[e]] = 0
        start = stop
