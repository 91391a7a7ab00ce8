"""Robust rules on decoded contributions, dense or sparse, in pieces of bounded size.

A rule has two passes: the first adds up the Gram matrix of all pieces, and the rule computes coefficients from it; the
second computes the result of each piece. Rules of single coordinates have only the second pass.

A vector is what the caller has: a chunk of a butterfly at its owner, a section of a sparse payload. So norms, distances
and choices are those of this part, not of the whole contribution as in the papers: an owner sees its own chunks only, and
cannot check the announced norms of other chunks. The bounds hold for each part, and so for the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
from thinwire.collectives.aggregation import coordinate_rules, gram_rules
from thinwire.collectives.aggregation.coordinate_rules import Rows
from thinwire.collectives.aggregation.kernels import add_gram
from thinwire.collectives.aggregation.screening import NotEnoughPeers
from thinwire.compression.core.types import Floats
from thinwire.swarm.aggregation_spec import AggregationSpec

Pieces: TypeAlias = Callable[[], Iterable[tuple[int, Rows]]]
"""Function that yields pieces of the contributions: first element, rows (n, elements).

It is called once per pass.
"""


def aggregate(spec: AggregationSpec, pieces: Pieces, weights: Sequence[float], out: Floats) -> None:
    """Write the aggregate of the rows that `pieces` yields to out.

    weights: > 0, in tokens; docs/design/aggregation.md states which rules use them. Raises NotEnoughPeers for fewer rows
    than the rule needs.
    """
    if len(weights) < spec.needs:
        raise NotEnoughPeers(f"{spec.rule} with up to {spec.max_liars} liars needs {spec.needs} contributors")
    anchored = spec.rule == "centered-clip"
    if spec.rule == "median":
        for start, rows in pieces():
            out[start : start + rows.shape[1]] = coordinate_rules.median(rows)
    elif spec.rule == "trimmed-mean":
        for start, rows in pieces():
            out[start : start + rows.shape[1]] = coordinate_rules.trimmed_mean(rows, spec.max_liars)
    else:
        gram = np.zeros((len(weights) + anchored,) * 2)
        for _, rows in pieces():
            add_gram(_with_anchor(rows) if anchored else rows, gram)
        found = _coefficients(spec, gram, weights)
        for start, rows in pieces():
            part = out[start : start + rows.shape[1]]
            if spec.rule == "bulyan":
                part[:] = coordinate_rules.around_median(rows[np.array(found) > 0.0], spec.max_liars)
            else:
                part[:] = coordinate_rules.combination(_with_anchor(rows) if anchored else rows, found)


def _with_anchor(rows: Rows) -> Rows:
    """Return the rows and the start of centered clipping as the last one."""
    return np.concatenate([rows, coordinate_rules.median(rows)[None]])


def _coefficients(spec: AggregationSpec, gram: gram_rules.Matrix, weights: Sequence[float]) -> list[float]:
    liars = spec.max_liars
    if spec.rule == "centered-clip":
        return gram_rules.centered(gram, weights, spec.max_iterations)
    if spec.rule == "geometric-median":
        return gram_rules.geometric_median(gram, weights, spec.max_iterations)
    if spec.rule == "flag":
        return gram_rules.flag(gram, weights, spec.max_iterations)
    if spec.rule == "bulyan":
        return gram_rules.bulyan(gram, liars)
    if spec.rule in ("krum", "multi-krum"):
        return gram_rules.krum(gram, liars, 1 if spec.rule == "krum" else len(weights) - liars - 2)
    raise ValueError(f"{spec.rule!r} is not a robust rule")
