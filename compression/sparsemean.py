"""The mean of sparse contributions, the same bits on every peer that has the same contributions in the same order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from thinwire.compression import kernels
from thinwire.compression import sparsereference as reference
from thinwire.compression.chunks import Chunks
from thinwire.compression.codec import Floats
from thinwire.compression.sparse import DENSE, EMPTY, Part, Selected

DENOMINATORS = ("contributor_mean", "mean")
CLIP_FROM = 3
"""Contributors from which on norms are clipped to their median: of fewer the median says nothing."""


def mean(
    selected: Sequence[Selected],
    weights: Sequence[float],
    chunks: Chunks,
    denominator: str = "contributor_mean",
    clip: bool = True,
    threads: int = 1,
) -> Floats:
    """The weighted mean as the model's flat vector; selected and weights by contributor, in the order of the round's record.

    "contributor_mean": each coordinate by the weights of those who sent it, zero where nobody did, what every public
    implementation does. "mean": by all weights. clip: with three contributors or more each section of a contributor is scaled
    by min(1, lower median of the norms / its norm). Sums are in float64 in the given order, and rounded once.
    Raises ValueError for another layout, an unknown denominator, or weights that are not finite, ≥ 0 and not all zero.
    """
    if denominator not in DENOMINATORS:
        raise ValueError(f"a sparse mean is a {' or '.join(DENOMINATORS)}, not {denominator!r}")
    if any(one.chunks != chunks for one in selected):
        raise ValueError("contributions of another layout")
    total = math.fsum(weights)
    if len(weights) != len(selected) or not 0 < total < math.inf or not all(0 <= w < math.inf for w in weights):
        raise ValueError(f"{len(selected)} contributions need as many weights, finite, none negative, not all zero")
    out = np.zeros(chunks.total, np.float32)
    for i, section in enumerate(chunks.sections):
        parts = [one.parts[i] for one in selected]
        factors = clipping([norm(one, part) for one, part in zip(selected, parts, strict=True)]) if clip else ()
        sums, counts = np.zeros(section.size), np.zeros(section.size)
        for r, (one, part) in enumerate(zip(selected, parts, strict=True)):
            if part.mode == EMPTY:
                continue
            where = slice(None) if part.mode == DENSE else reference.positions(section, part.indices, one.codec.k)
            share = np.float64(weights[r]) * np.float64(factors[r] if factors else 1.0)
            sums[where] += share * one.values(part).astype(np.float64)
            counts[where] += np.float64(weights[r])
        below = np.where(counts > 0, counts, 1.0) if denominator == "contributor_mean" else np.float64(total)
        section.put((sums / below).astype(np.float32), out)
    return out


def norm(selected: Selected, part: Part) -> float:
    """‖v̂‖ of one section, in float64."""
    if part.mode == DENSE:
        return math.sqrt(kernels.fp32_check(selected.values(part).view(np.uint32))[1])
    if part.mode == EMPTY:
        return 0.0
    high = part.codes.size if selected.codec.width == 1 else int(np.count_nonzero(part.codes & 1))
    return math.sqrt(part.lo * part.lo * (part.codes.size - high) + part.hi * part.hi * high)


def clipping(norms: Sequence[float]) -> Sequence[float]:
    """By what each contributor's section is multiplied; nothing at all when there are too few."""
    if len(norms) < CLIP_FROM:
        return ()
    median = sorted(norms)[(len(norms) - 1) // 2]
    return [min(1.0, median / (each + 1e-8)) for each in norms]
