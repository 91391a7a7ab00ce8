"""What the dense codecs share: a payload as numbers once its length is right, what a kernel found, weights as shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from thinwire.compression import kernels
from thinwire.compression.codec import Buffer, CodecError, Floats

_FAULTS = {
    kernels.BAD_SCALE: ("a scale or offset is not one that an encoder writes", "not finite"),
    kernels.BAD_CODE: ("a code is out of range", "encoding"),
    kernels.NOT_FINITE: ("a value is not finite", "not finite"),
}


def refuse(fault: int) -> None:
    """Raise the CodecError of a kernel's answer, if it is one."""
    if fault != kernels.OK:
        raise CodecError(*_FAULTS[fault])


def fit(x: Floats, out: NDArray[np.uint8], expected: int) -> None:
    """Our own mistakes, so ValueError rather than a remote's CodecError."""
    if x.dtype != np.float32 or x.ndim != 1 or not x.flags.c_contiguous:
        raise ValueError(f"encode takes flat float32, not {x.dtype} {x.shape}")
    if out.dtype != np.uint8 or out.shape != (expected,) or not out.flags.c_contiguous:
        raise ValueError(f"encode writes {expected} bytes, got room for {out.dtype} {out.shape}")


def raw(payload: Buffer, expected: int) -> NDArray[np.uint8]:
    """The payload as bytes, without a copy, once its length is known to be right."""
    size = memoryview(payload).nbytes
    if size != expected:
        raise CodecError(f"payload of {size} bytes, expected {expected}", "length")
    return np.frombuffer(payload, np.uint8)


def aligned(payload: Buffer, n: int, width: int) -> NDArray[np.uint8]:
    """The payload of n words of `width` bytes; copied only when it does not lie on a word boundary."""
    found = raw(payload, width * n)
    return found if found.ctypes.data % width == 0 else found.copy()


def addresses(parts: Sequence[NDArray[Any]]) -> NDArray[np.uint64]:
    """Where they lie. The caller keeps them until the kernel returns, which sees addresses alone."""
    return np.array([part.ctypes.data for part in parts], np.uint64)


def shares(weights: Sequence[float], count: int) -> NDArray[np.float64]:
    """The weights by their sum, in float64; our own mistake, so ValueError, when they do not make a mean."""
    scale = np.array(weights, np.float64)
    total = math.fsum(weights)
    if scale.shape != (count,) or not np.isfinite(scale).all() or (scale < 0).any() or not 0 < total < math.inf:
        raise ValueError(f"{count} payloads need as many weights, finite, none negative, not all zero")
    return scale / total
