"""Bounds of the norm of a result by the norms of the contributions, for each rule.

Contributors announce the norm of each chunk before they send it, and the owner of a chunk compares. So every peer can refuse
a result whose norm is impossible, without the contributions. The bounds hold for any contributions. Those of
`mean`, `rda` and `geometric-median` grow with the longest contribution. The others are some honest norms while at most
`max_liars` contributions (`clip`, `flag`: fewer than half) have arbitrary norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from thinwire.compression.core.norm_clip import limits
from thinwire.swarm.aggregation_spec import AggregationSpec

ROUNDING = 1e-5
"""Relative error of float32 norms and of the sums of a rule."""

NormBound: TypeAlias = Callable[[Sequence[float], Sequence[float]], float]
"""Function (norms, weights) that returns the largest norm of an aggregate before it is encoded."""


def norm_bound(spec: AggregationSpec) -> NormBound:
    """Return the bound of a rule."""

    def bound(norms: Sequence[float], weights: Sequence[float]) -> float:
        given = [(norm, weight) for norm, weight in zip(norms, weights, strict=True) if weight > 0]
        if not given:
            return 0.0
        return _bound(spec, [norm for norm, _ in given], [weight for _, weight in given]) * (1.0 + ROUNDING)

    return bound


def _bound(spec: AggregationSpec, norms: Sequence[float], weights: Sequence[float]) -> float:
    rule, liars = spec.rule, spec.max_liars
    if rule in ("mean", "rda"):
        return _mean(norms, weights)
    if rule in ("clip", "flag"):  # Flag projects the clipped mean.
        return _mean([min(pair) for pair in zip(norms, limits(norms, weights), strict=True)], weights)
    if rule == "geometric-median":
        return max(norms)  # a convex combination
    if rule in ("krum", "multi-krum"):
        return _krum(norms, liars)
    if rule == "centered-clip":
        return _centered(norms, weights, liars)
    if rule == "bulyan":
        # A kept value is not farther from the median m than some honest value h, so it is at most 2·|m| + |h|.
        return 3.0 * _by_coordinates(norms, liars)
    return _by_coordinates(norms, liars)


def _mean(norms: Sequence[float], weights: Sequence[float]) -> float:
    return math.fsum(norm * weight for norm, weight in zip(norms, weights, strict=True)) / math.fsum(weights)


def _by_coordinates(norms: Sequence[float], liars: int) -> float:
    """Return the bound of the median and the trimmed mean.

    At least f + 1 contributors have a coordinate as far from 0 as that of the result, so one of any n − f has it.
    """
    return math.sqrt(math.fsum(norm * norm for norm in sorted(norms)[: len(norms) - liars]))


def _krum(norms: Sequence[float], liars: int) -> float:
    """Return the bound of Krum and Multi-Krum.

    N: largest norm without the f longest. The score of one of those is at most (n − f − 2)·(2N)², so a chosen contribution is
    within 2N·√(n − f − 2) of one of them, as n − f − 2 > f.
    """
    longest = sorted(norms)[len(norms) - liars - 1]
    return longest * (1.0 + 2.0 * math.sqrt(max(0, len(norms) - liars - 2)))


def _centered(norms: Sequence[float], weights: Sequence[float], liars: int) -> float:
    """Return the bound of centered clipping for any number of steps.

    N: largest norm without the f longest, λ: weight of these f, M: bound of the start, ρ ≤ M + N: radius. A step changes the
    norm t of v to at most t − (1 − λ)·min(1, ρ / (t + N))·(t − N) + λρ, which is no growth from
    t = N + max(λρ / (1 − λ), 2λN / (1 − 2λ)) on.
    """
    order = sorted(range(len(norms)), key=lambda at: norms[at])
    near, far = order[: len(order) - liars], order[len(order) - liars :]
    share = math.fsum(weights[at] for at in far) / math.fsum(weights)
    if share >= 0.5:
        return math.inf
    longest, start = norms[near[-1]], _by_coordinates(norms, (len(norms) - 1) // 2)
    radius = start + longest
    still = longest + max(share * radius / (1.0 - share), 2.0 * share * longest / (1.0 - 2.0 * share))
    return max(start, still) + share * radius
