"""Codecs for activations and their gradients between pipeline stages: 2-D arrays, one row per token.

`Rows` scales each row by its own largest value. `Tah` tolerates outlier columns at 4 bits, which `Rows` does not: a
Hadamard transform spreads a tile of 64 values that one value dominates over all 64 values, as one offset. TAH-Quant,
arXiv 2506.01352; the integers are those of `blockint.Integers`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.types import Buffer
from thinwire.compression.dense.blockint import Integers
from thinwire.compression.kernels.common import MAGNITUDE, kernel
from thinwire.compression.kernels.payload_arrays import raw

TILE = 64
"""Number of values in a tile."""

DOMINANT = np.float32(2.0)
"""A tile is transformed if its largest magnitude is at least this many times the second largest."""

TRANSFORMED = 0x80
"""Bit of a tile's mark for "transformed".

If it is set, the six low bits are the position of the dominant value; otherwise the mark is zero.
"""


@dataclass(frozen=True, slots=True)
class Rows:
    """Codec with symmetric integers and one fp16 scale per row: `Integers(bits, block=cols)` of all rows.

    bits: 8 or 4. cols: 16…65536, at 4 bits a multiple of 8. Raises ValueError for anything else.
    """

    bits: int = 8

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise ValueError(f"rows: bits must be 8 or 4, not {self.bits}")

    @property
    def spec(self) -> str:
        return f"rows(bits={self.bits})"

    def nbytes(self, rows: int, cols: int) -> int:
        """Return the exact size in bytes of the payload of (rows, cols)."""
        return Integers(self.bits, cols).nbytes(rows * cols)

    def encode(self, x: NDArray[np.float32], out: NDArray[np.uint8]) -> None:
        """Encode x (rows, cols) into out (exactly nbytes bytes). Raises CodecError if a value is not finite."""
        Integers(self.bits, _matrix(x).shape[1]).encode(x.reshape(-1), out)

    def decode(self, payload: Buffer, out: NDArray[np.float32]) -> None:
        """Decode into out (rows, cols).

        Raises CodecError if the payload is not a valid encoding of that shape.
        """
        Integers(self.bits, _matrix(out).shape[1]).decode(payload, out.reshape(-1))


@dataclass(frozen=True, slots=True)
class Tah:
    """Codec with asymmetric 4-bit integers in tiles of 64 along the concatenated rows.

    Dominated tiles are transformed. Payload: one mark per whole tile (bit 7: transformed; bits 0…5: the pivot), then
    the payload of `Integers(4, 64, asymmetric)`: 4.625 bits per value. A last tile of fewer than 64 values has no mark
    and is never transformed.
    """

    @property
    def spec(self) -> str:
        return "tah"

    def nbytes(self, rows: int, cols: int) -> int:
        """Return the exact size in bytes of the payload of (rows, cols)."""
        return rows * cols // TILE + _INTEGERS.nbytes(rows * cols)

    def encode(self, x: NDArray[np.float32], out: NDArray[np.uint8]) -> None:
        """Encode x (rows, cols) into out (exactly nbytes bytes).

        Raises CodecError if a value is not finite, before or after the transform.
        """
        expected = self.nbytes(*_matrix(x).shape)
        if out.dtype != np.uint8 or out.shape != (expected,):
            raise ValueError(f"encode writes {expected} bytes, got room for {out.dtype} {out.shape}")
        flat, marks = x.reshape(-1), x.size // TILE
        transformed = np.empty_like(flat)
        transform(flat, transformed, out[:marks])
        _INTEGERS.encode(transformed, out[marks:])

    def decode(self, payload: Buffer, out: NDArray[np.float32]) -> None:
        """Decode into out (rows, cols).

        Raises CodecError if the payload is not a valid encoding of that shape.
        """
        found = raw(payload, self.nbytes(*_matrix(out).shape))
        marks, flat = found[: out.size // TILE], out.reshape(-1)
        if (marks & 0x40).any() or ((marks < TRANSFORMED) & (marks != 0)).any():
            raise CodecError("the mark of a tile is invalid")
        _INTEGERS.decode(found[marks.size :].data, flat)
        transform_back(flat, marks)


_INTEGERS = Integers(4, TILE, asymmetric=True)


def _matrix(x: NDArray[np.float32]) -> NDArray[np.float32]:
    if x.dtype != np.float32 or x.ndim != 2 or not x.flags.c_contiguous:
        raise ValueError(f"activations are float32 in rows, not {x.dtype} {x.shape}")
    return x


@kernel
def _hadamard(x: NDArray[np.float32]) -> None:
    """Transform x in place, with butterflies of neighbours first, then at distances 2, 4 … 32."""
    distance = 1
    while distance < TILE:
        for first in range(0, TILE, 2 * distance):
            for i in range(first, first + distance):
                low, high = x[i], x[i + distance]
                x[i] = low + high
                x[i + distance] = low - high
        distance *= 2
    for i in range(TILE):
        x[i] = x[i] * np.float32(0.125)


@kernel
def transform(x: NDArray[np.float32], out: NDArray[np.float32], marks: NDArray[np.uint8]) -> None:
    """Copy `x` to `out`, transform the tiles there that one value dominates, and write the marks."""
    bits = x.view(np.uint32)
    for tile in range(marks.size):
        start = tile * TILE
        source, target = x[start : start + TILE], out[start : start + TILE]
        magnitudes = bits[start : start + TILE]
        peak = np.uint32(0)
        for i in range(TILE):
            peak = max(peak, np.uint32(magnitudes[i] & MAGNITUDE))
            target[i] = source[i]
        marks[tile] = 0
        top, rivals = np.uint32(peak).view(np.float32), np.int32(0)
        # Two vectorising passes find the few tiles that one value dominates: it is the only one that exceeds top / 2.
        for i in range(TILE):
            rivals += np.int32(DOMINANT * abs(source[i]) > top)
        if rivals == 1:
            pivot = 0
            while np.uint32(magnitudes[pivot] & MAGNITUDE) != peak:
                pivot += 1
            marks[tile] = TRANSFORMED | pivot
            target[pivot] = source[0]
            target[0] = source[pivot]
            _hadamard(target)
    for i in range(marks.size * TILE, x.size):
        out[i] = x[i]


@kernel
def transform_back(x: NDArray[np.float32], marks: NDArray[np.uint8]) -> None:
    """Undo the transform of the marked tiles of `x`, in place."""
    for tile in range(marks.size):
        if marks[tile] >= TRANSFORMED:
            target = x[tile * TILE : tile * TILE + TILE]
            _hadamard(target)
            pivot = marks[tile] & 0x3F
            low = target[0]
            target[0] = target[pivot]
            target[pivot] = low
