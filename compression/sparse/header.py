"""Header of a section in a sparse payload, and its validation."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from thinwire.compression.core.codec import CodecError

FIXED, RICE, DENSE, EMPTY = range(4)
"""Modes of a section, see topk.py."""

FIXED_WIDTH = 12
"""Bits of an index in fixed mode."""

FIRST, LAST = 3, 8
"""Smallest and largest parameter of a Rice code."""

HEADER = struct.Struct("<BBHHI")


class Header(NamedTuple):
    """Mode, Rice parameter, levels as bits of fp16, length in bits of the unary stream.

    A field that a mode does not use is zero.
    """

    mode: int
    rice: int = 0
    lo: int = 0
    hi: int = 0
    unary_bits: int = 0

    def streams(self, name: str, size: int, kept: int, width: int, mode: int, cap: float) -> tuple[int, int, int]:
        """Return the lengths in bits of the three streams that must follow: unary, low bits, values.

        The section `name` has `size` elements, of which `kept` are selected, with codes of `width` bits. mode: encoding
        of its indices, FIXED or RICE. Raises CodecError for a header that no encoder writes, or for a level above
        `cap`.
        """
        if self.mode == EMPTY or (self.mode == DENSE and kept == size):
            if any(self[1:]):
                raise CodecError(f"{name}: mode {self.mode} has no parameters")
            return 0, 0, 16 * size if self.mode == DENSE else 0
        if self.mode != mode or kept == size:
            raise CodecError(f"{name}: mode {self.mode} is not for it")
        if max(self.lo, self.hi) >= 0x7C00:
            raise CodecError(f"{name}: a level is negative or not finite", "not finite")
        # Finite, non-negative fp16 values have the order of their bits.
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
    """Return the value of an fp16 given by its bits."""
    return float(np.uint16(bits).view(np.float16))
