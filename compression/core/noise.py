"""Random numbers that are equal on all peers, whatever their machine, numpy version or torch version."""

from __future__ import annotations

import hashlib

import numpy as np
from thinwire.compression.core.types import Floats

_SUMMED = 12
"""Uniform 16-bit numbers summed for one value.

The sum has a variance of 1 and an excess kurtosis of −0.1.
"""

_PORTION = 1 << 16
"""Number of values drawn at a time. It bounds the memory and does not affect the result."""


def normal(seed: int, purpose: str, n: int) -> Floats:
    """Return n normally distributed values in float32: mean 0, variance 1, cut at ±6.

    Different seeds or purposes give different values. Philox (Salmon et al., SC 2011) provides the bits; numpy
    guarantees that its sequence does not change. Sums of integers (Irwin 1927, Hall 1927) shape them, because
    logarithms and cosines differ from one library to the next.
    """
    digest = hashlib.sha256(f"thinwire/noise/1 {seed} {purpose}".encode()).digest()
    key = np.frombuffer(digest, "<u8", 2).astype(np.uint64)
    source, out = np.random.Philox(key=key), np.empty(n, np.float32)
    for start in range(0, n, _PORTION):
        part = out[start : start + _PORTION]
        shorts = source.random_raw(part.size * _SUMMED // 4).astype("<u8").view("<u2").reshape(part.size, _SUMMED)
        part[:] = (2 * shorts.sum(axis=1, dtype=np.int64) - _SUMMED * 0xFFFF) / np.float64(2 * 0x10000)
    return out
