"""Random numbers that all peers draw alike, whatever their machine and their versions of numpy and torch."""

from __future__ import annotations

import hashlib

import numpy as np
from thinwire.compression.codec import Floats

_SUMMED = 12
"""Uniform numbers of 16 bits per value: their sum has a variance of 1 and an excess kurtosis of −0.1."""


def normal(seed: int, purpose: str, n: int) -> Floats:
    """n values, normally distributed as far as ±6, mean 0, variance 1, exact in float32. Other purposes, other values.

    Philox (Salmon et al., SC 2011) gives the bits, whose sequence numpy promises to keep; integer sums shape them (Irwin 1927,
    Hall 1927), because logarithms and cosines differ from one library to the next.
    """
    digest = hashlib.sha256(f"thinwire/noise/1 {seed} {purpose}".encode()).digest()
    key = np.frombuffer(digest, "<u8", 2).astype(np.uint64)
    words = np.random.Philox(key=key).random_raw(n * _SUMMED // 4)
    shorts = words.astype("<u8").view("<u2").reshape(n, _SUMMED)
    centred = 2 * shorts.sum(axis=1, dtype=np.int64) - _SUMMED * 0xFFFF
    values: Floats = (centred / np.float64(2 * 0x10000)).astype(np.float32)
    return values
