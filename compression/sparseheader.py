"""What stands before a section's streams in a sparse payload, and what it may say."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from thinwire.compression.codec import CodecError
from thinwire.compression.sparsereference import FIRST, LAST

FIXED, RICE, DENSE, EMPTY = range(4)
FIXED_WIDTH = 12
"""Bits of an index that is not coded."""

HEADER = struct.Struct("<BBHHI")


class Header(NamedTuple):
    """Mode, Rice parameter, levels as bits of fp16, bits of the unary stream; zero where a mode does not use one."""

    mode: int
    rice: int = 0
    lo: int = 0
    hi: int = 0
    unary_bits: int = 0

    def streams(self, name: str, size: int, kept: int, width: int, mode: int, cap: float) -> tuple[int, int, int]:
        """Bits of the three streams that must follow: unary, low bits, values. For a section `name` of so many elements, of
        which so many are kept, with codes of `width` bits; mode: how its indices are written, FIXED or RICE.

        Raises CodecError for a header that no encoder writes, or with a level above `cap`.
        """
        if self.mode == EMPTY or (self.mode == DENSE and kept == size):
            if any(self[1:]):
                raise CodecError(f"{name}: mode {self.mode} has no parameters")
            return 0, 0, 16 * size if self.mode == DENSE else 0
        if self.mode != mode or kept == size:
            raise CodecError(f"{name}: mode {self.mode} is not for it")
        if max(self.lo, self.hi) >= 0x7C00:
            raise CodecError(f"{name}: a level is negative or not finite", "not finite")
        # Halves that are finite and not negative order as their bits do.
        if self.lo > self.hi or self.hi == 0 or (width == 1 and self.lo != self.hi):
            raise CodecError(f"{name}: its levels make no codebook")
        if half(self.hi) > cap:
            raise CodecError(f"{name}: a level above {cap:g}", "bound")
        if mode == FIXED:
            if self.rice or self.unary_bits:
                raise CodecError(f"{name}: fixed indices have no Rice parameter")
            return 0, FIXED_WIDTH * kept, width * kept
        if not FIRST <= self.rice <= LAST or self.unary_bits < kept:
            raise CodecError(f"{name}: no Rice code of parameter {self.rice} and {self.unary_bits} bits")
        return self.unary_bits, self.rice * kept, width * kept


def half(bits: int) -> float:
    """An fp16 by its bits."""
    return float(np.uint16(bits).view(np.float16))
