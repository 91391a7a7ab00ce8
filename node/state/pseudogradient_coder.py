"""Encoding and decoding of flat vectors, chunk by chunk, in memory that is used again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from thinwire.collectives.deterministic_rounding import encode
from thinwire.collectives.topology.shards import Grid
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.compression.core.exact_block import BufferedCodec
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.device import Vector, empty, finite, placed, subtract_from


@dataclass(frozen=True, slots=True)
class PseudogradientCoder:
    """Coder of vectors that `grid` divides into chunks, with the memory of `pool`.

    `device`: encodes; None: the host does. Decoding is done on the host. `buffers`: values that the payloads of a
    BufferedCodec carry.
    """

    codec: Any
    grid: Grid
    pool: BufferPool
    device: torch.device | None
    buffers: Floats

    def differences(
        self, origin: Floats, read: Callable[[int, int, Any], None], share: float | None = None
    ) -> Iterator[memoryview]:
        """Encode `share` · (origin − model), chunk by chunk. Raises FloatingPointError.

        `read`: see replica_buffers.Read.
        """
        whole = self._vector(self.grid.chunk)
        for index in range(len(self.grid)):
            start, stop = self.grid.span(index)
            delta = whole[: stop - start]
            read(start, stop, delta)
            subtract_from(origin[start:stop], delta)
            if not finite(delta):
                raise FloatingPointError(f"the pseudo-gradient is not finite in elements {start} to {stop}")
            if share is not None:
                delta *= float(np.float32(share))
            yield self._encoded(index, delta)

    def encoded(self, vector: Floats) -> Iterator[memoryview]:
        """Encode a vector, chunk by chunk."""
        for index in range(len(self.grid)):
            start, stop = self.grid.span(index)
            yield self._encoded(index, placed(vector[start:stop], self.device))

    def decoded(self, results: Sequence[Buffer]) -> Iterator[tuple[int, int, Floats]]:
        """Yield decoded results for elements [low, high), in pieces; a piece is valid until the next one."""
        mean = self._floats(self.grid.chunk)
        for index, payload in enumerate(results):
            start, stop = self.grid.span(index)
            self.codec.decode(payload, mean[: stop - start])
            yield start, stop, mean[: stop - start]

    def _encoded(self, index: int, delta: Vector) -> memoryview:
        """A chunk's payload, in memory that is reused after its last use."""
        codec, size = self.codec, len(delta)
        payload = self.pool.lend(codec.nbytes(size))
        if isinstance(codec, BufferedCodec):
            encode(codec.codec, delta, np.frombuffer(payload, np.uint8)[: codec.codec.nbytes(size)])
            codec.put(self.buffers, index, self.grid.chunk, size, payload)
        else:
            encode(codec, delta, np.frombuffer(payload, np.uint8))
        return payload

    def _vector(self, size: int) -> Vector:
        """`size` elements with arbitrary values where contributions are encoded."""
        return self._floats(size) if self.device is None else empty(size, self.device)

    def _floats(self, size: int) -> Floats:
        """`size` elements with arbitrary values, in memory of the same kind."""
        return np.frombuffer(self.pool.lend(4 * size), np.float32)
