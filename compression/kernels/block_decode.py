"""Kernels that decode, check and average the payloads of `block_encode`.

Payloads are passed as addresses; `common.py` explains why.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numpy.typing import NDArray
from thinwire.compression.kernels.common import (
    BAD_CODE,
    BAD_SCALE,
    LANES,
    OK,
    TILE,
    _pointer,
    half_to_float,
    inline,
    kernel,
    uncounted,
)
from thinwire.compression.kernels.packing import GROUP_BYTES, LANE_SHIFT, any_half, read_half, unpack


@inline
def code_bytes(count: int, bits: int) -> int:
    """Return the size in bytes of the codes of `count` elements of one block."""
    size: int = ((count + (1 << LANE_SHIFT[bits]) - 1) >> LANE_SHIFT[bits]) * GROUP_BYTES[bits]
    return size


@inline
def view(address: np.uint64, n: int, bits: int, block: int, heads: int) -> NDArray[np.uint8]:
    """View the bytes of a payload of n elements, of which `heads` bytes are scales and offsets."""
    whole = n // block
    found: NDArray[np.uint8] = carray(
        _pointer(address), (heads + whole * code_bytes(block, bits) + code_bytes(n - whole * block, bits),)
    )
    return found


@inline
def read_codes(
    packed: NDArray[np.uint8], count: int, bits: int, signed: bool, scratch: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Return the codes of a block, one per byte, with the padding behind them; may use `scratch`."""
    if bits == 8:
        return packed
    lanes = 1 << LANE_SHIFT[bits]
    codes = scratch[: (count + lanes - 1) & -lanes]
    unpack(packed, codes, bits, np.uint8((1 << (bits - 1)) if signed else 0))
    return codes


@kernel
def dequantize(
    codes: NDArray[np.uint8], scale: np.float32, offset: np.float32, signed: bool, out: NDArray[np.float32]
) -> None:
    """Write s·code (exact), or z + s·code rounded to float32."""
    if signed:
        values = codes.view(np.int8)
        for i in range(out.size):
            out[i] = scale * np.float32(values[i])
    else:
        for i in range(out.size):
            out[i] = offset + scale * np.float32(codes[i])


@kernel
def fault(
    payload: NDArray[np.uint8], codes: NDArray[np.uint8], b: int, blocks: int, count: int, bits: int, asymmetric: bool
) -> int:
    """Return OK, or the fault of a block's scale, offset, codes or padding."""
    half = read_half(payload, b)
    if half >= 0x7C00:
        return BAD_SCALE
    if asymmetric:
        offset = read_half(payload, blocks + b)
        if offset & 0x7FFF >= 0x7C00 or offset == 0x8000:
            return BAD_SCALE
    else:
        lowest, values = np.int8(0), codes.view(np.int8)
        for i in range(count):
            lowest = min(lowest, values[i])
        if lowest == -(1 << (bits - 1)):
            return BAD_CODE
    # With a scale of zero every code must be zero; padding codes must always be zero.
    used = np.uint8(0)
    for i in range(0 if half == 0 else count, codes.size):
        used |= codes[i]
    return BAD_CODE if used else OK


@kernel
def decode(address: np.uint64, out: NDArray[np.float32], bits: int, block: int, asymmetric: bool) -> int:
    """Decode x = s·code, or z + s·code, in float32. Returns OK, BAD_SCALE or BAD_CODE."""
    return decode_blocks(address, out, bits, block, asymmetric, np.empty(block if bits != 8 else 0, np.uint8))


@kernel
def decode_blocks(
    address: np.uint64, out: NDArray[np.float32], bits: int, block: int, asymmetric: bool, scratch: NDArray[np.uint8]
) -> int:
    """Decode with room for the codes of a block, see `decode`."""
    out, scratch = uncounted(out), uncounted(scratch)
    n = out.size
    blocks = (n + block - 1) // block
    heads = (4 if asymmetric else 2) * blocks
    payload, size = view(address, n, bits, block, heads), code_bytes(block, bits)
    for b in range(blocks):
        target = out[b * block : b * block + block]
        packed = payload[heads + b * size : heads + b * size + size]
        codes = read_codes(packed, target.size, bits, not asymmetric, scratch)
        wrong = fault(payload, codes, b, blocks, target.size, bits, asymmetric)
        if wrong != OK:
            return wrong
        offset = any_half(read_half(payload, blocks + b)) if asymmetric else np.float32(0.0)
        dequantize(codes, half_to_float(read_half(payload, b)), offset, not asymmetric, target)
    return OK


@kernel
def check(address: np.uint64, n: int, bits: int, block: int, asymmetric: bool) -> tuple[int, float]:
    """Return (OK, squared norm in float64), or (BAD_SCALE or BAD_CODE, 0).

    Symmetric: Σ s²·Σ code², block by block. Asymmetric: sum of the squared decoded values, in 64 interleaved partial
    sums over each block.
    """
    scratch = np.empty(block if bits != 8 else 0, np.uint8)
    return check_blocks(address, n, bits, block, asymmetric, scratch, np.empty(block if asymmetric else 0, np.float32))


@kernel
def check_blocks(
    address: np.uint64,
    n: int,
    bits: int,
    block: int,
    asymmetric: bool,
    scratch: NDArray[np.uint8],
    values: NDArray[np.float32],
) -> tuple[int, float]:
    """Check with room for the codes and values of a block, see `check`."""
    scratch, values = uncounted(scratch), uncounted(values)
    blocks = (n + block - 1) // block
    heads = (4 if asymmetric else 2) * blocks
    payload, size = view(address, n, bits, block, heads), code_bytes(block, bits)
    sums = np.zeros(LANES, np.float64)
    total = 0.0
    for b in range(blocks):
        count = min(block, n - b * block)
        packed = payload[heads + b * size : heads + b * size + size]
        codes = read_codes(packed, count, bits, not asymmetric, scratch)
        wrong = fault(payload, codes, b, blocks, count, bits, asymmetric)
        if wrong != OK:
            return wrong, 0.0
        scale = half_to_float(read_half(payload, b))
        if asymmetric:
            found = values[:count]
            dequantize(codes, scale, any_half(read_half(payload, blocks + b)), False, found)
            whole = count - count % LANES
            for i in range(0, whole, LANES):
                for j in range(LANES):
                    x = np.float64(found[i + j])
                    sums[j] += x * x
            for j in range(count - whole):
                x = np.float64(found[whole + j])
                sums[j] += x * x
        else:
            signed, squares = codes.view(np.int8), np.int32(0)
            for i in range(count):
                squares += np.int32(signed[i]) * np.int32(signed[i])
            total += np.float64(scale) * np.float64(scale) * np.float64(squares)
    for j in range(LANES):
        total += sums[j]
    return OK, total


@kernel
def mean(
    addresses: NDArray[np.uint64],
    shares: NDArray[np.float64],
    out: NDArray[np.float32],
    bits: int,
    block: int,
    asymmetric: bool,
) -> None:
    """Write float32(0 + Σ share·x) to out: x decoded in float32, the sum in float64.

    Peers are added one after the other in the given order.
    """
    sums = np.empty(max(1, TILE // block) * block, np.float64)
    mean_blocks(addresses, shares, out, bits, block, asymmetric, sums, np.empty(block if bits != 8 else 0, np.uint8))


@kernel
def mean_blocks(
    addresses: NDArray[np.uint64],
    shares: NDArray[np.float64],
    out: NDArray[np.float32],
    bits: int,
    block: int,
    asymmetric: bool,
    sums: NDArray[np.float64],
    scratch: NDArray[np.uint8],
) -> None:
    """Average with room for the sums of a tile and the codes of a block, see `mean`."""
    out, sums, scratch = uncounted(out), uncounted(sums), uncounted(scratch)
    n = out.size
    blocks = (n + block - 1) // block
    heads, size = (4 if asymmetric else 2) * blocks, code_bytes(block, bits)
    step = sums.size // block
    offset = np.float32(0.0)
    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        for p in range(addresses.size):
            payload = view(addresses[p], n, bits, block, heads)
            share = shares[p]
            for b in range(first, last):
                count = min(block, n - b * block)
                packed = payload[heads + b * size : heads + b * size + size]
                codes = read_codes(packed, count, bits, not asymmetric, scratch)
                scale = half_to_float(read_half(payload, b))
                if asymmetric:
                    offset = any_half(read_half(payload, blocks + b))
                target = sums[(b - first) * block : (b - first) * block + count]
                add(codes, scale, offset, share, not asymmetric, p == 0, target)
        result = out[first * block : min(last * block, n)]
        for i in range(result.size):
            result[i] = np.float32(sums[i])


@kernel
def add(
    codes: NDArray[np.uint8],
    scale: np.float32,
    offset: np.float32,
    share: np.float64,
    signed: bool,
    begin: bool,
    target: NDArray[np.float64],
) -> None:
    """Add share·x to target; with `begin`, write 0 + share·x, which saves a pass of writing zeros."""
    if signed:
        values = codes.view(np.int8)
        if begin:
            for i in range(target.size):
                target[i] = 0.0 + share * np.float64(scale * np.float32(values[i]))
        else:
            for i in range(target.size):
                target[i] += share * np.float64(scale * np.float32(values[i]))
    elif begin:
        for i in range(target.size):
            target[i] = 0.0 + share * np.float64(offset + scale * np.float32(codes[i]))
    else:
        for i in range(target.size):
            target[i] += share * np.float64(offset + scale * np.float32(codes[i]))
