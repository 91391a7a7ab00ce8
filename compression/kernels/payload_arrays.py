"""Helpers shared by the dense codecs: payload views, errors of kernels, and normalised weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.kernels import common as kernels

_FAULTS = {
    kernels.BAD_SCALE: ("a scale or offset is not one that an encoder writes", "not finite"),
    kernels.BAD_CODE: ("a code is out of range", "encoding"),
    kernels.NOT_FINITE: ("a value is not finite", "not finite"),
}


def refuse(fault: int) -> None:
    """Raise the CodecError of a fault that a kernel returned; do nothing for OK."""
    if fault != kernels.OK:
        raise CodecError(*_FAULTS[fault])


def fit(x: Floats, out: NDArray[np.uint8], expected: int) -> None:
    """Raise ValueError for arrays that do not fit: a mistake of the caller, unlike a CodecError."""
    if x.dtype != np.float32 or x.ndim != 1 or not x.flags.c_contiguous:
        raise ValueError(f"encode takes flat float32, not {x.dtype} {x.shape}")
    if out.dtype != np.uint8 or out.shape != (expected,) or not out.flags.c_contiguous:
        raise ValueError(f"encode writes {expected} bytes, got room for {out.dtype} {out.shape}")


def raw(payload: Buffer, expected: int) -> NDArray[np.uint8]:
    """View the payload as bytes without a copy. Raises CodecError for a wrong length."""
    size = memoryview(payload).nbytes
    if size != expected:
        raise CodecError(f"payload of {size} bytes, expected {expected}", "length")
    return np.frombuffer(payload, np.uint8)


def aligned(payload: Buffer, n: int, width: int) -> NDArray[np.uint8]:
    """Return the payload as bytes of n words of `width` bytes, copied only if it is not word-aligned."""
    found = raw(payload, width * n)
    return found if found.ctypes.data % width == 0 else found.copy()


def addresses(parts: Sequence[NDArray[Any]]) -> NDArray[np.uint64]:
    """Return the addresses of the arrays. The caller must hold references until the kernel returns."""
    return np.array([part.ctypes.data for part in parts], np.uint64)


def shares(weights: Sequence[float], count: int, divisor: float = 0.0) -> NDArray[np.float64]:
    """Return the weights divided by their sum, or by `divisor` if it is positive, in float64.

    Raises ValueError, since it is a mistake of the caller, unless there are `count` finite, non-negative weights that
    are not all zero.
    """
    scale = np.array(weights, np.float64)
    total = math.fsum(weights)
    if scale.shape != (count,) or not np.isfinite(scale).all() or (scale < 0).any() or not 0 < total < math.inf:
        raise ValueError(f"{count} payloads need as many weights, finite, none negative, not all zero")
    return scale / (divisor or total)
