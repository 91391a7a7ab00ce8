"""Rules that combine contributions with coefficients, computed from their Gram matrix.

With G = X Xᵀ (n × n, float64) every norm, distance and angle is known, and a rule is a function of G that returns the
coefficients c of the result Σ c·x: iterations cost n² each, whatever the size of the model. All sums are in float64 in
the order of the contributors, and ties go to the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from thinwire.collectives.aggregation.kernels import eigen, product
from thinwire.collectives.aggregation.screening import lower_median
from thinwire.compression.core.norm_clip import clipping

Matrix = NDArray[np.float64]

NEAR = 1e-6
"""Relative size of a step at which an iteration ends, and of the smoothing of the geometric median."""

FLAG_SMOOTHING = 1e-7
"""Constant of the weights of Flag: a contribution within the subspace has a finite weight."""

NEGLIGIBLE = 1e-12
"""Eigenvalues below this fraction of the largest one are rounding noise."""


def clipped(gram: Matrix, weights: Sequence[float]) -> list[float]:
    """Return the coefficients of the clipped mean, see means.clip."""
    total = math.fsum(weights)
    factors = clipping([math.sqrt(gram[i, i]) for i in range(len(weights))], weights)
    return [weight * factor / total for weight, factor in zip(weights, factors, strict=True)]


def centered(gram: Matrix, weights: Sequence[float], steps: int) -> list[float]:
    """Return the coefficients of centered clipping; the last row of the matrix is the start v.

    v ← v + Σ w·d·min(1, τ/‖d‖) / Σ w with d = x − v, at most `steps` times or until a step is below NEAR·τ. τ: lower
    median of ‖x − v‖ at the start. Karimireddy, He and Jaggi (arXiv 2012.10333). There v is the last aggregate and τ is
    given; here v is the coordinate-wise median, so that the result is a function of the contributions alone, and τ
    follows the scale of the gradients. Weighted by tokens.
    """
    n, total = len(weights), math.fsum(weights)
    at = [0.0] * n + [1.0]
    radius = lower_median(_distances(gram, at)[:n])
    if radius == 0.0:
        return at  # most contributions are equal to the start
    for _ in range(steps):
        away = _distances(gram, at)
        moves = [w / total * min(1.0, radius / max(d, radius * NEAR)) for w, d in zip(weights, away, strict=False)]
        whole = math.fsum(moves)
        change = [move - whole * a for move, a in zip([*moves, 0.0], at, strict=True)]
        at = [a + c for a, c in zip(at, change, strict=True)]
        if _square(gram, change) <= (NEAR * radius) ** 2:
            break
    return at


def geometric_median(gram: Matrix, weights: Sequence[float], steps: int) -> list[float]:
    """Return the coefficients of the geometric median: the least weighted sum of distances.

    Smoothed Weiszfeld iterations from the weighted mean: z ← Σ β·x / Σ β with β = w / max(ν, ‖x − z‖). RFA, Pillutla,
    Kakade and Harchaoui (arXiv 1912.13445). There ν is given; here it is NEAR times the lower median of the norms.
    Weighted by tokens.
    """
    total = math.fsum(weights)
    at = [weight / total for weight in weights]
    least = NEAR * lower_median(math.sqrt(gram[i, i]) for i in range(len(at)))
    if least == 0.0:
        return [0.0] * len(at)  # most contributions are zero
    for _ in range(steps):
        pulls = [w / max(least, d) for w, d in zip(weights, _distances(gram, at), strict=True)]
        whole = math.fsum(pulls)
        change = [pull / whole - a for pull, a in zip(pulls, at, strict=True)]
        at = [pull / whole for pull in pulls]
        if _square(gram, change) <= least * least:
            break
    return at


def krum(gram: Matrix, liars: int, best: int) -> list[float]:
    """Return equal coefficients for the `best` contributions with the least scores.

    Score: sum of the n − f − 2 smallest squared distances to others. Krum (best = 1) and Multi-Krum, Blanchard et al.
    (NeurIPS 2017). Weights do not apply: a score counts contributors.
    """
    chosen = set(_ranked(_squares(gram), list(range(len(gram))), liars)[:best])
    return [1.0 / best if i in chosen else 0.0 for i in range(len(gram))]


def bulyan(gram: Matrix, liars: int) -> list[float]:
    """Return 1 for the n − 2f contributions that Bulyan keeps, else 0.

    Repeated Krum: the contribution with the least score is taken out, then the rest is scored again. El Mhamdi, Guerraoui
    and Rouault (arXiv 1802.07927). Weights do not apply.
    """
    squares, left, chosen = _squares(gram), list(range(len(gram))), set()
    for _ in range(len(gram) - 2 * liars):
        first = _ranked(squares, left, liars)[0]
        left.remove(first)
        chosen.add(first)
    return [1.0 if i in chosen else 0.0 for i in range(len(gram))]


def flag(gram: Matrix, weights: Sequence[float], steps: int) -> list[float]:
    """Return the coefficients of the clipped mean, projected to the flag median of the directions.

    The subspace of dimension ⌈(n + 1)/2⌉ is found by iteratively reweighted eigendecompositions: the weight of a direction
    is 1/√distance to the subspace. Malaviya et al. (arXiv 2302.05865). The public code averages projected unit vectors,
    which loses the scale; here the clipped mean is projected. The subspace is unweighted, the clipped mean is weighted.
    """
    n = len(gram)
    lengths = [math.sqrt(gram[i, i]) for i in range(n)]
    unit = np.array([1.0 / length if length else 0.0 for length in lengths])
    angles = gram * unit[:, None] * unit[None, :]
    basis, trust = np.zeros((n, 0)), np.ones(n)
    for _ in range(steps):
        values, vectors = eigen(angles * trust[:, None] * trust[None, :])
        rank = sum(value > NEGLIGIBLE * values[0] for value in values[: n // 2 + 1])
        basis = trust[:, None] * vectors[:, :rank] / np.sqrt(values[:rank])[None, :]
        inside = product(angles, basis)
        away = [max(0.0, 1.0 - math.fsum(x * x for x in row)) for row in inside.tolist()]
        # Square roots are exact to the last bit everywhere; a power of −1/4 is not.
        trust = np.array([1.0 / math.sqrt(math.sqrt(one + FLAG_SMOOTHING)) for one in away])
        trust = trust / math.fsum(trust.tolist())
    pulled = product(gram, np.array(clipped(gram, weights))[:, None]) * unit[:, None]
    projected = product(basis, product(np.ascontiguousarray(basis.T), pulled))
    found: list[float] = (projected[:, 0] * unit).tolist()
    return found


def _square(gram: Matrix, coefficients: Sequence[float]) -> float:
    """Return ‖Σ c·x‖²."""
    row = np.array([coefficients])
    return max(0.0, float(product(product(row, gram), np.ascontiguousarray(row.T))[0, 0]))


def _distances(gram: Matrix, at: Sequence[float]) -> list[float]:
    """Return ‖x − Σ c·x‖ for each row x."""
    square, products = _square(gram, at), product(gram, np.array(at)[:, None])[:, 0]
    return [math.sqrt(max(0.0, gram[i, i] - 2.0 * products[i] + square)) for i in range(len(gram))]


def _squares(gram: Matrix) -> Matrix:
    """Return the squared distances between all rows."""
    norms = np.diag(gram)
    return np.maximum(0.0, norms[:, None] + norms[None, :] - 2.0 * gram)


def _ranked(squares: Matrix, rows: Sequence[int], liars: int) -> list[int]:
    """Return `rows` in ascending order of their scores among themselves."""
    nearest = max(1, len(rows) - liars - 2)
    scores = {i: math.fsum(sorted(float(squares[i, j]) for j in rows if j != i)[:nearest]) for i in rows}
    return sorted(rows, key=lambda i: (scores[i], i))
