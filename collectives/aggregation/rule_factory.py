"""Aggregation rules that a manifest chooses: for encoded dense chunks, and for sparse payloads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from thinwire.collectives.aggregation.coordinate_rules import Rows
from thinwire.collectives.aggregation.means import Rule, clip, directions_and_lengths, mean, with_weight
from thinwire.collectives.aggregation.robust import aggregate
from thinwire.compression.core.codec import Codec
from thinwire.compression.core.parameter_chunks import Chunks, Section
from thinwire.compression.core.types import Buffer, Denominator, Floats
from thinwire.compression.kernels.scatter import decode_strip
from thinwire.compression.sparse import mean as sparsemean
from thinwire.compression.sparse.header import DENSE, EMPTY
from thinwire.compression.sparse.mean import Average, Pieces
from thinwire.compression.sparse.topk import Part, Selected
from thinwire.swarm.aggregation_spec import AggregationSpec
from thinwire.swarm.choices import Aggregation

PIECE = 1 << 18
"""Elements of a sparse payload that are decoded at a time; one row of blocks, if it has more."""

RULES: Mapping[Aggregation, Rule] = {"mean": mean, "clip": clip, "rda": directions_and_lengths}
"""Rules without parameters for encoded dense payloads, by their names in a manifest."""


def dense_rule(spec: AggregationSpec) -> Rule:
    """Return the rule for the encoded contributions to a chunk."""
    return RULES[spec.rule] if spec.rule in RULES else partial(_decoded, spec)


def sparse_rule(spec: AggregationSpec) -> Average:
    """Return the rule for sparse contributions. Raises ValueError for "rda", which has none."""
    if spec.rule in ("mean", "clip"):
        return partial(sparsemean.means, clip=spec.rule == "clip")
    if spec.rule == "rda":
        raise ValueError("there is no mean of directions and lengths for sparse payloads")
    return partial(_densified, spec)


def _decoded(
    spec: AggregationSpec, codec: Codec, payloads: Sequence[Buffer], weights: Sequence[float], out: Floats
) -> None:
    payloads, weights = with_weight(payloads, weights)
    rows = np.empty((len(payloads), out.size), np.float32)
    for payload, row in zip(payloads, rows, strict=True):
        codec.decode(payload, row)
    aggregate(spec, lambda: [(0, rows)], weights, out)


def _densified(
    spec: AggregationSpec,
    selected: Sequence[Selected],
    weights: Sequence[float],
    chunks: Chunks,
    denominator: Denominator = "bounded_contributor_mean",
) -> Pieces:
    """Yield the result of a robust rule for each section.

    A coordinate that a contributor did not send is zero. So a coordinate that most contributors did not send is zero in a
    median. The denominator does not apply: the divisor is the number of contributors, whichever of them sent a coordinate.
    Raises the errors of sparsemean.mean.
    """
    sparsemean.checked(selected, weights, chunks, denominator)
    given = [(one, weight) for one, weight in zip(selected, weights, strict=True) if weight > 0]
    for index, section in enumerate(chunks.sections):
        parts = [(one, one.parts[index]) for one, _ in given]
        elements = np.zeros(section.size, np.float32)
        if any(part.mode != EMPTY for _, part in parts):
            aggregate(spec, partial(_strips, section, parts), [weight for _, weight in given], elements)
        yield section, elements


def _strips(section: Section, parts: Sequence[tuple[Selected, Part]]) -> Iterator[tuple[int, Rows]]:
    """Yield the decoded rows of blocks of a section, as many at a time as PIECE allows."""
    high = section.side * section.cols
    step = max(1, PIECE // high)
    for first in range(0, section.down, step):
        start, stop = first * high, min(section.size, (first + step) * high)
        rows = np.zeros((len(parts), stop - start), np.float32)
        for (one, part), row in zip(parts, rows, strict=True):
            if part.mode == DENSE:
                row[:] = one.values(part)[start:stop]
            elif part.mode != EMPTY:
                levels, geometry = one.codec.levels(part.lo, part.hi), section.geometry(one.codec.k)
                last = min(section.down, first + step)
                decode_strip(part.indices, part.codes, levels, geometry, first, last, row)
        yield start, rows
