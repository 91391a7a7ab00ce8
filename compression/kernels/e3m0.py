"""Kernels of E3M0, 4 bits per value (sign and exponent). `dense.e3m0.E3M0` describes the format."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.kernels.block_decode import read_codes, view
from thinwire.compression.kernels.common import (
    BAD_CODE,
    BAD_SCALE,
    INFINITE,
    MAGNITUDE,
    NOT_FINITE,
    OK,
    TILE,
    half_above,
    half_to_float,
    inline,
    kernel,
    uncounted,
)
from thinwire.compression.kernels.packing import pack, read_half, write_half

MINUS_ZERO = np.uint8(8)
"""The only one of the sixteen codes that is not used."""


@inline
def value(code: np.uint8) -> np.float32:
    """Return ±2**(e − 7) for a code with exponent e = 1…7, and 0 for e = 0."""
    exponent = np.uint32(code & np.uint8(7))
    bits = np.uint32((exponent + np.uint32(120)) << np.uint32(23)) if exponent else np.uint32(0)
    return np.uint32(bits | np.uint32((np.uint32(code) & np.uint32(8)) << np.uint32(28))).view(np.float32)


@inline
def word(unit: np.float32, times: float) -> np.uint32:
    """Return the bits of a small multiple of a number; the product is exact."""
    bits: np.uint32 = np.float32(unit * np.float32(times)).view(np.uint32)
    return bits


@kernel
def encode(x: NDArray[np.float32], out: NDArray[np.uint8], block: int) -> int:
    """Encode x. Returns OK, or NOT_FINITE with `out` in an undefined state.

    Per block: s = smallest fp16 ≥ max|x|; e is the number of midpoints s·(1, 3, 6, 12, 24, 48, 96)/128 that |x|
    reaches. The midpoints are exact in float32, so the choice of e is the only rounding.
    """
    return encode_blocks(x, out, block, np.zeros(block, np.uint8))


@kernel
def encode_blocks(x: NDArray[np.float32], out: NDArray[np.uint8], block: int, codes: NDArray[np.uint8]) -> int:
    """Encode with room for the codes of a block, see `encode`."""
    x, out, codes = uncounted(x), uncounted(out), uncounted(codes)
    n = x.size
    blocks = (n + block - 1) // block
    words = x.view(np.uint32)
    first = 2 * blocks
    for b in range(blocks):
        start, stop = b * block, min(b * block + block, n)
        bits = words[start:stop]
        peak = np.uint32(0)
        for i in range(bits.size):
            peak = max(peak, np.uint32(bits[i] & MAGNITUDE))
        if peak >= INFINITE:
            return NOT_FINITE
        half = half_above(np.uint32(peak).view(np.float32), np.float32(1.0))
        write_half(out, b, half)
        count = (stop - start + 1) & -2
        codes[stop - start : count] = np.uint8(0)
        if half == 0:
            codes[:count] = np.uint8(0)
        else:
            unit = half_to_float(half) * np.float32(2.0**-7)
            # Positive floats have the order of their bits, and integer comparisons vectorise.
            t1, t2, t3, t4 = word(unit, 1.0), word(unit, 3.0), word(unit, 6.0), word(unit, 12.0)
            t5, t6, t7 = word(unit, 24.0), word(unit, 48.0), word(unit, 96.0)
            for i in range(bits.size):
                a = np.uint32(bits[i] & MAGNITUDE)
                e = np.uint8(a >= t1) + np.uint8(a >= t2) + np.uint8(a >= t3) + np.uint8(a >= t4)
                e += np.uint8(a >= t5) + np.uint8(a >= t6) + np.uint8(a >= t7)
                sign = np.uint8(bits[i] >> np.uint32(28)) & np.uint8(8)
                codes[i] = np.uint8(e | sign) if e else np.uint8(0)
        pack(codes[:count], out[first : first + count // 2], 4)
        first += count // 2
    return OK


@inline
def fault(payload: NDArray[np.uint8], codes: NDArray[np.uint8], b: int, count: int) -> int:
    """Return OK, or the fault of a block's scale, codes or padding."""
    half = read_half(payload, b)
    if half >= 0x7C00:
        return BAD_SCALE
    used, nothing = np.uint8(0), False
    for i in range(codes.size):
        nothing |= codes[i] == MINUS_ZERO
    # With a scale of zero every code must be zero; padding codes must always be zero.
    for i in range(0 if half == 0 else count, codes.size):
        used |= codes[i]
    return BAD_CODE if used or nothing else OK


@kernel
def decode(address: np.uint64, out: NDArray[np.float32], block: int) -> int:
    """Decode x = ±s·2**(e − 7), exact in float32. Returns OK, BAD_SCALE or BAD_CODE."""
    return decode_blocks(address, out, block, np.empty(block, np.uint8))


@kernel
def decode_blocks(address: np.uint64, out: NDArray[np.float32], block: int, scratch: NDArray[np.uint8]) -> int:
    """Decode with room for the codes of a block, see `decode`."""
    out, scratch = uncounted(out), uncounted(scratch)
    n = out.size
    blocks = (n + block - 1) // block
    payload = view(address, n, 4, block, 2 * blocks)
    for b in range(blocks):
        target = out[b * block : b * block + block]
        first = 2 * blocks + b * (block // 2)
        codes = read_codes(payload[first : first + block // 2], target.size, 4, False, scratch)
        wrong = fault(payload, codes, b, target.size)
        if wrong != OK:
            return wrong
        scale = half_to_float(read_half(payload, b))
        for i in range(target.size):
            target[i] = scale * value(codes[i])
    return OK


@kernel
def check(address: np.uint64, n: int, block: int) -> tuple[int, float]:
    """Return (OK, squared norm), or (BAD_SCALE or BAD_CODE, 0).

    The norm is in float64: Σ (s/64)²·Σ 4**(e − 1), block by block.
    """
    return check_blocks(address, n, block, np.empty(block, np.uint8))


@kernel
def check_blocks(address: np.uint64, n: int, block: int, scratch: NDArray[np.uint8]) -> tuple[int, float]:
    """Check with room for the codes of a block, see `check`."""
    scratch = uncounted(scratch)
    blocks = (n + block - 1) // block
    payload = view(address, n, 4, block, 2 * blocks)
    total = 0.0
    for b in range(blocks):
        count = min(block, n - b * block)
        first = 2 * blocks + b * (block // 2)
        codes = read_codes(payload[first : first + block // 2], count, 4, False, scratch)
        wrong = fault(payload, codes, b, count)
        if wrong != OK:
            return wrong, 0.0
        squares = np.int32(0)
        for i in range(count):
            e = np.int32(codes[i] & np.uint8(7))
            squares += np.int32(np.int32(1) << np.int32(2 * e)) >> np.int32(2)
        scale = np.float64(half_to_float(read_half(payload, b))) * 2.0**-6
        total += scale * scale * np.float64(squares)
    return OK, total


@kernel
def mean(addresses: NDArray[np.uint64], shares: NDArray[np.float64], out: NDArray[np.float32], block: int) -> None:
    """Write float32(0 + Σ share·x) to out: x decoded in float32, the sum in float64.

    Peers are added one after the other in the given order.
    """
    sums = np.empty(max(1, TILE // block) * block, np.float64)
    mean_blocks(addresses, shares, out, block, sums, np.empty(block, np.uint8))


@kernel
def mean_blocks(
    addresses: NDArray[np.uint64],
    shares: NDArray[np.float64],
    out: NDArray[np.float32],
    block: int,
    sums: NDArray[np.float64],
    scratch: NDArray[np.uint8],
) -> None:
    """Average with room for the sums of a tile and the codes of a block, see `mean`."""
    out, sums, scratch = uncounted(out), uncounted(sums), uncounted(scratch)
    n = out.size
    blocks = (n + block - 1) // block
    step = sums.size // block
    for begin in range(0, blocks, step):
        end = min(begin + step, blocks)
        result = out[begin * block : min(end * block, n)]
        sums[: result.size] = 0.0
        for p in range(addresses.size):
            payload, share = view(addresses[p], n, 4, block, 2 * blocks), shares[p]
            for b in range(begin, end):
                count = min(block, n - b * block)
                first = 2 * blocks + b * (block // 2)
                codes = read_codes(payload[first : first + block // 2], count, 4, False, scratch)
                scale = half_to_float(read_half(payload, b))
                target = sums[(b - begin) * block : (b - begin) * block + count]
                for i in range(count):
                    target[i] += share * np.float64(scale * value(codes[i]))
        for i in range(result.size):
            result[i] = np.float32(sums[i])
