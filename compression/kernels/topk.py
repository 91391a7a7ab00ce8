"""Kernels of the sparse encoder: selection of entries, and levels for their magnitudes.

A section is described by its geometry (`Section.geometry`): rows, cols, tail, side, blocks down and across, and four numbers
of selected entries: of an inner block, of a block in the last column, of a block in the last row, and of the corner block.
`tests/kit/reference/sparse.py` has the same arithmetic in numpy; tests check that the two are equal bit for bit.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.kernels.bitops import WORD, lowest, ones, prefetch, reaching
from thinwire.compression.kernels.common import INFINITE, MAGNITUDE, inline, kernel

Geometry: TypeAlias = NDArray[np.int64]
Int: TypeAlias = int | np.int64
ROWS, COLS, TAIL, SIDE, DOWN, ACROSS, KEEP = range(7)

STEP = 1 << 19
"""A sixteenth of an octave.

The search for a chunk's threshold starts this far below the last chunk's threshold.
"""

AHEAD = 2
"""Number of chunks between the prefetch of a chunk and its use: one is too few, three are no better."""


@inline
def kept(geometry: Geometry, i: Int, j: Int) -> Int:
    """Return the number of entries selected in block (i, j)."""
    entries: Int = geometry[KEEP + 2 * int(i == geometry[DOWN] - 1) + int(j == geometry[ACROSS] - 1)]
    return entries


@inline
def entry(geometry: Geometry, chunk: Int) -> Int:
    """Return the number of entries selected in all chunks before this one."""
    i, j = chunk // geometry[ACROSS], chunk % geometry[ACROSS]
    last = geometry[ACROSS] - 1
    above = i * (last * geometry[KEEP] + geometry[KEEP + 1])
    entries: Int = above + j * (geometry[KEEP + 2] if i == geometry[DOWN] - 1 else geometry[KEEP])
    return entries


@inline
def fill(
    bits: NDArray[np.uint32], geometry: Geometry, i: Int, j: Int, block: NDArray[np.uint32], real: NDArray[np.uint64]
) -> None:
    """Copy a block into one piece. Bit c of real[w] tells that element 64·w + c is not padding."""
    side, cols = geometry[SIDE], geometry[COLS]
    real[:] = 0
    for r in range(min(side, geometry[ROWS] - i * side)):
        row = i * side + r
        width = min(side, (geometry[TAIL] if row == geometry[ROWS] - 1 else cols) - j * side)
        for c in range(width):
            block[r * side + c] = bits[row * cols + j * side + c]
        if width > 0:
            real[r * side // WORD] |= ~np.uint64(0) >> np.uint64(WORD - width) << np.uint64(r * side % WORD)


@inline
def mark(bits: NDArray[np.uint32], start: Int, stride: Int, threshold: Int, masks: NDArray[np.uint64]) -> Int:
    """Mark the magnitudes that reach the threshold in `masks`, and count them.

    Word w of 64 values begins at start + stride·w.
    """
    total: Int = np.int64(0)
    for w in range(masks.size):
        masks[w] = reaching(bits, start + stride * w, np.uint32(threshold))
        total += np.int64(ones(masks[w]))
    return total


@inline
def collect(
    bits: NDArray[np.uint32],
    start: Int,
    stride: Int,
    masks: NDArray[np.uint64],
    at: NDArray[np.uint16],
    near: NDArray[np.uint32],
    ahead: Int,
) -> None:
    """Write the positions of the marks of `mark` to `at`, and their values to `near`.

    Both have room for four more. The words from `ahead` on are prefetched, which would slow down `mark`: it is limited by
    memory itself.
    """
    p = np.int64(0)
    for w in range(masks.size):
        mask, q = masks[w], p
        for c in range(0, WORD, 16):
            prefetch(bits, ahead + stride * w + c)
        p += np.int64(ones(mask))
        # Four at a time, whether there are as many or not, because their number is unpredictable.
        while True:
            for _ in range(4):
                lane = np.int64(lowest(mask)) & (WORD - 1)
                mask &= mask - np.uint64(1)
                at[q], near[q] = WORD * w + lane, bits[start + stride * w + lane]
                q += 1
            if mask == 0:
                break


@inline
def narrow(near: NDArray[np.uint32], n: Int, keep: Int, below: np.int64, above: np.int64) -> tuple[np.int64, np.int64]:
    """Return the largest threshold that at least `keep` of n values reach, and how many reach it.

    At least `keep` of them reach `below`, and fewer reach `above`. The values after n are overwritten, to the next whole word.
    """
    words = (n + WORD - 1) // WORD
    near[n : words * WORD] = 0
    reached = np.int64(n)
    while reached > keep and above - below > 1:
        middle = below + (above - below) // 2
        found = np.int64(0)
        for w in range(words):
            found += np.int64(ones(reaching(near, WORD * w, np.uint32(middle))))
        if found >= keep:
            below, reached = middle, found
        else:
            above = middle
    return below, reached


@inline
def select(
    at: NDArray[np.uint16],
    near: NDArray[np.uint32],
    n: Int,
    keep: Int,
    threshold: Int,
    reached: Int,
    final: NDArray[np.uint16],
    final_bits: NDArray[np.uint32],
) -> None:
    """Write the positions and values of the `keep` largest of n values, of equal ones the first.

    `reached` of them reach the threshold. There are no branches in the loops, because the selection is unpredictable: entries
    that are not selected are overwritten.
    """
    p = 0
    if reached == keep:
        for q in range(n):
            final[p], final_bits[p] = at[q], near[q]
            p += int(np.int64(near[q] & MAGNITUDE) >= threshold)
        return
    equal = np.int64(keep)
    for q in range(n):
        equal -= int(np.int64(near[q] & MAGNITUDE) > threshold)
    for q in range(n):
        key = np.int64(near[q] & MAGNITUDE)
        tie = int(key == threshold) & int(equal > 0)
        equal -= tie
        final[p], final_bits[p] = at[q], near[q]
        p += int(key > threshold) | tie


@kernel
def topk(
    values: NDArray[np.float32],
    geometry: Geometry,
    first: int,
    last: int,
    indices: NDArray[np.uint16],
    chosen: NDArray[np.float32],
) -> np.uint32:
    """Select the entries of chunks [first, last).

    Their local indices and values are written to their places in the section. Returns the largest magnitude bits of
    these chunks; INFINITE or above means that a value is not finite and the output is invalid.
    """
    bits, chosen_bits = values.view(np.uint32), chosen.view(np.uint32)
    side, cols, across = geometry[SIDE], geometry[COLS], geometry[ACROSS]
    chunk = side * side
    words = chunk // WORD
    block, real = np.zeros(chunk, np.uint32), np.zeros(words, np.uint64)
    masks, at = np.zeros(words, np.uint64), np.zeros(chunk + 4, np.uint16)
    # Whole words are compared.
    near = np.zeros(chunk + WORD, np.uint32)
    final, final_bits = np.zeros(chunk + 1, np.uint16), np.zeros(chunk + 1, np.uint32)
    top, guess = np.int64(0), np.int64(INFINITE >> np.uint32(1))
    place = entry(geometry, first)
    for b in range(first, last):
        i, j = b // across, b % across
        keep = kept(geometry, i, j)
        corner = i * side * cols + j * side
        whole = side == WORD and i * side + side <= geometry[ROWS] and j * side + side <= cols
        whole = whole and (geometry[TAIL] == cols or i * side + side < geometry[ROWS])
        if not whole:
            fill(bits, geometry, i, j, block, real)
        # At least `keep` entries reach `below`, unless it is -1, and fewer than `keep` reach `above`.
        below, above, stride, threshold = np.int64(-1), np.int64(1) << 31, np.int64(STEP), guess
        while True:
            if whole:
                n = mark(bits, corner, cols, threshold, masks)
            else:
                mark(block, 0, WORD, threshold, masks)
                n = np.int64(0)
                for w in range(words):
                    masks[w] &= real[w]
                    n += np.int64(ones(masks[w]))
            if n >= keep:
                below = threshold
                if n <= 3 * keep + WORD or above - below == 1:
                    break
            else:
                above = threshold
            # Grow the steps, because most of the range of floats is empty.
            if above >> 31:
                threshold = min(above - 1, below + stride)
            elif below < 0:
                threshold = max(np.int64(0), above - stride)
            else:
                threshold = below + (above - below) // 2
            stride *= 2
        ahead = b + AHEAD
        ahead = ahead // across * side * cols + ahead % across * side
        if whole:
            collect(bits, corner, cols, masks, at, near, ahead)
        else:
            collect(block, 0, WORD, masks, at, near, ahead)
        peak = np.uint32(0)
        for q in range(n):
            peak = max(peak, np.uint32(near[q] & MAGNITUDE))
        if peak >= INFINITE:
            return peak
        top, above = max(top, np.int64(peak)), min(above, np.int64(peak) + 1)
        below, reached = narrow(near, n, keep, below, above)
        guess = max(np.int64(0), (guess + below - STEP) // 2)
        select(at, near, n, keep, below, reached, final, final_bits)
        for p in range(keep):
            indices[place + p], chosen_bits[place + p] = final[p], final_bits[p]
        place += keep
    return np.uint32(top)


@kernel
def units(values: NDArray[np.float32], scale: float, out: NDArray[np.int32]) -> Int:
    """Write ⌊|v|·scale⌋ to out, each less than 2**30, and return their sum."""
    total = np.int64(0)
    for i in range(values.size):
        unit = np.int32(np.float64(np.abs(values[i])) * scale)
        out[i] = unit
        total += np.int64(unit)
    return total


@kernel
def beyond(units: NDArray[np.int32], threshold: int) -> tuple[Int, Int]:
    """Return the sum and the number of the units above a threshold."""
    total, number, limit = np.int64(0), np.int64(0), np.int32(threshold)
    for i in range(units.size):
        above = units[i] > limit
        total += np.int64(units[i] if above else np.int32(0))
        number += np.int64(above)
    return total, number


@kernel
def codes(values: NDArray[np.float32], middle: np.float32, out: NDArray[np.uint8]) -> None:
    """Write 2·(v > 0) + (|v| > middle) to out."""
    for i in range(values.size):
        out[i] = np.uint8(2) * np.uint8(values[i] > 0) + np.uint8(np.abs(values[i]) > middle)


@kernel
def signs(values: NDArray[np.float32], out: NDArray[np.uint8]) -> None:
    """Write v > 0 to out."""
    for i in range(values.size):
        out[i] = np.uint8(values[i] > 0)
