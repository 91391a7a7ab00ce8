"""Reference implementation of the dense codecs in plain numpy: slow, readable, bit-exact.

A test compares the kernels with it bit for bit. Where the two disagree, this file is right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def half_at_least(value: Floats, top: int) -> NDArray[np.float16]:
    """Return the smallest fp16 s with top·s ≥ value, at most 65504. value is finite and ≥ 0."""
    m = np.float32(top)
    half = np.minimum(value / m, np.float32(65504)).astype(np.float16)
    half = np.where(half.astype(np.float32) * m < value, np.nextafter(half, np.float16(65504)), half)
    below = np.nextafter(half, np.float16(0))
    smallest: NDArray[np.float16] = np.where(below.astype(np.float32) * m >= value, below, half)
    return smallest


def half_at_most(value: Floats) -> NDArray[np.float16]:
    """Return the largest fp16 not above a finite value, at least −65504; never −0."""
    half = np.clip(value, np.float32(-65504), np.float32(65504)).astype(np.float16)
    half = np.where(half.astype(np.float32) > value, np.nextafter(half, np.float16(-65504)), half)
    return half + np.float16(0)


def uniform(index: NDArray[np.uint64], seed: int) -> Floats:
    """Return numbers in [0, 1) that are multiples of 2**-24, one for each position in `index`.

    Formula: hash(hash(index ⊕ low half of the seed) ⊕ high half) / 2**32, cut to 24 bits.
    """

    def hash32(h: NDArray[np.uint64]) -> NDArray[np.uint64]:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            h = (h ^ (h >> np.uint64(shift))) * np.uint64(factor) & np.uint64(0xFFFFFFFF)
        return h

    h = hash32(hash32(index ^ np.uint64(seed & 0xFFFFFFFF)) ^ np.uint64(seed >> 32))
    return (h >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)


def pack(codes: NDArray[np.int64], bits: int) -> bytes:
    """Pack the codes of one block in the order of `packing`.

    The codes of a group lie one stride apart, and so do the bytes of a group.
    """
    lanes, width = {8: (1, 1), 4: (2, 1), 3: (8, 3)}[bits]
    stride = -(-codes.size // lanes)
    padded = np.zeros(lanes * stride, np.int64)
    padded[: codes.size] = codes & (1 << bits) - 1
    groups = np.sum([padded[k * stride : (k + 1) * stride] << bits * k for k in range(lanes)], axis=0)
    return b"".join((groups >> 8 * k & 0xFF).astype(np.uint8).tobytes() for k in range(width))


def unpack(packed: bytes, count: int, bits: int, signed: bool) -> NDArray[np.int64]:
    """Inverse of `pack`."""
    lanes, width = {8: (1, 1), 4: (2, 1), 3: (8, 3)}[bits]
    stride = len(packed) // width
    rows = np.frombuffer(packed, np.uint8).astype(np.int64)
    groups = np.sum([rows[k * stride : (k + 1) * stride] << 8 * k for k in range(width)], axis=0)
    codes = np.concatenate([groups >> bits * k & (1 << bits) - 1 for k in range(lanes)])[:count]
    return codes - (codes >> bits - 1 << bits) if signed else codes


def integers_encode(
    x: Floats, bits: int, block: int, asymmetric: bool = False, stochastic: bool = False, seed: int = 0
) -> bytes:
    """Return the payload of x: scales, offsets, codes. See `blockint.Integers` for the format."""
    scales, offsets, codes = [], [], []
    low, high = (0, 2**bits - 1) if asymmetric else (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1)
    for start in range(0, x.size, block):
        values = x[start : start + block]
        if asymmetric:
            offset = half_at_most(values.min(keepdims=True))
            values = values - offset.astype(np.float32)
            offsets.append(offset.astype("<f2").tobytes())
        peak = values.max(keepdims=True).clip(0) if asymmetric else np.abs(values).max(keepdims=True)
        scale = half_at_least(peak, high)
        inverse = np.float32(1) / scale.astype(np.float32) if scale[0] else np.zeros(1, np.float32)
        if stochastic:
            u = uniform(np.arange(start, start + values.size, dtype=np.uint64), seed)
            found = np.floor(np.clip(values * inverse + u, low, high))
        else:
            found = np.rint(np.clip(values * inverse, low, high))
        scales.append(scale.astype("<f2").tobytes())
        codes.append(pack(found.astype(np.int64), bits))
    return b"".join(scales + offsets + codes)


def integers_decode(payload: bytes, n: int, bits: int, block: int, asymmetric: bool = False) -> Floats:
    """Return scale times code, plus the offset if asymmetric; each operation rounds to float32."""
    blocks = -(-n // block)
    scales = np.frombuffer(payload, "<f2", blocks).astype(np.float32)
    offsets = (
        np.frombuffer(payload, "<f2", blocks, 2 * blocks).astype(np.float32) if asymmetric else np.zeros_like(scales)
    )
    rest, out = payload[(4 if asymmetric else 2) * blocks :], np.zeros(n, np.float32)
    whole = len(pack(np.zeros(block, np.int64), bits))
    for b in range(blocks):
        part = out[b * block : (b + 1) * block]
        codes = unpack(rest[b * whole : (b + 1) * whole], part.size, bits, not asymmetric)
        part[:] = scales[b] * codes.astype(np.float32) + offsets[b]
    return out


def e3m0_levels(scale: NDArray[np.float16]) -> NDArray[np.float64]:
    """Return the magnitudes of codes 0…7 for one scale."""
    return np.float64(scale[0]) * np.array([0.0, *(2.0**-k for k in range(6, -1, -1))])


def e3m0_encode(x: Floats, block: int) -> bytes:
    """Return the payload of x: scales, then codes. See `dense.e3m0.E3M0` for the format.

    The nearest of all magnitudes is chosen; the search begins with the largest, which therefore wins ties.
    """
    scales, codes = [], []
    for start in range(0, x.size, block):
        values = x[start : start + block].astype(np.float64)
        scale = half_at_least(np.abs(x[start : start + block]).max(keepdims=True), 1)
        away = np.abs(np.abs(values)[:, None] - e3m0_levels(scale)[None, ::-1])
        found = 7 - away.argmin(axis=1) if scale[0] else np.zeros(values.size, np.int64)
        scales.append(scale.astype("<f2").tobytes())
        codes.append(pack(np.where((values < 0) & (found > 0), found + 8, found), 4))
    return b"".join(scales + codes)


def e3m0_decode(payload: bytes, n: int, block: int) -> Floats:
    """Return sign times magnitude for each code."""
    blocks, out = -(-n // block), np.zeros(n, np.float32)
    for b in range(blocks):
        part = out[b * block : (b + 1) * block]
        first = 2 * blocks + b * (block // 2)
        codes = unpack(payload[first : first + block // 2], part.size, 4, False)
        levels = e3m0_levels(np.frombuffer(payload, "<f2", 1, 2 * b))
        part[:] = np.where(codes >= 8, -1.0, 1.0) * levels[codes & 7]
    return out


def halves_encode(x: Floats, brain: bool) -> bytes:
    """Return x as fp16 or bf16: rounded to the nearest, ties to even, limited to the largest finite value."""
    if not brain:
        return np.clip(x, np.float32(-65504), np.float32(65504)).astype("<f2").tobytes()
    largest = np.uint32(0x7F7F0000).view(np.float32)
    bits = np.clip(x, -largest, largest).view(np.uint32).astype(np.uint64)
    return (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1)) >> np.uint64(16)).astype("<u2").tobytes()


def halves_decode(payload: bytes, brain: bool) -> Floats:
    """Return the values of an fp16 or bf16 payload as float32."""
    if not brain:
        return np.frombuffer(payload, "<f2").astype(np.float32)
    return (np.frombuffer(payload, "<u2").astype(np.uint32) << 16).view(np.float32)


def mean(rows: Sequence[Floats], weights: Sequence[float]) -> Floats:
    """Return Σ (w / Σ w)·x, accumulated in float64 row by row."""
    whole, total = np.float64(math.fsum(weights)), np.zeros(rows[0].size)
    for row, weight in zip(rows, weights, strict=True):
        total += np.float64(weight) / whole * row.astype(np.float64)
    return total.astype(np.float32)


def outer_step(
    theta: Floats, momentum: Floats, delta: Floats, lr: float, mu: float, nesterov: bool
) -> tuple[Floats, Floats]:
    """Return the new theta and momentum of one SGD step; every operation rounds to float32."""
    momentum = np.float32(mu) * momentum + delta
    direction = delta + np.float32(mu) * momentum if nesterov else momentum
    return theta - np.float32(lr) * direction, momentum
