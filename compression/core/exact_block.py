"""Values that travel exactly beside an encoded vector: the buffers of a model.

A lossy codec could make a running variance negative, and the mean of two counters is no counter. So buffers travel as
float32. Some are averaged, the others are those of the contribution with the largest weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.core.codec import Codec, CodecError
from thinwire.compression.core.types import Buffer, Floats

_FLOAT = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class ExactBlock:
    """Number of values that are averaged, and of those after them, which the heaviest contribution sets."""

    averaged: int = 0
    copied: int = 0

    @property
    def size(self) -> int:
        """Values of the block."""
        return self.averaged + self.copied

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return self.size * _FLOAT.itemsize

    def read(self, payload: Buffer) -> Floats:
        """Return the block at the end of a payload. Raises CodecError if it is too short or not finite."""
        raw = memoryview(payload).cast("B")
        if raw.nbytes < self.nbytes:
            raise CodecError(f"a payload of {raw.nbytes} bytes, buffers take {self.nbytes}", "length")
        values = np.frombuffer(raw[raw.nbytes - self.nbytes :], _FLOAT).astype(np.float32)
        if not np.isfinite(values).all():
            raise CodecError("a buffer is not finite", "not finite")
        return values

    def combine(self, blocks: Sequence[Floats], weights: Sequence[float]) -> Floats:
        """Return the block of a round: the mean by `weights`, and the copied values of the heaviest.

        Of several heaviest contributions the first counts. The sum is accumulated in float64 in the given order, so all
        peers find the same bits. A mean lies between the smallest and the largest value. Raises ValueError unless the
        weights are not negative and not all zero.
        """
        total = sum(weights)
        if min(weights) < 0 or not total > 0:
            raise ValueError(f"weights {weights} have no mean")
        mean = np.zeros(self.averaged, np.float64)
        for block, weight in zip(blocks, weights, strict=True):
            mean += block[: self.averaged].astype(np.float64) * weight
        heaviest = blocks[weights.index(max(weights))]
        return np.concatenate([(mean / total).astype(np.float32), heaviest[self.averaged :]])


@dataclass(frozen=True, slots=True)
class BufferedCodec:
    """Dense codec of a vector of `total` elements, with a share of `block` at the end of each payload.

    Chunk, norm and values are those of `codec`: rules of aggregation see no buffers. A share is a function of the
    number of elements, rounded up, so that all shares together have room for the block; the rest is zero.
    """

    codec: Codec
    block: ExactBlock
    total: int

    @property
    def spec(self) -> str:
        """Name with the size of the block, so that peers with other buffers cannot meet in a round."""
        return f"{self.codec.spec} buffers({self.block.averaged},{self.block.copied})"

    @property
    def plain(self) -> bool:
        return False

    @property
    def stochastic(self) -> bool:
        return self.codec.stochastic

    @property
    def growth(self) -> float:
        return self.codec.growth

    def share(self, n: int) -> ExactBlock:
        """Return the block of a chunk of n elements."""
        return ExactBlock(-(-n * self.block.averaged // self.total), -(-n * self.block.copied // self.total))

    def nbytes(self, n: int) -> int:
        return self.codec.nbytes(n) + self.share(n).nbytes

    def encode(self, x: Floats, out: NDArray[np.uint8], seed: int = 0) -> None:
        """Encode the elements; the share follows with `put`."""
        self.codec.encode(x, out[: self.codec.nbytes(x.size)], seed)

    def decode(self, payload: Buffer, out: Floats) -> None:
        """Decode the elements, without the share."""
        self.codec.decode(self._elements(payload, out.size), out)

    def check(self, payload: Buffer, n: int) -> float:
        """Check elements and share; return the squared norm of the elements."""
        square = self.codec.check(self._elements(payload, n), n)
        self.share(n).read(payload)
        return square

    def mean(self, payloads: Sequence[Buffer], weights: Sequence[float], out: Floats, *, total: float = 0.0) -> None:
        """Write the mean of the elements, without the shares."""
        self.codec.mean([self._elements(payload, out.size) for payload in payloads], weights, out, total=total)

    def combine(self, payloads: Sequence[Buffer], weights: Sequence[float], n: int, out: Buffer) -> None:
        """Write the share of the result to the end of its payload `out`."""
        share = self.share(n)
        self._write(share.combine([share.read(payload) for payload in payloads], weights), out)

    def put(self, values: Floats, index: int, chunk: int, n: int, out: Buffer) -> None:
        """Write the share of chunk `index` to the end of its payload `out`.

        n: its elements; `chunk`: elements of each chunk before it.
        """
        usual, share = self.share(chunk), self.share(n)
        ends = self.block.averaged, self.block.size
        low, high = index * usual.averaged, self.block.averaged + index * usual.copied
        parts = (values[low : min(low + share.averaged, ends[0])], values[high : min(high + share.copied, ends[1])])
        tail = np.zeros(share.size, np.float32)
        tail[: parts[0].size] = parts[0]
        tail[share.averaged : share.averaged + parts[1].size] = parts[1]
        self._write(tail, out)

    def block_of(self, payloads: Sequence[Buffer], sizes: Sequence[int]) -> Floats:
        """Return the block of all chunks' payloads; sizes: elements of each. Raises CodecError."""
        shares = [self.share(n) for n in sizes]
        tails = [share.read(payload) for share, payload in zip(shares, payloads, strict=True)]
        averaged = [tail[: share.averaged] for share, tail in zip(shares, tails, strict=True)]
        copied = [tail[share.averaged :] for share, tail in zip(shares, tails, strict=True)]
        return np.concatenate(
            [np.concatenate(averaged)[: self.block.averaged], np.concatenate(copied)[: self.block.copied]]
        )

    def _elements(self, payload: Buffer, n: int) -> Buffer:
        raw = memoryview(payload).cast("B")
        if raw.nbytes != self.nbytes(n):
            raise CodecError(f"a payload of {raw.nbytes} bytes, {self.nbytes(n)} are needed", "length")
        return raw[: self.codec.nbytes(n)]

    def _write(self, values: Floats, out: Buffer) -> None:
        raw = memoryview(out).cast("B")
        raw[raw.nbytes - 4 * values.size :] = values.astype(_FLOAT).tobytes()
