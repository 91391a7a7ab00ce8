"""Kernels of the sparse encoder: which entries are kept, and the levels that stand for their magnitudes.

A section is described by its geometry (`Section.geometry`): rows, cols, tail, side, blocks down and across, and the entries
kept in a block that is last neither down nor across, last across, last down, last in both. `sparsereference.py` has the same
arithmetic in numpy; tests hold the two equal bit for bit.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.bitops import WORD, at_least, lowest, ones
from thinwire.compression.kernels import INFINITE, MAGNITUDE, inline, kernel

Geometry: TypeAlias = NDArray[np.int64]
Int: TypeAlias = int | np.int64
ROWS, COLS, TAIL, SIDE, DOWN, ACROSS, KEEP = range(7)

STEP = 1 << 20
"""An eighth of an octave: how far below the last chunk's threshold the next one's candidates are looked for."""


@inline
def kept(geometry: Geometry, i: Int, j: Int) -> Int:
    """Entries kept in block (i, j)."""
    entries: Int = geometry[KEEP + 2 * int(i == geometry[DOWN] - 1) + int(j == geometry[ACROSS] - 1)]
    return entries


@inline
def entry(geometry: Geometry, chunk: Int) -> Int:
    """Entries kept in all chunks before this one."""
    i, j = chunk // geometry[ACROSS], chunk % geometry[ACROSS]
    last = geometry[ACROSS] - 1
    above = i * (last * geometry[KEEP] + geometry[KEEP + 1])
    entries: Int = above + j * (geometry[KEEP + 2] if i == geometry[DOWN] - 1 else geometry[KEEP])
    return entries


@inline
def fill(bits: NDArray[np.uint32], geometry: Geometry, i: Int, j: Int, keys: NDArray[np.uint32]) -> Int:
    """The block's keys: magnitude bits plus one, so that padding (zero) is below them all. Returns the largest."""
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
    """How many keys reach the threshold; `masks` says which."""
    total = np.int64(0)
    for w in range(words):
        masks[w] = at_least(keys, WORD * w, threshold)
        total += np.int64(ones(masks[w]))
    return total


@inline
def loosely(
    keys: NDArray[np.uint32], words: int, keep: Int, guess: Int, peak: Int, masks: NDArray[np.uint64]
) -> tuple[Int, Int]:
    """Masks of a few more keys than `keep`, the largest; returns their threshold and number. Any guess (1…peak) gives a right
    answer, a good one sooner.
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
            # Down in growing steps: most of the range of floats is of no interest.
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
    """Local indices and values of the entries kept in chunks [first, last), into their places among the section's.

    Returns the largest magnitude bits of these chunks; INFINITE or above means a value is not finite and nothing else counts.
    """
    bits = values.view(np.uint32)
    side, cols, across = geometry[SIDE], geometry[COLS], geometry[ACROSS]
    chunk = side * side
    words = chunk // WORD
    # One word beyond, because candidates are compared by whole words.
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
        # The threshold lies in [below, above): at least `keep` candidates reach `below`, fewer `above`.
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
        # More than `keep` only when the last are equal: then the first of them.
        equal = np.int64(n)
        if reached > keep:
            equal = np.int64(keep)
            for q in range(n):
                equal -= int(np.int64(near[q]) > below)
        # No branches: which candidates stay is anybody's guess. What is not to stay is overwritten.
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
    """out = ⌊|v|·scale⌋, each less than 2**30; returns their sum."""
    total = np.int64(0)
    for i in range(values.size):
        unit = np.int32(np.float64(np.abs(values[i])) * scale)
        out[i] = unit
        total += np.int64(unit)
    return total


@kernel
def beyond(units: NDArray[np.int32], threshold: int) -> tuple[Int, Int]:
    """(Σ, number) of the units above a threshold."""
    total, number, limit = np.int64(0), np.int64(0), np.int32(threshold)
    for i in range(units.size):
        above = units[i] > limit
        total += np.int64(units[i] if above else np.int32(0))
        number += np.int64(above)
    return total, number


@kernel
def codes(values: NDArray[np.float32], middle: np.float32, out: NDArray[np.uint8]) -> None:
    """2·(v > 0) + (|v| > middle)."""
    for i in range(values.size):
        out[i] = np.uint8(2) * np.uint8(values[i] > 0) + np.uint8(np.abs(values[i]) > middle)


@kernel
def signs(values: NDArray[np.float32], out: NDArray[np.uint8]) -> None:
    """v > 0."""
    for i in range(values.size):
        out[i] = np.uint8(values[i] > 0)
