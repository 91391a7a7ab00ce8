"""Random numbers that all peers draw alike, whatever their machine and their versions of numpy and torch."""

from __future__ import annotations

import hashlib

import numpy as np
from thinwire.compression.codec import Floats

_SUMMED = 12
"""Uniform numbers of 16 bits per value: their sum has a variance of 1 and an excess kurtosis of −0.1."""

_PORTION = 1 << 16
"""Values drawn at a time: a bound on memory, without a say in the result."""


def normal(seed: int, purpose: str, n: int) -> Floats:
    """n values, normally distributed as far as ±6, mean 0, variance 1, exact in float32. Other purposes, other values.

    Philox (Salmon et al., SC 2011) gives the bits, whose sequence numpy promises to keep; integer sums shape them (Irwin 1927,
    Hall 1927), because logarithms and cosines differ from one library to the next.
    """
    digest = hashlib.sha256(f"thinwire/noise/1 {seed} {purpose}".encode()).digest()
    key = np.frombuffer(digest, "<u8", 2).astype(np.uint64)
    source, out = np.random.Philox(key=key), np.empty(n, np.float32)
    for start in range(0, n, _PORTION):
        part = out[start : start + _PORTION]
        shorts = source.random_raw(part.size * _SUMMED // 4).astype("<u8").view("<u2").reshape(part.size, _SUMMED)
        part[:] = (2 * shorts.sum(axis=1, dtype=np.int64) - _SUMMED * 0xFFFF) / np.float64(2 * 0x10000)
    return out
