"""A sparse codec on runs of a flat vector, each run a payload of its own: so that what several have sent of a run can be added
up without the rest of the vector, and what is kept of the sum can be sent in its turn.

A run is a multiple of the codec's chunk long, the last one may be shorter. Chunks are side² elements that stand next to each
other, and not blocks of matrices as in `chunks`. The payload of the whole vector is those of its runs, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from thinwire.compression import sparsemean
from thinwire.compression.chunks import Chunks
from thinwire.compression.codec import Buffer, CodecError, Floats
from thinwire.compression.sparse import Selected, Sparse


@lru_cache(maxsize=64)
def layout(total: int, run: int, chunk: int) -> Chunks:
    """The chunks of a vector of `total` elements, a section for each run of `run` of them."""
    side, shapes = round(chunk**0.5), []
    for number, start in enumerate(range(0, total, run)):
        size = min(run, total - start)
        # Whole rows are a matrix; what ends within one is the only vector, and so the last section, as it is the last run.
        shapes.append((f"{number:06d}", (size // side, side) if size % side == 0 else (size,)))
    return Chunks(tuple(shapes), chunk)


@dataclass(frozen=True, slots=True)
class Portions:
    """`codec` for what is sent to who adds it up, `wide` for what that one sends of the sum. `beta`: what part of what was not
    sent of the sum lives on; `denominator`: of the mean, see sparsemean.
    """

    codec: Sparse
    wide: Sparse
    beta: float = 1.0
    denominator: str = "contributor_mean"

    @property
    def spec(self) -> str:
        """Both."""
        return f"{self.codec.spec} {self.wide.spec}"

    def nbytes(self, n: int) -> int:
        """Bytes of the largest payload of a run of n elements, of a contribution or of a sum."""
        return max(one.bound(layout(n, n, one.chunk)) for one in (self.codec, self.wide))

    def check(self, payload: Buffer, n: int) -> float:
        """The squared L2 norm of a contribution to a run of n elements. Raises CodecError for what is none."""
        return _square(self.codec.decode(payload, layout(n, n, self.codec.chunk)))

    def check_sum(self, payload: Buffer, n: int) -> float:
        """The same for what is sent of a sum."""
        return _square(self.wide.decode(payload, layout(n, n, self.wide.chunk)))

    def thin(
        self, payloads: Sequence[Buffer], weights: Sequence[float], kept: Floats | None, n: int
    ) -> tuple[bytes, Floats]:
        """What is sent of the mean of checked contributions (see sparsemean.mean) to a run of n elements, and what is not.

            a = β kept + mean;  sent = the largest of a, quantised;  left = a − sent

        `kept`: what was left of this run before, None for nothing. Where a is beyond what a payload can say nothing is sent,
        and nothing is left.
        """
        chunks = layout(n, n, self.codec.chunk)
        left = sparsemean.mean([self.codec.decode(one, chunks) for one in payloads], weights, chunks, self.denominator)
        if kept is not None:
            left += np.float32(self.beta) * kept
        try:
            sent = self.wide.select(left, chunks)
        except CodecError:
            left[:] = 0.0
            sent = self.wide.select(left, chunks)
        sent.scatter(left, -1.0)
        return self.wide.encode(sent), left

    def split(self, payload: Buffer, selected: Selected) -> Iterator[memoryview]:
        """The payloads of the runs, from that of all of them, which says `selected`."""
        view, at = memoryview(payload), 0
        for size in self.codec.sizes(selected):
            yield view[at : at + size]
            at += size


def _square(selected: Selected) -> float:
    return float(sum(sparsemean.norm(selected, part) ** 2 for part in selected.parts))
