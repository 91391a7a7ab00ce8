"""The kernels' arithmetic once more in plain numpy: slow, readable, and equal to them bit for bit (a test holds it).

Where the two could disagree, this file is right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def half_at_least(value: Floats) -> NDArray[np.float16]:
    """The smallest fp16 s with 127·s ≥ value (value finite and ≥ 0), at most 65504."""
    top = np.float32(127)
    half = np.minimum(value / top, np.float32(65504)).astype(np.float16)
    half = np.where(half.astype(np.float32) * top < value, np.nextafter(half, np.float16(65504)), half)
    below = np.nextafter(half, np.float16(0))
    smallest: NDArray[np.float16] = np.where(below.astype(np.float32) * top >= value, below, half)
    return smallest


def int8_encode(x: Floats, block: int) -> bytes:
    """Scales then codes; see `quantize.Int8`."""
    blocks = -(-x.size // block)
    padded = np.zeros(blocks * block, np.float32)
    padded[: x.size] = x
    rows = padded.reshape(blocks, block)
    scale = half_at_least(np.abs(rows).max(axis=1, initial=0))
    with np.errstate(divide="ignore"):
        inverse = np.where(scale > 0, np.float32(1) / scale.astype(np.float32), np.float32(0))
    codes = np.clip(np.rint(np.clip(rows * inverse[:, None], -127, 127)), -127, 127).astype(np.int8)
    return scale.astype("<f2").tobytes() + codes.reshape(-1)[: x.size].tobytes()


def int8_decode(payload: bytes, n: int, block: int) -> Floats:
    """Scale times code, in float32."""
    blocks = -(-n // block)
    scale = np.frombuffer(payload, "<f2", blocks).astype(np.float32)
    codes = np.frombuffer(payload, np.int8, n, 2 * blocks)
    return np.repeat(scale, block)[:n] * codes.astype(np.float32)


def mean(rows: Sequence[Floats], weights: Sequence[float]) -> Floats:
    """Σ (w / Σ w)·x in float64, one row after the other."""
    whole, total = np.float64(math.fsum(weights)), np.zeros(rows[0].size)
    for row, weight in zip(rows, weights, strict=True):
        total += np.float64(weight) / whole * row.astype(np.float64)
    return total.astype(np.float32)


def outer_step(
    theta: Floats, momentum: Floats, delta: Floats, lr: float, mu: float, nesterov: bool
) -> tuple[Floats, Floats]:
    """The new theta and momentum of one SGD step; every operation rounds to float32."""
    momentum = np.float32(mu) * momentum + delta
    direction = delta + np.float32(mu) * momentum if nesterov else momentum
    return theta - np.float32(lr) * direction, momentum
