"""From the contributions to one chunk to its encoded result, by the run's rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from thinwire.collectives.aggregate import Rule
from thinwire.collectives.buffers import Pool
from thinwire.collectives.rounding import encode
from thinwire.compression.codec import Buffer, Codec


class Reduces(Protocol):
    """What makes one result of several contributions."""

    def result(self, payloads: Sequence[Buffer], weights: Sequence[float], size: int) -> Buffer:
        """The encoded aggregate of screened payloads of `size` elements each."""
        ...


class Reducer:
    """Averages and encodes into memory that `pool` lends."""

    def __init__(self, codec: Codec, rule: Rule, pool: Pool) -> None:
        self._codec, self._rule, self._pool = codec, rule, pool

    def result(self, payloads: Sequence[Buffer], weights: Sequence[float], size: int) -> Buffer:
        """The encoded aggregate of screened payloads of `size` elements each."""
        codec, encoded = self._codec, self._pool.lend(self._codec.nbytes(size))
        if codec.plain:
            self._rule(codec, payloads, weights, np.frombuffer(encoded, np.float32))
            return encoded
        mean = np.frombuffer(self._pool.lend(4 * size), np.float32)
        self._rule(codec, payloads, weights, mean)
        encode(codec, mean, np.frombuffer(encoded, np.uint8))
        return encoded
