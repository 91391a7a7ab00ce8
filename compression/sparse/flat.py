"""Sparse codec of a flat chunk, for exchanges that do not know the shapes of tensors.

Blocks are adjacent elements, as in `portions`, not squares of a matrix. Each portion of PORTION elements has separate levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from thinwire.compression.core.codec import Codec
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.sparse import mean as sparsemean
from thinwire.compression.sparse.portions import portion_chunks, square
from thinwire.compression.sparse.topk import Sparse

PORTION = 1 << 16
"""Largest number of elements with common levels.

Levels of large values are worse than nothing for small values.
"""


@dataclass(frozen=True, slots=True)
class FlatSparse:
    """Codec `codec` of flat chunks. Payloads have varying lengths; the rest is as in `Codec`."""

    codec: Sparse

    @property
    def spec(self) -> str:
        """Name in a manifest, with every parameter spelled out."""
        return self.codec.spec

    @property
    def plain(self) -> bool:
        """False: encoding loses values."""
        return False

    def nbytes(self, n: int) -> int:
        """Return the size in bytes of the largest payload of n elements."""
        return self.codec.bound(portion_chunks(n, PORTION, self.codec.chunk))

    def payload(self, x: Floats) -> bytes:
        """Return the payload of x. Raises CodecError if a value is not finite."""
        return self.codec.encode(self.codec.select(x, portion_chunks(x.size, PORTION, self.codec.chunk)))

    def decode(self, payload: Buffer, out: Floats) -> None:
        """Decode into out; zeros where nothing was sent. Raises CodecError for an invalid payload."""
        out[:] = 0.0
        self.codec.decode(payload, portion_chunks(out.size, PORTION, self.codec.chunk)).scatter(out)

    def mean(self, payloads: Sequence[Buffer], out: Floats) -> None:
        """Write the mean of checked payloads to out: in each portion a `bounded_contributor_mean`.

        From three contributions on, norms are clipped to their median. The same payloads in the same order give the same bits.
        """
        if len(payloads) == 1:  # A replica measures each contribution of its group.
            return self.decode(payloads[0], out)
        chunks = portion_chunks(out.size, PORTION, self.codec.chunk)
        selected = [self.codec.decode(payload, chunks) for payload in payloads]
        sparsemean.mean(selected, [1.0] * len(selected), chunks, out=out)

    def check(self, payload: Buffer, n: int) -> float:
        """Return the squared L2 norm of a payload of n elements. Raises CodecError for an invalid one."""
        return square(self.codec.decode(payload, portion_chunks(n, PORTION, self.codec.chunk)))


ChunkCodec: TypeAlias = Codec | FlatSparse
"""Codec of flat chunks: dense with payloads of an exact length, or sparse."""
