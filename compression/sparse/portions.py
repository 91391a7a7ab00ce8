"""Sparse codec on portions of a flat vector, with a separate payload for each portion.

The contributions to a portion can be added up without the rest of the vector, and the largest values of the sum can be sent
in turn. The length of a portion is a multiple of the codec's chunk; the last portion may be shorter. Chunks are side² adjacent
elements here, not blocks of matrices as in `parameter_chunks`. The payload of the whole vector is the concatenation of the
payloads of its portions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.parameter_chunks import Chunks
from thinwire.compression.core.types import Buffer, Denominator, Floats
from thinwire.compression.sparse import mean as sparsemean
from thinwire.compression.sparse.mean import Average
from thinwire.compression.sparse.topk import Selected, Sparse


@lru_cache(maxsize=64)
def portion_chunks(total: int, portion: int, chunk: int) -> Chunks:
    """Return the chunks of `total` elements, with a section for each portion of `portion` elements."""
    side, shapes = round(chunk**0.5), []
    for number, start in enumerate(range(0, total, portion)):
        size = min(portion, total - start)
        # Whole rows form a matrix. A portion that ends within a row can only be the last one; it becomes the vector, the
        # last section.
        shapes.append((f"{number:06d}", (size // side, side) if size % side == 0 else (size,)))
    return Chunks(tuple(shapes), chunk)


@dataclass(frozen=True, slots=True)
class PortionCodecs:
    """Codecs of a sparse butterfly: `codec` for contributions to an owner, `wide` for the owner's results.

    beta: decay factor of the owner's residual, the part of the sum that was not sent. denominator: that of the mean, see
    mean.py. average: rule by which an owner aggregates.
    """

    codec: Sparse
    wide: Sparse
    beta: float = 1.0
    denominator: Denominator = "bounded_contributor_mean"
    average: Average = sparsemean.means

    @property
    def spec(self) -> str:
        """Names of both codecs."""
        return f"{self.codec.spec} {self.wide.spec}"

    def nbytes(self, n: int) -> int:
        """Return the size in bytes of the largest payload of a portion of n elements, contribution or result."""
        return max(one.bound(portion_chunks(n, n, one.chunk)) for one in (self.codec, self.wide))

    def check(self, payload: Buffer, n: int) -> float:
        """Return the squared L2 norm of a contribution to a portion of n elements.

        Raises CodecError for an invalid payload.
        """
        return square(self.codec.decode(payload, portion_chunks(n, n, self.codec.chunk)))

    def check_sum(self, payload: Buffer, n: int) -> float:
        """Return the squared L2 norm of a result of a portion of n elements.

        Raises CodecError for an invalid payload.
        """
        return square(self.wide.decode(payload, portion_chunks(n, n, self.wide.chunk)))

    def reduce(
        self, payloads: Sequence[Buffer], weights: Sequence[float], residual: Floats | None, n: int
    ) -> tuple[bytes, Floats]:
        """Return the payload of the mean of checked contributions to a portion, and the new residual.

            a = β residual + mean;  sent = the largest of a, quantised;  left = a − sent

        n: elements of the portion. residual: the portion's previous residual, or None. The mean is that of `average`. If a
        has values that are not finite, the payload is empty and the new residual is zero.
        """
        chunks = portion_chunks(n, n, self.codec.chunk)
        given = [self.codec.decode(one, chunks) for one in payloads]
        left = sparsemean.flat(self.average(given, weights, chunks, self.denominator), chunks)
        if residual is not None:
            left += np.float32(self.beta) * residual
        try:
            sent = self.wide.select(left, chunks)
        except CodecError:
            left[:] = 0.0
            sent = self.wide.select(left, chunks)
        sent.scatter(left, -1.0)
        return self.wide.encode(sent), left

    def split(self, payload: Buffer, selected: Selected) -> Iterator[memoryview]:
        """Split the payload of the whole vector, with the content `selected`, into those of its portions."""
        view, at = memoryview(payload), 0
        for size in self.codec.sizes(selected):
            yield view[at : at + size]
            at += size


def square(selected: Selected) -> float:
    """Return the squared L2 norm of the decoded values."""
    return float(sum(sparsemean.norm(selected, part) ** 2 for part in selected.parts))
