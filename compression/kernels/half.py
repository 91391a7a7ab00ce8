"""Kernels of fp16 and bf16: 16 bits per value, rounded to the nearest, ties to even.

Values that are too large become the largest finite value.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numpy.typing import NDArray
from thinwire.compression.kernels.common import (
    INFINITE,
    LANES,
    MAGNITUDE,
    NOT_FINITE,
    OK,
    TILE,
    _pointer,
    add,
    inline,
    kernel,
)


@inline
def to_half(bits: np.uint32) -> np.uint32:
    """Return the bits of the fp16 nearest to a finite float32 given by its bits, at most 65504."""
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    # Adding 1/2 aligns the lowest bit of a subnormal fp16 with the lowest bit of the sum, so the addition rounds
    # correctly.
    small = np.uint32(
        np.float32(np.uint32(min(magnitude, np.uint32(0x3F000000))).view(np.float32) + np.float32(0.5)).view(np.uint32)
        - np.uint32(0x3F000000)
    )
    odd = np.uint32((magnitude >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(np.uint32(magnitude - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13))
    half = small if magnitude < np.uint32(0x38800000) else np.uint32(min(normal, np.uint32(0x7BFF)))
    return np.uint32(half | ((bits >> np.uint32(16)) & np.uint32(0x8000)))


@inline
def from_half(half: np.uint32) -> np.float32:
    """Convert a finite fp16, given by its bits, to float32 (exact)."""
    magnitude = np.uint32(half & np.uint32(0x7FFF))
    small = np.float32(np.float32(np.int32(magnitude)) * np.float32(2.0**-24)).view(np.uint32)
    normal = np.uint32(np.uint32(magnitude << np.uint32(13)) + np.uint32(0x38000000))
    bits = np.uint32(small) if magnitude < np.uint32(0x400) else normal
    return np.uint32(bits | np.uint32((half & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)


@inline
def to_brain(bits: np.uint32) -> np.uint32:
    """Return the bits of the bf16 nearest to a finite float32 given by its bits.

    Larger values become the largest finite bf16.
    """
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    odd = np.uint32((magnitude >> np.uint32(16)) & np.uint32(1))
    half = np.uint32(np.uint32(magnitude + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    return np.uint32(np.uint32(min(half, np.uint32(0x7F7F))) | ((bits >> np.uint32(16)) & np.uint32(0x8000)))


@kernel
def encode(x: NDArray[np.float32], out: NDArray[np.uint16], brain: bool) -> int:
    """Encode x. Returns OK, or NOT_FINITE with `out` in an undefined state."""
    words = x.view(np.uint32)
    peak = np.uint32(0)
    if brain:
        for i in range(out.size):
            peak = max(peak, np.uint32(words[i] & MAGNITUDE))
            out[i] = to_brain(words[i])
    else:
        for i in range(out.size):
            peak = max(peak, np.uint32(words[i] & MAGNITUDE))
            out[i] = to_half(words[i])
    return NOT_FINITE if peak >= INFINITE else OK


@kernel
def expand(source: NDArray[np.uint16], out: NDArray[np.float32], brain: bool) -> np.uint32:
    """Convert each value to float32 (exact).

    Returns the largest magnitude, as bits of the 16-bit format.
    """
    peak = np.uint16(0)
    if brain:
        for i in range(out.size):
            peak = max(peak, np.uint16(source[i] & np.uint16(0x7FFF)))
            out[i] = np.uint32(np.uint32(source[i]) << np.uint32(16)).view(np.float32)
    else:
        for i in range(out.size):
            peak = max(peak, np.uint16(source[i] & np.uint16(0x7FFF)))
            out[i] = from_half(np.uint32(source[i]))
    return np.uint32(peak)


@inline
def infinite(brain: bool) -> np.uint32:
    """Return the bits of infinity in the 16-bit format."""
    return np.uint32(0x7F80) if brain else np.uint32(0x7C00)


@kernel
def decode(address: np.uint64, out: NDArray[np.float32], brain: bool) -> int:
    """Decode the payload. Returns OK, or NOT_FINITE if any value is not finite."""
    source = carray(_pointer(address), (2 * out.size,)).view(np.uint16)
    return NOT_FINITE if expand(source, out, brain) >= infinite(brain) else OK


@kernel
def check(address: np.uint64, n: int, brain: bool) -> tuple[int, float]:
    """Return (OK, Σ x²), or (NOT_FINITE, 0).

    The sum is in float64: 64 interleaved partial sums, then their sum in order.
    """
    source = carray(_pointer(address), (2 * n,)).view(np.uint16)
    sums = np.zeros(LANES, np.float64)
    tile = np.zeros(TILE, np.float32)
    for start in range(0, n, TILE):
        count = min(TILE, n - start)
        if expand(source[start : start + count], tile[:count], brain) >= infinite(brain):
            return NOT_FINITE, 0.0
        tile[count:] = np.float32(0.0)
        for i in range(0, TILE, LANES):
            for j in range(LANES):
                x = np.float64(tile[i + j])
                sums[j] += x * x
    total = 0.0
    for j in range(LANES):
        total += sums[j]
    return OK, total


@kernel
def mean(addresses: NDArray[np.uint64], shares: NDArray[np.float64], out: NDArray[np.float32], brain: bool) -> None:
    """Write float32(0 + Σ share·x) to out, accumulated in float64, peer after peer in the given order."""
    n = out.size
    sums = np.empty(TILE, np.float64)
    tile = np.empty(TILE, np.float32)
    for start in range(0, n, TILE):
        count = min(TILE, n - start)
        for p in range(addresses.size):
            source = carray(_pointer(addresses[p]), (2 * n,)).view(np.uint16)
            expand(source[start : start + count], tile[:count], brain)
            add(tile[:count], shares[p], p == 0, sums)
        result = out[start : start + count]
        for i in range(count):
            result[i] = np.float32(sums[i])
