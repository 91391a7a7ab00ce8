"""Dense codecs that quantize in blocks: 8, 4 or 3 bits per value and an fp16 scale per block.

Asymmetric codecs also store one fp16 offset per block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.kernels import block_decode as decoders
from thinwire.compression.kernels import block_encode as encoders
from thinwire.compression.kernels.packing import packed_bytes
from thinwire.compression.kernels.payload_arrays import addresses, fit, raw, refuse, shares

MAX_BLOCK = 1 << 16
"""Largest block size in elements; the sum of squared codes of a block has to fit in 32 bits."""

BITS = (8, 4, 3)


@dataclass(frozen=True, slots=True)
class Integers:
    """Codec with integer codes of `bits` bits, quantized block by block.

    Symmetric: codes −m…m with m = 2**(bits−1) − 1; x ≈ s·code, where s is the smallest fp16 for which m·s reaches the
    block's max|x|. Asymmetric: codes 0…t with t = 2**bits − 1; x ≈ z + s·code, where z is the largest fp16 not above
    the block's minimum and s is the smallest fp16 for which z + t·s reaches its maximum. Scales and offsets are rounded
    in these directions, not to the nearest as in QSGD (arXiv 1610.02132), so that no code is clipped.

    Payload: ceil(n / block) scales (fp16, little-endian), as many offsets if asymmetric, then the codes of each block
    in the order described in `packing`. A symmetric block whose values are far below 2**-24 becomes zeros. Values
    beyond the reach of scale and offset 65504 saturate.

    block: 16…65536, a multiple of 8 unless `bits` is 8. A smaller block follows the data more closely but costs
    16/block (asymmetric: 32/block) more bits per value. stochastic: round up or down at random without bias, from the
    seed given to `encode`.
    """

    bits: int
    block: int = 256
    asymmetric: bool = False
    stochastic: bool = False

    def __post_init__(self) -> None:
        name, lanes = f"int{self.bits}", 1 if self.bits == 8 else 8
        if self.bits not in BITS:
            raise ValueError(f"{name}: bits must be one of {BITS}")
        if not 16 <= self.block <= MAX_BLOCK or self.block % lanes:
            raise ValueError(f"{name}: block must be 16…{MAX_BLOCK}, a multiple of {lanes}, not {self.block}")
        for flag in ("asymmetric", "stochastic"):
            if getattr(self, flag) not in (0, 1):
                raise ValueError(f"{name}: {flag} must be 0 or 1, not {getattr(self, flag)}")
            object.__setattr__(self, flag, bool(getattr(self, flag)))

    @property
    def spec(self) -> str:
        flags = "".join(f",{flag}=1" for flag in ("asymmetric", "stochastic") if getattr(self, flag))
        return f"int{self.bits}(block={self.block}{flags})"

    @property
    def plain(self) -> bool:
        return False

    @property
    def growth(self) -> float:
        # An error is at most one step, max|x| / m, whose fp16 is up to 2**-10 longer.
        most: int = 2 ** (self.bits - 1) - 1
        return 1.0 + math.sqrt(self.block) / most * (1.0 + 2.0**-10)

    def nbytes(self, n: int) -> int:
        return (4 if self.asymmetric else 2) * -(-n // self.block) + packed_bytes(n, self.bits, self.block)

    def encode(self, x: Floats, out: NDArray[np.uint8], seed: int = 0) -> None:
        """Encode x. Raises CodecError if a value is not finite, because no payload can represent it.

        seed: 64 bits. With stochastic rounding, a value is rounded by the seed and its position in x; use a different
        seed for every chunk.
        """
        fit(x, out, self.nbytes(x.size))
        kernel = encoders.encode_asymmetric if self.asymmetric else encoders.encode
        refuse(kernel(x, out, self.bits, self.block, self.stochastic, np.uint64(seed)))

    def decode(self, payload: Buffer, out: Floats) -> None:
        found = raw(payload, self.nbytes(out.size))
        refuse(decoders.decode(np.uint64(found.ctypes.data), out, self.bits, self.block, self.asymmetric))

    def check(self, payload: Buffer, n: int) -> float:
        found = raw(payload, self.nbytes(n))
        fault, squared = decoders.check(np.uint64(found.ctypes.data), n, self.bits, self.block, self.asymmetric)
        refuse(fault)
        return squared

    def mean(self, payloads: Sequence[Buffer], weights: Sequence[float], out: Floats, *, total: float = 0.0) -> None:
        parts = [raw(payload, self.nbytes(out.size)) for payload in payloads]
        decoders.mean(addresses(parts), shares(weights, len(parts), total), out, self.bits, self.block, self.asymmetric)


Int8, Int4, Int3 = partial(Integers, 8), partial(Integers, 4), partial(Integers, 3)
"""Constructors by bit width, under the names used in a manifest."""
