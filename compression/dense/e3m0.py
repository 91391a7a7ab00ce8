"""E3M0: a dense codec with 4 bits per value (sign and exponent) and one fp16 scale per block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.dense.blockint import MAX_BLOCK
from thinwire.compression.kernels import e3m0 as kernels
from thinwire.compression.kernels.packing import packed_bytes
from thinwire.compression.kernels.payload_arrays import addresses, fit, raw, refuse, shares


@dataclass(frozen=True, slots=True)
class E3M0:
    """The fp4 format of Streaming DiLoCo (arXiv 2501.18512): a sign, 3 bits of exponent, no mantissa.

    It has 15 values: 0 and ±s·2**(e − 7) with e = 1…7, where s is the smallest fp16 that reaches the block's max|x|, so
    that the largest value is not clipped. Each x becomes the nearest of them, or the larger of two that are equally
    near; the error is at most max(|x|/3, s/128). Compared with `int4`, E3M0 is finer near zero and coarser near s.
    Values beyond 65504 saturate. The paper has one scale per tensor; here there is one per block, as for all block
    quantizers.

    Payload: ceil(n / block) scales (fp16, little-endian), then the codes of each block, 8·(x < 0) + e, in planes like
    those of `int4` (see `packing`). Code 8, minus zero, does not occur.

    block: 16…65536, a multiple of 8. A smaller block follows the data more closely but costs 16/block more bits per
    value.
    """

    block: int = 256

    def __post_init__(self) -> None:
        if not 16 <= self.block <= MAX_BLOCK or self.block % 8:
            raise ValueError(f"e3m0: block must be 16…{MAX_BLOCK}, a multiple of 8, not {self.block}")

    @property
    def spec(self) -> str:
        return f"e3m0(block={self.block})"

    @property
    def plain(self) -> bool:
        return False

    @property
    def growth(self) -> float:
        return 2.0  # A value that is rounded to the nearest level, which may be 0, at most doubles.

    @property
    def stochastic(self) -> bool:
        return False

    def nbytes(self, n: int) -> int:
        return 2 * -(-n // self.block) + packed_bytes(n, 4, self.block)

    def encode(self, x: Floats, out: NDArray[np.uint8], seed: int = 0) -> None:
        """Encode x. Raises CodecError if a value is not finite, because no payload can represent it."""
        fit(x, out, self.nbytes(x.size))
        refuse(kernels.encode(x, out, self.block))

    def decode(self, payload: Buffer, out: Floats) -> None:
        found = raw(payload, self.nbytes(out.size))
        refuse(kernels.decode(np.uint64(found.ctypes.data), out, self.block))

    def check(self, payload: Buffer, n: int) -> float:
        found = raw(payload, self.nbytes(n))
        fault, squared = kernels.check(np.uint64(found.ctypes.data), n, self.block)
        refuse(fault)
        return squared

    def mean(self, payloads: Sequence[Buffer], weights: Sequence[float], out: Floats, *, total: float = 0.0) -> None:
        parts = [raw(payload, self.nbytes(out.size)) for payload in payloads]
        kernels.mean(addresses(parts), shares(weights, len(parts), total), out, self.block)
