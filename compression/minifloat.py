"""E3M0: a dense codec of four bits a value, a sign and an exponent, with one fp16 scale a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from thinwire.compression import minifloatkernels
from thinwire.compression.codec import Buffer, Floats
from thinwire.compression.packing import packed_bytes
from thinwire.compression.payloads import addresses, fit, raw, refuse, shares
from thinwire.compression.quantize import MAX_BLOCK


@dataclass(frozen=True, slots=True)
class E3M0:
    """The fp4 of Streaming DiLoCo (arXiv 2501.18512): a sign, three bits of exponent, no mantissa.

    Fifteen values, 0 and ±s·2**(e − 7) with e = 1…7, where s is the smallest fp16 that reaches the block's max|x|: so the
    largest is not clipped. x becomes the nearest of them, of two the larger: an error of at most max(|x|/3, s/128). Against
    `int4` it is finer near zero and coarser near s. What is beyond 65504 saturates. The paper has one scale per tensor; here
    it is one per block, as for all block quantizers.

    Payload: ceil(n / block) scales (fp16, little-endian), then the codes of each block, 8·(x < 0) + e, in planes as those of
    `int4` (`packing`). Code 8, minus zero, does not occur.

    block: 16…65536, a multiple of 8; a smaller one follows the data more closely and costs 16/block bits more per value.
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
    def stochastic(self) -> bool:
        return False

    def nbytes(self, n: int) -> int:
        return 2 * -(-n // self.block) + packed_bytes(n, 4, self.block)

    def encode(self, x: Floats, out: NDArray[np.uint8], seed: int = 0) -> None:
        """Raises CodecError when a value is not finite: there is no honest payload for it."""
        fit(x, out, self.nbytes(x.size))
        refuse(minifloatkernels.encode(x, out, self.block))

    def decode(self, payload: Buffer, out: Floats) -> None:
        found = raw(payload, self.nbytes(out.size))
        refuse(minifloatkernels.decode(np.uint64(found.ctypes.data), out, self.block))

    def check(self, payload: Buffer, n: int) -> float:
        found = raw(payload, self.nbytes(n))
        fault, squared = minifloatkernels.check(np.uint64(found.ctypes.data), n, self.block)
        refuse(fault)
        return squared

    def mean(self, payloads: Sequence[Buffer], weights: Sequence[float], out: Floats) -> None:
        parts = [raw(payload, self.nbytes(out.size)) for payload in payloads]
        minifloatkernels.mean(addresses(parts), shares(weights, len(parts)), out, self.block)
