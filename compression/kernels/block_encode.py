"""Kernels that encode with the block quantizers. `blockint.Integers` describes the format."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.kernels.bitops import prefetch
from thinwire.compression.kernels.common import (
    INFINITE,
    MAGNITUDE,
    NOT_FINITE,
    OK,
    half_above,
    half_to_float,
    inline,
    kernel,
    uncounted,
)
from thinwire.compression.kernels.packing import GROUP_BYTES, LANE_SHIFT, any_half, pack, write_half

LIMIT = np.int32(INFINITE)
"""Bound of sort keys (see `sort_key`): those of finite values are > −LIMIT − 1 and < LIMIT."""

PIECE = 256
"""Number of values that are quantized, and of later ones that are prefetched, at a time."""

AHEAD = 1024
"""Least number of values between a prefetch and its use.

While a block is quantized, memory would be idle: its values are in the cache from the search for the largest one.
"""


@inline
def fetch(words: NDArray[np.int32] | NDArray[np.uint32], start: int) -> None:
    """Prefetch the values of a piece, by lines of 64 bytes."""
    for c in range(start, start + PIECE, 16):
        prefetch(words, c)


@inline
def uniform(index: np.uint32, low: np.uint32, high: np.uint32) -> np.float32:
    """Return a number in [0, 1), a multiple of 2**-24, from a position and a seed of 2 × 32 bits.

    Applies the integer hash "lowbias32" (Wellons, Prospecting for hash functions, 2018) twice.
    """
    h = np.uint32(index ^ low)
    h = np.uint32(h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
    h = np.uint32(h)
    h = np.uint32(h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    h = np.uint32(h)
    h = np.uint32(h ^ (h >> np.uint32(16))) ^ high
    h = np.uint32(h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
    h = np.uint32(h)
    h = np.uint32(h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    h = np.uint32(h)
    h = np.uint32(h ^ (h >> np.uint32(16)))
    return np.float32(np.int32(h >> np.uint32(8))) * np.float32(2.0**-24)


@inline
def sort_key(bits: np.int32) -> np.int32:
    """Map the bits of a float32 to an integer of the same order, to find a minimum without fastmath."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inline
def half_below(value: np.float32) -> np.int64:
    """Return the bits of the largest fp16 not above a finite value, at least −65504; never −0."""
    if value < np.float32(0.0):
        return half_above(-value, np.float32(1.0)) | 0x8000
    if value >= np.float32(65504.0):
        return np.int64(0x7BFF)
    if value < np.float32(2.0**-14):
        return np.int64(value * np.float32(2.0**24))
    return (np.int64(np.float32(value).view(np.uint32)) - 0x38000000) >> 13


@kernel
def encode(x: NDArray[np.float32], out: NDArray[np.uint8], bits: int, block: int, noisy: bool, seed: np.uint64) -> int:
    """Encode symmetrically. Returns OK, or NOT_FINITE with `out` in an undefined state.

    Per block: s = smallest fp16 with top·s ≥ max|x|, top = 2**(bits-1) − 1; code = clip(rint(x·(1/s)), ±top), all in
    float32. noisy: floor(x·(1/s) + u) instead of rint, with u from the position in x and the seed.
    """
    return encode_blocks(x, out, bits, block, noisy, seed, np.zeros(block if bits != 8 else 0, np.uint8))


@kernel
def encode_blocks(
    x: NDArray[np.float32],
    out: NDArray[np.uint8],
    bits: int,
    block: int,
    noisy: bool,
    seed: np.uint64,
    scratch: NDArray[np.uint8],
) -> int:
    """Encode with room for the codes of a block, see `encode`."""
    x, out, scratch = uncounted(x), uncounted(out), uncounted(scratch)
    n = x.size
    blocks = (n + block - 1) // block
    shift, group = LANE_SHIFT[bits], GROUP_BYTES[bits]
    lanes, first = 1 << shift, 2 * blocks
    words = x.view(np.uint32)
    top = np.float32((1 << (bits - 1)) - 1)
    low, high = np.uint32(seed & np.uint64(0xFFFFFFFF)), np.uint32(seed >> np.uint64(32))
    for b in range(blocks):
        start, stop = b * block, min(b * block + block, n)
        magnitudes = words[start:stop]
        # Integer maximum of the magnitude bits: it vectorises without fastmath, and any non-finite value wins.
        peak = np.uint32(0)
        for i in range(magnitudes.size):
            peak = max(peak, np.uint32(magnitudes[i] & MAGNITUDE))
        if peak >= INFINITE:
            return NOT_FINITE
        half = half_above(np.uint32(peak).view(np.float32), top)
        write_half(out, b, half)
        inverse = np.float32(0.0)
        if half > 0:
            inverse = np.float32(1.0) / half_to_float(half)
        groups = (stop - start + lanes - 1) >> shift
        codes = out[first : first + stop - start] if bits == 8 else scratch[: groups * lanes]
        target = codes[: stop - start].view(np.int8)
        for at in range(start, stop, PIECE):
            fetch(words, at + max(block, AHEAD))
            values, piece = x[at : min(at + PIECE, stop)], target[at - start : at - start + PIECE]
            if noisy:
                for i in range(piece.size):
                    u = uniform(np.uint32(at + i), low, high)
                    piece[i] = np.int8(np.int32(np.floor(min(max(values[i] * inverse + u, -top), top))))
            else:
                for i in range(piece.size):
                    piece[i] = np.int8(np.int32(np.rint(min(max(values[i] * inverse, -top), top))))
        if bits != 8:
            codes[stop - start :] = 0
            pack(codes, out[first : first + groups * group], bits)
        first += groups * group
    return OK


@kernel
def encode_asymmetric(
    x: NDArray[np.float32], out: NDArray[np.uint8], bits: int, block: int, noisy: bool, seed: np.uint64
) -> int:
    """Encode asymmetrically. Returns OK, or NOT_FINITE with `out` in an undefined state.

    Per block: z = largest fp16 ≤ min(x); s = smallest fp16 with top·s ≥ max(x) − z, top = 2**bits − 1; code =
    clip(rint((x − z)·(1/s)), 0…top), all in float32. noisy: as in `encode`.
    """
    scratch = np.zeros(block if bits != 8 else 0, np.uint8)
    return encode_asymmetric_blocks(x, out, bits, block, noisy, seed, scratch)


@kernel
def encode_asymmetric_blocks(
    x: NDArray[np.float32],
    out: NDArray[np.uint8],
    bits: int,
    block: int,
    noisy: bool,
    seed: np.uint64,
    scratch: NDArray[np.uint8],
) -> int:
    """Encode with room for the codes of a block, see `encode_asymmetric`."""
    x, out, scratch = uncounted(x), uncounted(out), uncounted(scratch)
    n = x.size
    blocks = (n + block - 1) // block
    shift, group = LANE_SHIFT[bits], GROUP_BYTES[bits]
    lanes, first = 1 << shift, 4 * blocks
    words = x.view(np.int32)
    top, zero = np.float32((1 << bits) - 1), np.float32(0.0)
    low, high = np.uint32(seed & np.uint64(0xFFFFFFFF)), np.uint32(seed >> np.uint64(32))
    for b in range(blocks):
        start, stop = b * block, min(b * block + block, n)
        keys = words[start:stop]
        least, most = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
        for i in range(keys.size):
            key = sort_key(keys[i])
            least, most = min(least, key), max(most, key)
        if most >= LIMIT or least <= -LIMIT - 1:
            return NOT_FINITE
        # `sort_key` is its own inverse.
        offset_half = half_below(np.int32(sort_key(least)).view(np.float32))
        offset = any_half(offset_half)
        half = half_above(max(np.int32(sort_key(most)).view(np.float32) - offset, zero), top)
        write_half(out, b, half)
        write_half(out, blocks + b, offset_half)
        inverse = zero
        if half > 0:
            inverse = np.float32(1.0) / half_to_float(half)
        groups = (stop - start + lanes - 1) >> shift
        codes = out[first : first + stop - start] if bits == 8 else scratch[: groups * lanes]
        target = codes[: stop - start]
        for at in range(start, stop, PIECE):
            fetch(words, at + max(block, AHEAD))
            values, piece = x[at : min(at + PIECE, stop)], target[at - start : at - start + PIECE]
            if noisy:
                for i in range(piece.size):
                    u = uniform(np.uint32(at + i), low, high)
                    scaled = (values[i] - offset) * inverse + u
                    piece[i] = np.uint8(np.int32(np.floor(min(max(scaled, zero), top))))
            else:
                for i in range(piece.size):
                    piece[i] = np.uint8(np.int32(np.rint(min(max((values[i] - offset) * inverse, zero), top))))
        if bits != 8:
            codes[stop - start :] = 0
            pack(codes, out[first : first + groups * group], bits)
        first += groups * group
    return OK
