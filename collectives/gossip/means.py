"""Means that a replica needs for its outer step: of the contributions to its group, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from thinwire.collectives.gossip.pair_codec import PairCodec
from thinwire.collectives.topology.shards import Grid
from thinwire.compression.core.codec import Codec
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.sparse.flat import FlatSparse


class Means(Protocol):
    """Means over the members of a group that contributed to a chunk."""

    def fast(self, index: int, out: Floats) -> bool:
        """Write the mean of Δ (of θ, if one vector travels) of this chunk; return False if there is none."""
        ...

    def pull(self, index: int, out: Floats) -> bool:
        """Write the mean of the slow weights minus ours as sent; return False if there is none."""
        ...


class MeshMeans:
    """Means of contributions that are all here: members send all chunks to each other.

    `payloads`: the contributions in peer-id order, each with the chunks of Δ and then those of the slow weights that travel
    in `round`. `place`: which of them is ours. All members add in the same order, so that equal replicas stay equal in a
    group of all peers.
    """

    def __init__(
        self, payloads: Sequence[Sequence[Buffer]], place: int, grid: Grid, codecs: PairCodec, round: int
    ) -> None:
        self._payloads, self._place, self._count, self._codecs = payloads, place, len(grid), codecs
        self._mixed, self._share = codecs.mixed(grid, round), np.float32(1.0 / len(payloads))

    def fast(self, index: int, out: Floats) -> bool:
        """Write the mean of Δ (of θ, if one vector travels) of this chunk."""
        codec = self._codecs.fast
        if isinstance(codec, FlatSparse):
            codec.mean([payload[index] for payload in self._payloads], out)
        else:
            self._mean(codec, index, out)
        return True

    def pull(self, index: int, out: Floats) -> bool:
        """Write the mean of the slow weights minus ours as sent; return False if they do not travel."""
        slow = self._codecs.slow
        if slow is None or index not in self._mixed:
            return False
        number, own = self._count + self._mixed.index(index), np.empty_like(out)
        self._mean(slow, number, out)
        slow.decode(self._payloads[self._place][number], own)
        out -= own
        return True

    def _mean(self, codec: Codec | FlatSparse, number: int, out: Floats) -> None:
        one = np.empty_like(out)
        out[:] = 0.0
        for payload in self._payloads:
            codec.decode(payload[number], one)
            out += one
        out *= self._share


@dataclass(frozen=True, slots=True)
class SplitMeans:
    """Means of Δ and of the slow weights from different sources."""

    fasts: Means
    pulls: Means

    def fast(self, index: int, out: Floats) -> bool:
        """Write the mean of Δ of this chunk; return False if there is none."""
        return self.fasts.fast(index, out)

    def pull(self, index: int, out: Floats) -> bool:
        """Write the mean of the slow weights minus ours as sent; return False if there is none."""
        return self.pulls.pull(index, out)


@dataclass(frozen=True, slots=True)
class OwnerMeans:
    """Means that the owners of chunks computed, encoded. None: the chunk has no mean.

    `fasts`, `pulls`: payload of each chunk.
    """

    fasts: Sequence[Buffer | None]
    pulls: Sequence[Buffer | None]
    codecs: PairCodec

    def fast(self, index: int, out: Floats) -> bool:
        """Write the mean of Δ (of θ, if one vector travels) of this chunk; return False if there is none."""
        return self._decode(self.fasts[index], out)

    def pull(self, index: int, out: Floats) -> bool:
        """Write the mean of the slow weights minus ours as sent; return False if there is none."""
        return self._decode(self.pulls[index], out)

    def _decode(self, payload: Buffer | None, out: Floats) -> bool:
        if payload is None:
            return False
        self.codecs.means.decode(payload, out)
        return True
