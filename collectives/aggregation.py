"""Aggregation of contributions: screening, then a rule.

Pure functions; the caller determines the order of peers. Screening rejects the peer, never the round: a single NaN
would turn every mean into NaN. The limit on norms catches absurd values (a diverged or broken peer); it is no defence
against a careful liar.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from thinwire.compression.core.codec import Codec
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.kernels.base import fp32_check
from thinwire.swarm.choices import Aggregation
from thinwire.swarm.messages.registry import PeerId

NORM_LIMIT = 1e3
"""A contribution is rejected if its norm is more than this many times the usual norm."""

MEMORY = 0.9
"""Weight of the past in the running median norm, per round; the memory is some twenty rounds."""

GROWTH = 10.0
"""Factor by which the usual norm grows when a round rejects all contributions."""

ROUNDING = 1e-6
"""Residue by rounding of unit vectors that cancel out, in units of their weight."""

Rule: TypeAlias = Callable[[Codec, Sequence[Buffer], Sequence[float], Floats], None]
"""Function (codec, screened payloads, weights, out) that writes the aggregate to out."""


def lower_median(values: Iterable[float]) -> float:
    """Return the middle value, or the lower of two: always one of the values.

    Raises ValueError if there are none.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("the median of nothing")
    return ordered[(len(ordered) - 1) // 2]


def outliers(
    norms: Mapping[PeerId, float], usual: float = 0.0, middle: Callable[[Iterable[float]], float] = lower_median
) -> tuple[tuple[PeerId, ...], float]:
    """Return the peers whose norm is above NORM_LIMIT times the usual one, and the new usual norm.

    The peers are in peer-id order. usual: usual norm from the last call; if it is 0, as at first, this round's lower
    median is used. If all norms are above the limit, the usual norm grows by GROWTH: a single explosion is rejected,
    but a lasting change is accepted after some rounds, instead of excluding all peers for ever. Zero norms are not part
    of the median. middle: function that determines the norm of this round that is remembered.
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
    """Write the token-weighted mean of the payloads with a positive weight, Σ (w / Σ w)·x, to out.

    Writes zeros if there is none. DiLoCo, arXiv 2311.08105.
    """
    counting = [(payload, weight) for payload, weight in zip(payloads, weights, strict=True) if weight > 0]
    if counting:
        codec.mean([payload for payload, _ in counting], [weight for _, weight in counting], out)
    else:
        out[:] = 0.0


def apart(codec: Codec, payloads: Sequence[Buffer], weights: Sequence[float], out: Floats) -> None:
    """Average direction and length separately (RDA), weighted by tokens.

    Result: (Σ w‖v‖ / Σ w) · unit(Σ w unit(v)). The result keeps the length of vectors with different directions, and no
    vector counts more because it is long. A vector is one chunk, since an owner has no more of it. Writes zeros if no
    payload has a weight, if the directions cancel out up to rounding, or if the length overflows.
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
    out[:] = direction  # rounded to float32; the length below is that of the rounded vector
    norm = math.sqrt(fp32_check(out.view(np.uint32))[1])
    if norm <= ROUNDING * total:
        out[:] = 0.0  # the rest is rounding noise without a direction
        return
    with np.errstate(over="ignore"):
        out *= np.float32(length / total / norm)
    if not np.isfinite(out).all():
        out[:] = 0.0


RULES: Mapping[Aggregation, Rule] = {"mean": mean, "rda": apart}
"""Maps a rule's name in a manifest to the rule."""
