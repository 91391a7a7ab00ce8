"""Dense codecs with plain floating-point values: fp32, fp16 and bf16, little-endian, in order."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.kernels import common as kernels
from thinwire.compression.kernels import half as halfkernels
from thinwire.compression.kernels.payload_arrays import addresses, aligned, fit, refuse, shares


@dataclass(frozen=True, slots=True)
class Fp32:
    """Codec that sends the float32 values as they are; for reference, tests and small tensors."""

    @property
    def spec(self) -> str:
        return "fp32"

    @property
    def plain(self) -> bool:
        return sys.byteorder == "little"

    @property
    def stochastic(self) -> bool:
        return False

    @property
    def growth(self) -> float:
        return 1.0

    def nbytes(self, n: int) -> int:
        return 4 * n

    def encode(self, x: Floats, out: NDArray[np.uint8], seed: int = 0) -> None:
        """Copy x. Non-finite values are not rejected here but by every receiver's `check`."""
        fit(x, out, 4 * x.size)
        np.copyto(out, x.view(np.uint8))

    def decode(self, payload: Buffer, out: Floats) -> None:
        refuse(kernels.fp32_decode(aligned(payload, out.size, 4).view(np.uint32), out.view(np.uint32)))

    def check(self, payload: Buffer, n: int) -> float:
        fault, squared = kernels.fp32_check(aligned(payload, n, 4).view(np.uint32))
        refuse(fault)
        return squared

    def mean(self, payloads: Sequence[Buffer], weights: Sequence[float], out: Floats, *, total: float = 0.0) -> None:
        parts = [aligned(payload, out.size, 4) for payload in payloads]
        kernels.fp32_mean(addresses(parts), shares(weights, len(parts), total), out)


@dataclass(frozen=True, slots=True)
class Half:
    """Codec with 16 bits per value: bf16 if `brain`, else fp16; rounded to the nearest, ties to even.

    A magnitude beyond the largest finite one (65504 for fp16) becomes the largest finite one. Payloads with non-finite
    values are refused.
    """

    brain: bool

    @property
    def spec(self) -> str:
        return "bf16" if self.brain else "fp16"

    @property
    def plain(self) -> bool:
        return False

    @property
    def stochastic(self) -> bool:
        return False

    @property
    def growth(self) -> float:
        return 1.0 + (2.0**-8 if self.brain else 2.0**-11)

    def nbytes(self, n: int) -> int:
        return 2 * n

    def encode(self, x: Floats, out: NDArray[np.uint8], seed: int = 0) -> None:
        """Encode x. Raises CodecError if a value is not finite."""
        fit(x, out, 2 * x.size)
        words = np.empty(x.size, np.uint16) if out.ctypes.data % 2 else out.view(np.uint16)
        refuse(halfkernels.encode(x, words, self.brain))
        if out.ctypes.data % 2:
            np.copyto(out, words.view(np.uint8))

    def decode(self, payload: Buffer, out: Floats) -> None:
        found = aligned(payload, out.size, 2)
        refuse(halfkernels.decode(np.uint64(found.ctypes.data), out, self.brain))

    def check(self, payload: Buffer, n: int) -> float:
        found = aligned(payload, n, 2)
        fault, squared = halfkernels.check(np.uint64(found.ctypes.data), n, self.brain)
        refuse(fault)
        return squared

    def mean(self, payloads: Sequence[Buffer], weights: Sequence[float], out: Floats, *, total: float = 0.0) -> None:
        parts = [aligned(payload, out.size, 2) for payload in payloads]
        halfkernels.mean(addresses(parts), shares(weights, len(parts), total), out, self.brain)


def fp16() -> Half:
    """Return the IEEE half-precision codec: 11 bits of precision, magnitudes up to 65504."""
    return Half(False)


def bf16() -> Half:
    """Return the bfloat16 codec, the upper half of a float32: 8 bits of precision, range of float32."""
    return Half(True)
