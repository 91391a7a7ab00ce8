"""From many contributions to one: screening first, then a rule. Pure functions; the order of peers is the caller's.

Screening rejects the peer, never the round: one NaN that got through would turn every mean into NaN. The limit on norms is a
net for the absurd (a diverged or broken peer), not a defence against a careful liar.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from thinwire.compression.codec import Buffer, Codec, Floats
from thinwire.compression.kernels import fp32_check
from thinwire.swarm.protocol import PeerId

NORM_LIMIT = 1e3
"""A contribution longer than this many times the usual norm is out."""

MEMORY = 0.9
"""Weight of the past in the running median norm, per round: old enough rounds are forgotten after some twenty."""

GROWTH = 10.0
"""What the usual norm is multiplied by when a round left out everybody."""

ROUNDING = 1e-6
"""Of unit vectors that cancel out, what is left by rounding, in units of their weight."""

Rule: TypeAlias = Callable[[Codec, Sequence[Buffer], Sequence[float], Floats], None]
"""(codec, screened payloads, weights, out): writes the aggregate of n = out.size elements to out."""


def lower_median(values: Iterable[float]) -> float:
    """The middle value, of two the lower one: always one of the values. Raises ValueError when there are none."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("the median of nothing")
    return ordered[(len(ordered) - 1) // 2]


def outliers(
    norms: Mapping[PeerId, float], usual: float = 0.0, middle: Callable[[Iterable[float]], float] = lower_median
) -> tuple[tuple[PeerId, ...], float]:
    """Peers whose norm is beyond NORM_LIMIT times the usual one, in peer-id order, and the usual norm after this round.

    `usual` is what the last call returned; 0 at first, then this round's own lower median stands in. When all are beyond the
    limit it grows by GROWTH: one explosion is left out, but a change that lasts is let in after some tries, instead of locking
    everybody out for ever. Zeros say nothing about the usual norm and are left out of the median. `middle` says which of this
    round's norms is remembered.
    """
    lengths = [norm for norm in norms.values() if norm > 0.0]
    if not lengths:
        return (), usual
    limit = NORM_LIMIT * (usual or lower_median(lengths))
    far = tuple(sorted(peer for peer, norm in norms.items() if norm > limit))
    near = [norm for norm in lengths if norm <= limit]
    if not near:
        return far, GROWTH * usual
    median = middle(near)
    return far, MEMORY * usual + (1.0 - MEMORY) * median if usual else median


def mean(codec: Codec, payloads: Sequence[Buffer], weights: Sequence[float], out: Floats) -> None:
    """Mean weighted by tokens, Σ (w / Σ w)·x, of those with a weight; zeros when nobody has one. DiLoCo, arXiv 2311.08105."""
    counting = [(payload, weight) for payload, weight in zip(payloads, weights, strict=True) if weight > 0]
    if counting:
        codec.mean([payload for payload, _ in counting], [weight for _, weight in counting], out)
    else:
        out[:] = 0.0


def apart(codec: Codec, payloads: Sequence[Buffer], weights: Sequence[float], out: Floats) -> None:
    """Direction and length averaged apart (RDA): (Σ w‖v‖ / Σ w) · unit(Σ w unit(v)), weighted by tokens; of vectors that point
    different ways the result keeps the length, and none counts more because it is long. A vector is one chunk: an owner has
    no more of it. Zeros when nobody has a weight, when directions cancel out, as far as rounding tells, or where the length is
    beyond all numbers.
    """
    vector, total, length = np.empty(out.size, np.float32), 0.0, 0.0
    direction = np.zeros(out.size, np.float64)
    for payload, weight in zip(payloads, weights, strict=True):
        if weight > 0:
            codec.decode(payload, vector)
            norm = math.sqrt(fp32_check(vector.view(np.uint32))[1])
            total, length = total + weight, length + weight * norm
            if norm:
                direction += np.float64(weight / norm) * vector
    out[:] = direction  # as far as float32 has it; of that the length is taken
    norm = math.sqrt(fp32_check(out.view(np.uint32))[1])
    if norm <= ROUNDING * total:
        out[:] = 0.0  # what is left is rounding, and points nowhere
        return
    with np.errstate(over="ignore"):
        out *= np.float32(length / total / norm)
    if not np.isfinite(out).all():
        out[:] = 0.0


RULES: dict[str, Rule] = {"mean": mean, "rda": apart}
"""Name in a manifest -> rule."""
