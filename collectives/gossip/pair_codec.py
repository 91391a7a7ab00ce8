"""Data that one side of a pair sends: one vector if that suffices, else two, each with its own codec.

A pair needs from each side Δ = θ − φ, the pseudo-gradient with the opposite sign, and the slow weights φ (NoLoCo, arXiv
2506.10911). With γ = β the step is a function of θ alone, so exact codecs send θ. A lossy codec encodes Δ, with error
feedback; φ then travels at 8 bits, and both sides use the decoded values, so that their moves towards each other cancel. φ is
known when a round begins and travels while both train; Δ follows. A payload consists of the chunks of Δ, then those of φ, on
one grid.

A round may have only a part of φ, the same one at all peers: of n parts, part p has the chunks p, p + n, p + 2n, …, and
rounds take the parts in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from thinwire.collectives.deterministic_rounding import encode
from thinwire.collectives.topology.shards import Grid
from thinwire.compression import registry
from thinwire.compression.core.codec import Codec
from thinwire.compression.device import Vector
from thinwire.compression.sparse.flat import ChunkCodec, FlatSparse
from thinwire.compression.sparse.topk import Sparse

SLOW = "int8(block=256)"
"""Codec of the slow weights, unless that of the pseudo-gradient is exact."""


@dataclass(frozen=True, slots=True)
class PairCodec:
    """Codecs of a pair.

    `fast`: codec of Δ, or of θ if `slow`, the codec of φ, is None. `parts`: parts of φ.
    """

    fast: ChunkCodec
    slow: Codec | None
    parts: int = 1

    @property
    def spec(self) -> str:
        """Names of both codecs."""
        if self.slow is None:
            return self.fast.spec
        return f"{self.fast.spec}+{self.slow.spec}" + (f"/{self.parts}" if self.parts > 1 else "")

    @property
    def means(self) -> Codec:
        """Codec of the means that owners of chunks send.

        8 bits unless Δ is exact, because no error feedback corrects them.
        """
        if self.slow is not None and not self.fast.plain:
            return self.slow
        assert not isinstance(self.fast, FlatSparse)
        return self.fast

    @property
    def exact(self) -> bool:
        """True if encoding loses nothing, so that no error feedback is needed."""
        return self.fast.plain

    @property
    def averaged(self) -> bool:
        """True if chunks of Δ may have owners, which send means.

        The mean of n sparse vectors has n times as many values, so these go to all members instead.
        """
        return not isinstance(self.fast, FlatSparse)

    def mixed(self, grid: Grid, round: int) -> range:
        """Return the indices of the chunks whose slow weights travel in a round."""
        return range(round % self.parts, len(grid), self.parts) if self.slow is not None else range(0)

    def nbytes(self, n: int) -> int:
        """Return the bytes of n elements of both vectors, at most; exact for dense codecs."""
        return self.fast.nbytes(n) + (self.slow.nbytes(n) if self.slow is not None else 0)


def parse_pair_codec(spec: str, *, lr: float, gamma: float, parts: int = 1) -> PairCodec:
    """Return the codecs for the codec, β and γ of a manifest, and its number of parts of the slow weights."""
    if registry.kind_of(spec) == "tensor":
        codec = registry.parse(spec)
        assert isinstance(codec, Sparse)
        return PairCodec(FlatSparse(codec), registry.dense(SLOW), parts)
    fast = registry.dense(spec)
    if not fast.plain:
        return PairCodec(fast, registry.dense(SLOW), parts)
    return PairCodec(fast, None if gamma == lr and parts == 1 else fast, parts)


def payload_of(codec: ChunkCodec, x: Vector) -> memoryview:
    """Return the payload of a chunk. Raises CodecError if a value is not finite."""
    if isinstance(codec, FlatSparse):
        assert isinstance(x, np.ndarray)  # `encoding_device` names no device for this codec
        return memoryview(codec.payload(x))
    payload = np.empty(codec.nbytes(len(x)), np.uint8)
    encode(codec, x, payload)
    return payload.data
