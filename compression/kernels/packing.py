"""Byte order of the block quantizers' codes of 8, 4 and 3 bits: kernels and sizes.

The codes of a block are spread over `lanes` equal parts, so that packing is plain arithmetic on whole vectors: with
stride g = ceil(size / lanes), code k·g + j is the k-th code of group j. 8 bits: one byte per code. 4 bits: byte j has
codes j (low half) and g + j. 3 bits: group j has eight codes in 24 bits, lowest first, and the three bytes of a group
lie g bytes apart. Groups that are incomplete at the end of the last block are padded with code 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.kernels.common import half_to_float, inline, kernel

LANES, WIDTHS = {8: 1, 4: 2, 3: 8}, {8: 1, 4: 1, 3: 3}
"""Bits -> number of lanes, and bytes of a group."""

LANE_SHIFT, GROUP_BYTES = np.zeros(9, np.int64), np.zeros(9, np.int64)
for _bits in LANES:
    LANE_SHIFT[_bits], GROUP_BYTES[_bits] = LANES[_bits].bit_length() - 1, WIDTHS[_bits]
"""For kernels, indexed by bits: the binary logarithm of the number of lanes, and the bytes of a group."""


def packed_bytes(n: int, bits: int, block: int) -> int:
    """Return the size in bytes of the codes of n elements; `block` is a multiple of the lanes."""
    return n // block * group_bytes(block, bits) + group_bytes(n % block, bits)


def group_bytes(count: int, bits: int) -> int:
    """Return the size in bytes of the codes of `count` elements of one block."""
    return -(-count // LANES[bits]) * WIDTHS[bits]


@inline
def any_half(half: np.int64) -> np.float32:
    """Convert a finite fp16, given by its bits, to float32 (exact)."""
    magnitude = half_to_float(half & 0x7FFF)
    return -magnitude if half >= 0x8000 else magnitude


@inline
def read_half(payload: NDArray[np.uint8], index: int) -> np.int64:
    """Read the index-th fp16 of a payload, as bits."""
    return np.int64(payload[2 * index]) | np.int64(payload[2 * index + 1]) << 8


@inline
def write_half(out: NDArray[np.uint8], index: int, half: np.int64) -> None:
    """Write the index-th fp16 of a payload, given by its bits."""
    out[2 * index] = half & 0xFF
    out[2 * index + 1] = half >> 8


@kernel
def pack(codes: NDArray[np.uint8], out: NDArray[np.uint8], bits: int) -> None:
    """Pack codes (a multiple of `lanes`) into bytes; only the low `bits` bits of a code count."""
    if bits == 8:
        for j in range(codes.size):
            out[j] = codes[j]
    elif bits == 4:
        g = codes.size // 2
        low, high = codes[:g], codes[g:]
        for j in range(g):
            out[j] = np.uint8(low[j] & np.uint8(15)) | np.uint8(high[j] << np.uint8(4))
    else:
        g = codes.size // 8
        seven = np.uint8(7)
        c0, c1, c2, c3 = codes[:g], codes[g : 2 * g], codes[2 * g : 3 * g], codes[3 * g : 4 * g]
        c4, c5, c6, c7 = codes[4 * g : 5 * g], codes[5 * g : 6 * g], codes[6 * g : 7 * g], codes[7 * g :]
        b0, b1, b2 = out[:g], out[g : 2 * g], out[2 * g : 3 * g]
        for j in range(g):
            second, fifth = c2[j] & seven, c5[j] & seven
            b0[j] = np.uint8((c0[j] & seven) | ((c1[j] & seven) << 3) | (second << 6))
            b1[j] = np.uint8((second >> 2) | ((c3[j] & seven) << 1) | ((c4[j] & seven) << 4) | (fifth << 7))
            b2[j] = np.uint8((fifth >> 1) | ((c6[j] & seven) << 2) | ((c7[j] & seven) << 5))


@kernel
def unpack(packed: NDArray[np.uint8], codes: NDArray[np.uint8], bits: int, sign: np.uint8) -> None:
    """Inverse of `pack`.

    sign: 2**(bits-1) for codes in two's complement, which are sign-extended to bytes; else 0.
    """
    if bits == 8:
        for j in range(codes.size):
            codes[j] = packed[j]
    elif bits == 4:
        g = codes.size // 2
        low, high = codes[:g], codes[g:]
        for j in range(g):
            low[j] = np.uint8(((packed[j] & np.uint8(15)) ^ sign) - sign)
            high[j] = np.uint8(((packed[j] >> np.uint8(4)) ^ sign) - sign)
    else:
        g = codes.size // 8
        b0, b1, b2 = packed[:g], packed[g : 2 * g], packed[2 * g : 3 * g]
        for lane in range(8):
            target, shift = codes[lane * g : lane * g + g], 3 * lane
            if shift < 6:
                for j in range(g):
                    target[j] = np.uint8((((b0[j] >> shift) & 7) ^ sign) - sign)
            elif shift == 6:
                for j in range(g):
                    target[j] = np.uint8((((b0[j] >> 6) | ((b1[j] & 1) << 2)) ^ sign) - sign)
            elif shift < 14:
                for j in range(g):
                    target[j] = np.uint8((((b1[j] >> (shift - 8)) & 7) ^ sign) - sign)
            elif shift == 15:
                for j in range(g):
                    target[j] = np.uint8((((b1[j] >> 7) | ((b2[j] & 3) << 1)) ^ sign) - sign)
            else:
                for j in range(g):
                    target[j] = np.uint8((((b2[j] >> (shift - 16)) & 7) ^ sign) - sign)
