"""Dense codecs: plain fp32, and symmetric int8 with one fp16 scale per block."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from thinwire.compression import kernels
from thinwire.compression.codec import Buffer, CodecError, Floats

MAX_BLOCK = 1 << 16
"""Largest block: Σ code² of a block has to fit in 32 bits."""

_FAULTS = {
    kernels.BAD_SCALE: ("a scale is negative or not finite", "not finite"),
    kernels.BAD_CODE: ("a code is out of range", "encoding"),
    kernels.NOT_FINITE: ("a value is not finite", "not finite"),
}


@dataclass(frozen=True, slots=True)
class Fp32:
    """The values themselves, little-endian; for reference, tests and small tensors."""

    @property
    def spec(self) -> str:
        return "fp32"

    @property
    def plain(self) -> bool:
        return sys.byteorder == "little"

    def nbytes(self, n: int) -> int:
        return 4 * n

    def encode(self, x: Floats, out: NDArray[np.uint8]) -> None:
        """A plain copy: non-finite values go through, and every receiver's `check` names them."""
        _fit(x, out, 4 * x.size)
        np.copyto(out, x.view(np.uint8))

    def decode(self, payload: Buffer, out: Floats) -> None:
        _raise(kernels.fp32_decode(_words(payload, out.size), out.view(np.uint32)))

    def check(self, payload: Buffer, n: int) -> float:
        fault, squared = kernels.fp32_check(_words(payload, n))
        _raise(fault)
        return squared

    def mean(self, payloads: Sequence[Buffer], weights: Sequence[float], out: Floats) -> None:
        # Held in a list until the kernel returns: it sees addresses alone.
        parts = [_words(payload, out.size) for payload in payloads]
        kernels.fp32_mean(_addresses(parts), _shares(weights, len(parts)), out)


@dataclass(frozen=True, slots=True)
class Int8:
    """Codes −127…127, block by block: x ≈ s·code with s the smallest fp16 for which 127·s reaches the block's max|x|.

    Payload: ceil(n / block) scales (fp16, little-endian), then n codes. A block whose values are all below 2**-25 becomes
    zeros; magnitudes above 127·65504 saturate there. `block`, 16…65536: smaller blocks follow the data more closely and cost
    16/block bits more per value (8.0625 at 256).
    """

    block: int = 256

    def __post_init__(self) -> None:
        if not 16 <= self.block <= MAX_BLOCK:
            raise ValueError(f"int8: block must be 16…{MAX_BLOCK}, not {self.block}")

    @property
    def spec(self) -> str:
        return f"int8(block={self.block})"

    @property
    def plain(self) -> bool:
        return False

    def nbytes(self, n: int) -> int:
        return 2 * (-(-n // self.block)) + n

    def encode(self, x: Floats, out: NDArray[np.uint8]) -> None:
        """Raises CodecError when a value is not finite: there is no honest payload for it."""
        _fit(x, out, self.nbytes(x.size))
        _raise(kernels.int8_encode(x, out, self.block))

    def decode(self, payload: Buffer, out: Floats) -> None:
        _raise(kernels.int8_decode(_raw(payload, self.nbytes(out.size)), out, self.block))

    def check(self, payload: Buffer, n: int) -> float:
        fault, squared = kernels.int8_check(_raw(payload, self.nbytes(n)), n, self.block)
        _raise(fault)
        return squared

    def mean(self, payloads: Sequence[Buffer], weights: Sequence[float], out: Floats) -> None:
        parts = [_raw(payload, self.nbytes(out.size)) for payload in payloads]
        kernels.int8_mean(_addresses(parts), _shares(weights, len(parts)), out, self.block)


def _raise(fault: int) -> None:
    if fault != kernels.OK:
        raise CodecError(*_FAULTS[fault])


def _fit(x: Floats, out: NDArray[np.uint8], expected: int) -> None:
    """Our own mistakes, so ValueError rather than a remote's CodecError."""
    if x.dtype != np.float32 or x.ndim != 1 or not x.flags.c_contiguous:
        raise ValueError(f"encode takes flat float32, not {x.dtype} {x.shape}")
    if out.dtype != np.uint8 or out.shape != (expected,) or not out.flags.c_contiguous:
        raise ValueError(f"encode writes {expected} bytes, got room for {out.dtype} {out.shape}")


def _raw(payload: Buffer, expected: int) -> NDArray[np.uint8]:
    """The payload as bytes, without a copy, once its length is known to be right."""
    size = memoryview(payload).nbytes
    if size != expected:
        raise CodecError(f"payload of {size} bytes, expected {expected}", "length")
    return np.frombuffer(payload, np.uint8)


def _words(payload: Buffer, n: int) -> NDArray[np.uint32]:
    """The payload as 32-bit words; copied only when it does not lie on a word boundary."""
    raw = _raw(payload, 4 * n)
    return (raw if raw.ctypes.data % 4 == 0 else raw.copy()).view(np.uint32)


def _addresses(parts: Sequence[NDArray[np.uint8]] | Sequence[NDArray[np.uint32]]) -> NDArray[np.uint64]:
    return np.array([part.ctypes.data for part in parts], np.uint64)


def _shares(weights: Sequence[float], count: int) -> NDArray[np.float64]:
    """The weights by their sum, in float64; our own mistake, so ValueError, when they do not make a mean."""
    scale = np.array(weights, np.float64)
    total = math.fsum(weights)
    if scale.shape != (count,) or not np.isfinite(scale).all() or (scale < 0).any() or not 0 < total < math.inf:
        raise ValueError(f"{count} payloads need as many weights, finite, none negative, not all zero")
    return scale / total
