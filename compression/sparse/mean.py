"""Mean of sparse contributions, bit-equal on all peers that average the same contributions in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, get_args

import numpy as np
from thinwire.compression.core.norm_clip import clipping
from thinwire.compression.core.parameter_chunks import Chunks, Section
from thinwire.compression.core.types import Denominator, Floats
from thinwire.compression.kernels import common as kernels
from thinwire.compression.kernels import scatter as scatterkernels
from thinwire.compression.kernels.threads import Team
from thinwire.compression.sparse.header import DENSE, EMPTY
from thinwire.compression.sparse.select import CHUNKS
from thinwire.compression.sparse.topk import BIG, Part, Selected

DENOMINATORS: tuple[Denominator, ...] = get_args(Denominator)

ALONE = Team(1)

Pieces: TypeAlias = Iterator[tuple[Section, Floats]]
"""All strips or sections of a layout, in order, with values of their flat elements.

These are valid until the next strip.
"""

Average: TypeAlias = Callable[[Sequence[Selected], Sequence[float], Chunks, Denominator], Pieces]
"""Function (contributions, weights, layout, denominator) that yields their aggregate, such as `means`."""


def flat(pieces: Pieces, chunks: Chunks) -> Floats:
    """Return pieces as the model's flat vector."""
    out = np.empty(chunks.total, np.float32)
    for section, values in pieces:
        section.put(values, out)
    return out


def means(
    selected: Sequence[Selected],
    weights: Sequence[float],
    chunks: Chunks,
    denominator: Denominator = "bounded_contributor_mean",
    clip: bool = True,
) -> Pieces:
    """Yield the weighted mean strip by strip. See `mean`, whose values and errors these are."""
    total, peers = checked(selected, weights, chunks, denominator), sum(weight > 0 for weight in weights)
    strips = [section.strips() for section in chunks.sections]
    room = np.empty(max((strip.size for each in strips for strip in each), default=0), np.float32)
    for index, section in enumerate(chunks.sections):
        given = sent(selected, index, weights, clip)
        least = _least(section, given, denominator, total, peers, ALONE) if given else 0.0
        entry = element = 0
        for strip in strips[index]:
            values = room[: strip.size]
            values.fill(0.0)
            if given:
                stops = entry + strip.kept(given[0][0].codec.k), element + strip.size
                here = slice(entry, stops[0]), slice(element, stops[1])
                parts = [(one, part.within(*here), weight, share) for one, part, weight, share in given]
                _fill(strip, parts, least, values, ALONE)
                entry, element = stops
            yield strip, values


def mean(
    selected: Sequence[Selected],
    weights: Sequence[float],
    chunks: Chunks,
    denominator: Denominator = "bounded_contributor_mean",
    clip: bool = True,
    threads: int = 1,
    out: Floats | None = None,
) -> Floats:
    """Return the weighted mean as the model's flat vector.

    selected, weights: by contributor, in the order of the round's record. denominator: "contributor_mean" divides each
    coordinate by the weights of the contributors that sent it (zero where none did), as all public implementations do;
    "mean" divides by the sum of all weights; "bounded_contributor_mean" divides as "contributor_mean" does, but by at
    least `usual_share` of the sum of all weights. clip: if at least three contributors of positive weight have values in
    a section, each contributor's section is scaled by min(1, lower median of the norms / its norm). Sums are in float64
    in the given order, and rounded once. out: vector to write to; by default a new one. Raises ValueError for another
    layout, an unknown denominator, or weights that are not finite, ≥ 0 and not all zero.
    """
    total = checked(selected, weights, chunks, denominator)
    if out is None:
        out = np.zeros(chunks.total, np.float32)
    else:
        chunks.check(out)
        out.fill(0.0)
    with Team(threads) as team:
        how = (denominator, total, sum(weight > 0 for weight in weights))
        jobs = [(s, sent(selected, i, weights, clip), *how, out) for i, s in enumerate(chunks.sections)]
        team.spread(_average, jobs, chunks.sizes, BIG)
    return out


def checked(selected: Sequence[Selected], weights: Sequence[float], chunks: Chunks, denominator: Denominator) -> float:
    """Return the sum of the weights. Raises ValueError as described in `mean`."""
    if denominator not in DENOMINATORS:
        raise ValueError(f"a sparse mean is a {' or '.join(DENOMINATORS)}, not {denominator!r}")
    if any(one.chunks != chunks or one.codec != selected[0].codec for one in selected):
        raise ValueError("contributions of another layout or codec")
    total = math.fsum(weights)
    if len(weights) != len(selected) or not 0 < total < math.inf or not all(0 <= w < math.inf for w in weights):
        raise ValueError(f"{len(selected)} contributions need as many weights, finite, none negative, not all zero")
    return total


def sent(
    selected: Sequence[Selected], index: int, weights: Sequence[float], clip: bool
) -> list[tuple[Selected, Part, float, float]]:
    """Return the non-empty parts of a section whose contributors have positive weights.

    Each with its selection, its weight, and its weight after clipping. A contributor of weight 0 has no influence at
    all: its norm does not enter the median either.
    """
    parts = [(one, one.parts[index], weight) for one, weight in zip(selected, weights, strict=True) if weight > 0]
    factors = (
        clipping([norm(one, part) for one, part, _ in parts], [w for _, _, w in parts]) if clip else [1.0] * len(parts)
    )
    return [
        (one, part, weight, weight * factor)
        for (one, part, weight), factor in zip(parts, factors, strict=True)
        if part.mode != EMPTY
    ]


def usual_share(section: Section, k: int, parts: Sequence[Part], peers: int, team: Team = ALONE) -> float:
    """Return the part of the contributors that usually send a value of the section, > 0 and ≤ 1.

    Each value that a contributor sent was sent by some part of all contributors. The mean of these parts over its values is
    the number of this contributor, and the result is the lower median of these numbers, so that fewer than half of the
    contributors move it only within the range of the others. parts: the payload parts that are not empty. peers: number of
    all contributors; those with empty parts agree on zeros, so their number is 1.
    """
    entries = 1 if parts[0].mode == DENSE else parts[0].indices.size
    shared = np.full(peers, entries * peers, np.int64)
    shared[: len(parts)] = len(parts)
    if parts[0].mode != DENSE:
        indices = np.array([part.indices.ctypes.data for part in parts], np.uint64)
        geometry, cuts = section.geometry(k), team.ranges(section.count, CHUNKS)
        counts = np.zeros((len(cuts), len(parts)), np.int64)
        jobs = [(indices, geometry, a, b, row) for (a, b), row in zip(cuts, counts, strict=True)]
        team.each(scatterkernels.senders, jobs)
        shared[: len(parts)] = counts.sum(axis=0)
    return int(np.sort(shared)[(peers - 1) // 2]) / (entries * peers)


def _average(
    section: Section,
    given: list[tuple[Selected, Part, float, float]],
    denominator: Denominator,
    total: float,
    peers: int,
    out: Floats,
    team: Team,
) -> None:
    if not given:
        return
    elements = section.gather(out)
    _fill(section, given, _least(section, given, denominator, total, peers, team), elements, team)
    section.put(elements, out)


def _least(
    section: Section,
    given: list[tuple[Selected, Part, float, float]],
    denominator: Denominator,
    total: float,
    peers: int,
    team: Team,
) -> float:
    """Return the least divisor of a coordinate in this section."""
    if denominator == "bounded_contributor_mean":
        parts = [part for _, part, _, _ in given]
        return total * usual_share(section, given[0][0].codec.k, parts, peers, team)
    return total if denominator == "mean" else 0.0


def _fill(
    section: Section, given: list[tuple[Selected, Part, float, float]], least: float, elements: Floats, team: Team
) -> None:
    """Write the mean of a section or strip to its elements, which are zeros."""
    weights = np.array([weight for _, _, weight, _ in given], np.float64)
    if given[0][1].mode == DENSE:
        sums = np.zeros(section.size)
        for one, part, _, share in given:
            sums += share * one.values(part).astype(np.float64)
        below = max(least, sum(weights.tolist()))
        elements[:] = sums / below
    else:
        codec = given[0][0].codec
        levels = np.array([share * codec.levels(part.lo, part.hi).astype(np.float64) for _, part, _, share in given])
        indices, codes = (
            np.array([array.ctypes.data for array in arrays], np.uint64)
            for arrays in ([part.indices for _, part, _, _ in given], [part.codes for _, part, _, _ in given])
        )
        common = (indices, codes, levels, weights, least, section.geometry(codec.k))
        team.each(scatterkernels.mean, [(*common, a, b, elements) for a, b in team.ranges(section.count, CHUNKS)])


def norm(selected: Selected, part: Part) -> float:
    """Return ‖v̂‖ of one section, in float64."""
    if part.mode == DENSE:
        return math.sqrt(kernels.fp32_check(selected.values(part).view(np.uint32))[1])
    if part.mode == EMPTY:
        return 0.0
    high = part.codes.size if selected.codec.width == 1 else int(np.count_nonzero(part.codes & 1))
    return math.sqrt(part.lo * part.lo * (part.codes.size - high) + part.hi * part.hi * high)
