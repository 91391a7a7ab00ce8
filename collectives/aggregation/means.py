"""Rules that aggregate encoded payloads directly: mean, clipped mean, mean of directions and lengths.

They read each payload once or twice and need no memory for decoded contributions, or for one only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from thinwire.compression.core.codec import Codec
from thinwire.compression.core.norm_clip import clipping
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.kernels.common import fp32_check

ROUNDING = 1e-6
"""Residue by rounding of unit vectors that cancel out, in units of their weight."""

Rule: TypeAlias = Callable[[Codec, Sequence[Buffer], Sequence[float], Floats], None]
"""Function (codec, screened payloads, weights, out) that writes the aggregate to out."""


def with_weight(payloads: Sequence[Buffer], weights: Sequence[float]) -> tuple[list[Buffer], list[float]]:
    """Return the payloads with a positive weight, and these weights."""
    found = [(payload, weight) for payload, weight in zip(payloads, weights, strict=True) if weight > 0]
    return [payload for payload, _ in found], [weight for _, weight in found]


def mean(codec: Codec, payloads: Sequence[Buffer], weights: Sequence[float], out: Floats) -> None:
    """Write the token-weighted mean of the payloads with a positive weight, Σ (w / Σ w)·x, to out.

    Writes zeros if there is none. DiLoCo, arXiv 2311.08105.
    """
    payloads, weights = with_weight(payloads, weights)
    if payloads:
        codec.mean(payloads, weights, out)
    else:
        out[:] = 0.0


def clip(codec: Codec, payloads: Sequence[Buffer], weights: Sequence[float], out: Floats) -> None:
    """Write Σ w·c·x / Σ w with c = min(1, τ / ‖x‖) to out; τ is the lower median of the norms.

    For a contribution of more tokens than the median of the weights, τ is longer in proportion. One contribution moves
    the result by at most w·τ / Σ w in place of its honest part, and τ is at most the largest honest norm as long as
    fewer than half of the contributors lie and weights are equal. With fewer than three non-zero norms it is `mean`.
    The divisor does not depend on c: otherwise clipped contributors would lend the others their weight.
    """
    payloads, weights = with_weight(payloads, weights)
    norms = [math.sqrt(codec.check(payload, out.size)) for payload in payloads]
    factors = clipping(norms, weights)
    if any(factor < 1.0 for factor in factors):
        scaled = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
        codec.mean(payloads, scaled, out, total=math.fsum(weights))
    else:
        mean(codec, payloads, weights, out)


def directions_and_lengths(codec: Codec, payloads: Sequence[Buffer], weights: Sequence[float], out: Floats) -> None:
    """Average direction and length separately (RDA), weighted by tokens.

    Result: (Σ w‖v‖ / Σ w) · unit(Σ w unit(v)). The result is as long as the vectors even if their directions differ, and no
    vector counts more because it is long. A vector is one chunk, since an owner has no more of it. Writes zeros if no
    payload has a weight, if the directions cancel out up to rounding, or if the length overflows.
    """
    vector, total, length = np.empty(out.size, np.float32), 0.0, 0.0
    direction = np.zeros(out.size, np.float64)
    for payload, weight in zip(*with_weight(payloads, weights), strict=True):
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
