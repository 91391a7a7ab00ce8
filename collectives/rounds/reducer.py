"""Computation of a chunk's encoded result from the contributions, by the run's rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from thinwire.collectives.aggregation.means import Rule
from thinwire.collectives.deterministic_rounding import encode
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.compression.core.codec import Codec
from thinwire.compression.core.types import Buffer


class ChunkReducer(Protocol):
    """Computes one result from several contributions."""

    def result(self, payloads: Sequence[Buffer], weights: Sequence[float], size: int) -> Buffer:
        """Return the encoded aggregate of screened payloads of `size` elements each."""
        ...


class Reducer:
    """Averages and encodes into memory lent by `pool`."""

    def __init__(self, codec: Codec, rule: Rule, pool: BufferPool) -> None:
        self._codec, self._rule, self._pool = codec, rule, pool

    def result(self, payloads: Sequence[Buffer], weights: Sequence[float], size: int) -> Buffer:
        """Return the encoded aggregate of screened payloads of `size` elements each."""
        codec, encoded = self._codec, self._pool.lend(self._codec.nbytes(size))
        if codec.plain:
            self._rule(codec, payloads, weights, np.frombuffer(encoded, np.float32))
            return encoded
        mean = np.frombuffer(self._pool.lend(4 * size), np.float32)
        self._rule(codec, payloads, weights, mean)
        encode(codec, mean, np.frombuffer(encoded, np.uint8))
        return encoded
