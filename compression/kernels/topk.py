"""Kernels of the sparse encoder: selection of entries, and levels for their magnitudes.

A section is described by its geometry (`Section.geometry`): rows, cols, tail, side, blocks down and across, and four numbers
of selected entries: of an inner block, of a block in the last column, of a block in the last row, and of the corner block.
`tests/kit/reference/sparse.py` has the same arithmetic in numpy; tests check that the two are equal bit for bit.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.kernels.bitops import WORD, at_least, lowest, ones
from thinwire.compression.kernels.common import INFINITE, MAGNITUDE, inline, kernel

Geometry: TypeAlias = NDArray[np.int64]
Int: TypeAlias = int | np.int64
ROWS, COLS, TAIL, SIDE, DOWN, ACROSS, KEEP = range(7)

STEP = 1 << 20
"""An eighth of an octave.

The search for a chunk's threshold starts this far below the last chunk's threshold.
"""


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
def fill(bits: NDArray[np.uint32], geometry: Geometry, i: Int, j: Int, keys: NDArray[np.uint32]) -> Int:
    """Fill keys with the block's magnitude bits plus one, so that padding (zero) is below all of them.

    Returns the largest key.
    """
    side, cols = geometry[SIDE], geometry[COLS]
    high, wide = min(side, geometry[ROWS] - i * side), min(side, cols - j * side)
    peak = np.uint32(0)
    if high < side or wide < side or geometry[TAIL] < cols:
        keys[: side * side] = 0
    for r in range(high):
        start = (i * side + r) * cols + j * side
        width = wide
        if i * side + r == geometry[ROWS] - 1:
            width = min(wide, geometry[TAIL] - j * side)
        source, target = bits[start : start + width], keys[r * side : r * side + width]
        for c in range(width):
            key = np.uint32((source[c] & MAGNITUDE) + np.uint32(1))
            target[c] = key
            peak = max(peak, key)
    return np.int64(peak)


@inline
def count(keys: NDArray[np.uint32], words: int, threshold: np.uint32, masks: NDArray[np.uint64]) -> Int:
    """Count the keys that reach the threshold, and mark them in `masks`."""
    total = np.int64(0)
    for w in range(words):
        masks[w] = at_least(keys, WORD * w, threshold)
        total += np.int64(ones(masks[w]))
    return total


@inline
def loosely(
    keys: NDArray[np.uint32], words: int, keep: Int, guess: Int, peak: Int, masks: NDArray[np.uint64]
) -> tuple[Int, Int]:
    """Mark slightly more than `keep` keys, the largest; return their threshold and number.

    The result is correct for any guess in 1…peak; a good guess is faster.
    """
    below, above, stride, threshold = np.int64(0), np.int64(peak + 1), np.int64(STEP), np.int64(guess)
    while True:
        found = count(keys, words, np.uint32(threshold), masks)
        if found >= keep:
            below = threshold
            if found <= 3 * keep + WORD or above - below == 1:
                return threshold, found
        else:
            above = threshold
        if below > 0:
            threshold = below + (above - below) // 2
        else:
            # Step down in growing strides, because most of the range of floats is empty.
            threshold = max(np.int64(1), above - stride)
            stride *= 2


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
    bits = values.view(np.uint32)
    side, cols, across = geometry[SIDE], geometry[COLS], geometry[ACROSS]
    chunk = side * side
    words = chunk // WORD
    # One extra word, because candidates are compared by whole words.
    keys, near = np.zeros(chunk, np.uint32), np.zeros(chunk + WORD, np.uint32)
    masks, places = np.zeros(words + 1, np.uint64), np.zeros(chunk + 1, np.uint16)
    final = np.zeros(chunk + 1, np.uint16)
    top, guess = np.int64(1), np.int64(1)
    shift = np.int64(0)
    while 1 << shift < side:
        shift += 1
    place = entry(geometry, first)
    for b in range(first, last):
        i, j = b // across, b % across
        keep = kept(geometry, i, j)
        peak = fill(bits, geometry, i, j, keys)
        top = max(top, np.int64(peak))
        if peak > INFINITE:
            return np.uint32(top - 1)
        # The threshold lies in [below, above): at least `keep` candidates reach `below`, fewer than `keep` reach
        # `above`.
        near_guess = min(max(guess, np.int64(1)), np.int64(peak))
        below, n = loosely(keys, words, keep, near_guess, peak, masks)
        above = peak + 1
        p = 0
        for w in range(words):
            mask = masks[w]
            while mask != 0:
                at = WORD * w + np.int64(lowest(mask))
                places[p] = at
                near[p] = keys[at]
                p += 1
                mask &= mask - np.uint64(1)
        near_words = (n + WORD - 1) // WORD
        near[n : near_words * WORD] = 0
        reached = np.int64(n)
        while reached > keep and above - below > 1:
            middle = below + (above - below) // 2
            found = np.int64(0)
            for w in range(near_words):
                found += np.int64(ones(at_least(near, WORD * w, np.uint32(middle))))
            if found >= keep:
                below, reached = middle, found
            else:
                above = middle
        guess = np.int64(below - STEP)
        corner = i * side * cols + j * side
        # More than `keep` candidates are left only if the last ones are equal; the first of these are taken.
        equal = np.int64(n)
        if reached > keep:
            equal = np.int64(keep)
            for q in range(n):
                equal -= int(np.int64(near[q]) > below)
        # Without branches, because the selection is unpredictable: entries that are not selected are overwritten.
        p = 0
        for q in range(n):
            key = np.int64(near[q])
            tie = int(key == below) & int(equal > 0)
            equal -= tie
            final[p] = places[q]
            p += int(key > below) | tie
        for p in range(keep):
            at = np.int64(final[p])
            indices[place + p] = at
            chosen[place + p] = values[corner + (at >> shift) * cols + (at & side - 1)]
        place += keep
    return np.uint32(top - 1)


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
