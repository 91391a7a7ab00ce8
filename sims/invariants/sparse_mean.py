"""Reference for the mean of sparse contributions to a gossip group.

It uses dense vectors, not the product's kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.sparse.flat import PORTION, FlatSparse
from thinwire.compression.sparse.portions import portion_chunks
from thinwire.compression.sparse.topk import Selected

ONE = np.float16(1.0).view(np.uint16)
"""The bits of 1.0."""

Marks = NDArray[np.bool_]
"""True where a contribution has a value, which may be zero."""


def marks(codec: FlatSparse, payload: Buffer, size: int) -> Marks:
    """Return which of `size` elements a payload has values of."""
    chunks = portion_chunks(size, PORTION, codec.codec.chunk)
    selected = codec.codec.decode(payload, chunks)
    ones = [replace(part, lo=1.0, hi=1.0, halves=np.full_like(part.halves, ONE)) for part in selected.parts]
    out = np.zeros(size, np.float32)
    Selected(codec.codec, chunks, tuple(ones)).scatter(out)
    marked: Marks = out != 0
    return marked


def sparse_mean(vectors: Sequence[Floats], sent: Sequence[Marks]) -> Floats:
    """Return the mean of the contributions to a chunk, where `sent` marks the values of each.

    A coordinate is divided by the number of members that sent it, but at least by the usual one: of each member, the
    mean of this number over the values that it sent; of all members the lower median. A member that sent nothing in a portion
    agrees with all. If at least three members have values in a portion, none is longer there than the lower median of them.
    """
    out = np.zeros_like(vectors[0])
    for start in range(0, out.size, PORTION):
        here = slice(start, start + PORTION)
        counts = np.sum([one[here] for one in sent], axis=0)
        shared = sorted(counts[one[here]].mean() if one[here].any() else len(sent) for one in sent)
        norms = np.array([np.linalg.norm(one[here].astype(np.float64)) for one in vectors])
        lengths = sorted(norms[norms > 0])
        longest = lengths[(len(lengths) - 1) // 2] if len(lengths) >= 3 else np.inf
        factors = [longest / norm if norm > longest else 1.0 for norm in norms]
        total = np.sum(
            [one[here] * factor for one, factor in zip(vectors, factors, strict=True)], axis=0, dtype=np.float64
        )
        out[here] = total / np.maximum(counts, shared[(len(sent) - 1) // 2])
    return out
