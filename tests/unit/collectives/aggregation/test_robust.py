"""Robust rules against references in plain Python and torch, and their identities and bounds."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.collectives.aggregation import coordinate_rules, gram_rules, robust
from thinwire.collectives.aggregation import rule_factory as rules_module
from thinwire.collectives.aggregation.kernels import add_gram, eigen, product
from thinwire.collectives.aggregation.rule_factory import RULES, dense_rule, sparse_rule
from thinwire.collectives.aggregation.screening import NotEnoughPeers
from thinwire.compression.core.parameter_chunks import Chunks
from thinwire.compression.dense.blockint import Int8
from thinwire.compression.dense.floats import Fp32
from thinwire.compression.sparse import mean as sparsemean
from thinwire.compression.sparse.demo import Demo
from thinwire.compression.sparse.demo import means as demo_means
from thinwire.compression.sparse.topk import Sparse
from thinwire.swarm.aggregation_spec import NEEDS, AggregationSpec

N = 200
ROBUST = tuple(NEEDS)
COMMON = np.random.default_rng(0).standard_normal(N)


def draw(count: int, seed: int, noise: float = 0.5, size: int = N) -> np.ndarray:
    """Rows around a common direction, in float32."""
    rng = np.random.default_rng(seed)
    common = COMMON if size == N else rng.standard_normal(size)
    return (common + noise * rng.standard_normal((count, size))).astype(np.float32)


def applied(rule: str, rows: np.ndarray, weights: list[float] | None = None, *, liars: int = 1, steps: int = 0):
    out = np.full(rows.shape[1], np.nan, np.float32)
    spec = AggregationSpec(rule, liars, steps)
    dense_rule(spec)(Fp32(), [row.tobytes() for row in rows], weights or [1.0] * len(rows), out)
    return out


def gram_of(rows: np.ndarray) -> np.ndarray:
    gram = np.zeros((len(rows), len(rows)))
    add_gram(rows, gram)
    return gram


# --- kernels


@pytest.mark.parametrize("size", [1, 63, 64, 200, 8192, 20_000])
def test_gram_matrix_equals_exact_sums(size):
    rows = draw(3, 1, size=size)
    gram = gram_of(rows)
    for i, j in itertools.product(range(3), repeat=2):
        exact = math.fsum(float(a) * float(b) for a, b in zip(rows[i], rows[j], strict=True))
        assert gram[i, j] == pytest.approx(exact, rel=1e-12, abs=1e-12 * size)
    assert np.array_equal(gram, gram.T)


@pytest.mark.parametrize("count", [1, 2, 7, 24])
def test_eigenvectors_diagonalise_the_matrix(count):
    rng = np.random.default_rng(count)
    low = rng.standard_normal((count, max(1, count - 2)))
    matrix = product(low, np.ascontiguousarray(low.T))
    values, vectors = eigen(matrix)
    np.testing.assert_allclose(vectors @ np.diag(values) @ vectors.T, matrix, atol=1e-12 * max(1.0, values[0]))
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(count), atol=1e-12)
    np.testing.assert_allclose(values, np.linalg.eigvalsh(matrix)[::-1], atol=1e-12 * max(1.0, values[0]))
    assert all(a >= b for a, b in itertools.pairwise(values.tolist()))


def test_eigenvectors_of_extreme_matrices_are_finite():
    for matrix in (np.zeros((3, 3)), np.diag([1.0, 1.0, 1.0]), np.array([[1e-300, 1e150], [1e150, 1e-300]])):
        values, vectors = eigen(matrix.astype(np.float64))
        assert np.isfinite(values).all() and np.isfinite(vectors).all()


# --- each rule against a reference


def test_median_and_trimmed_mean_equal_torch():
    for count, liars in ((5, 1), (6, 1), (9, 3), (8, 2)):
        rows = draw(count, count)
        ordered = torch.sort(torch.from_numpy(rows).double(), dim=0).values
        np.testing.assert_array_equal(
            applied("median", rows, liars=liars), torch.median(torch.from_numpy(rows), 0).values
        )
        trimmed = ordered[liars : count - liars].mean(0).numpy()
        np.testing.assert_allclose(applied("trimmed-mean", rows, liars=liars), trimmed, rtol=1e-6, atol=1e-7)


def krum_plainly(rows: np.ndarray, left: list[int], liars: int) -> list[int]:
    scores = []
    for i in left:
        others = sorted(float(np.sum((rows[i].astype(float) - rows[j]) ** 2)) for j in left if j != i)
        scores.append((sum(others[: max(1, len(left) - liars - 2)]), i))
    return [i for _, i in sorted(scores)]


@pytest.mark.parametrize(("count", "liars"), [(5, 1), (7, 2), (12, 3), (16, 6)])
def test_krum_chooses_the_row_with_the_least_score(count, liars):
    rows = draw(count, count)
    rows[:liars] = -8 * rows[:liars]
    order = krum_plainly(rows, list(range(count)), liars)
    found = applied("krum", rows, liars=liars)
    assert found.tobytes() == rows[order[0]].tobytes() and order[0] >= liars
    best = order[: count - liars - 2]
    multi = applied("multi-krum", rows, liars=liars)
    np.testing.assert_allclose(multi, rows[best].astype(float).mean(0), rtol=1e-6, atol=1e-7)


def test_krum_ties_go_to_the_lower_peer():
    rows = np.stack([COMMON, 2 * COMMON, COMMON, COMMON, COMMON]).astype(np.float32)
    assert gram_rules.krum(gram_of(rows), 1, 1) == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("count", "liars"), [(7, 1), (11, 2), (16, 3)])
def test_bulyan_equals_a_reference_of_single_values(count, liars):
    rows = draw(count, 3 * count)
    rows[-liars:] += 40
    left, chosen = list(range(count)), []
    for _ in range(count - 2 * liars):
        chosen.append(krum_plainly(rows, left, liars)[0])
        left.remove(chosen[-1])
    expected = []
    for column in rows[sorted(chosen)].T.astype(float).tolist():
        middle = sorted(column)[(len(column) - 1) // 2]
        near = sorted(column, key=lambda x: (abs(x - middle), x))[: len(column) - 2 * liars]
        expected.append(math.fsum(near) / len(near))
    np.testing.assert_allclose(applied("bulyan", rows, liars=liars), expected, rtol=1e-6, atol=1e-7)


def test_geometric_median_minimises_the_sum_of_distances():
    rows, weights = draw(9, 4), [1.0, 2.0, 3.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0]
    rows[0] *= -30
    found = applied("geometric-median", rows, weights, steps=400).astype(float)

    def cost(at):
        return math.fsum(
            w * math.sqrt(math.fsum((at - row) ** 2)) for w, row in zip(weights, rows.astype(float), strict=True)
        )

    target = torch.tensor(found + 0.01, requires_grad=True)
    optimiser = torch.optim.LBFGS([target], max_iter=300, tolerance_change=1e-14, line_search_fn="strong_wolfe")

    def closure():
        optimiser.zero_grad()
        away = (target[None] - torch.from_numpy(rows).double()).norm(dim=1)
        loss = (away * torch.tensor(weights, dtype=torch.float64)).sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    assert cost(found) <= cost(target.detach().numpy()) * (1 + 1e-7)
    np.testing.assert_allclose(found, target.detach().numpy(), atol=1e-3)


@pytest.mark.parametrize("steps", [1, 3, 50])
def test_centered_clipping_equals_iterations_on_whole_vectors(steps):
    rows, weights = draw(8, 5).astype(float), [1.0, 2.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0]
    rows[2] *= -50
    at = np.sort(rows.astype(np.float32), axis=0)[3].astype(float)
    radius = sorted(np.linalg.norm(rows - at, axis=1))[3]
    for _ in range(steps):
        away = rows - at
        scale = np.minimum(1, radius / np.linalg.norm(away, axis=1))
        at = at + np.average(away * scale[:, None], axis=0, weights=weights)
    found = applied("centered-clip", rows.astype(np.float32), weights, steps=steps)
    np.testing.assert_allclose(found, at, rtol=1e-4, atol=2e-5)


def test_flag_projects_the_clipped_mean_to_the_reweighted_subspace():
    """The reference works with whole vectors and singular values instead of the Gram matrix."""
    rows, weights = draw(7, 6).astype(float), [1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 2.0]
    rows[1] *= -20
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    trust = np.ones(7)
    for _ in range(5):
        _, _, across = np.linalg.svd(trust[:, None] * unit, full_matrices=False)
        basis = across[:4]
        away = np.maximum(0, 1 - np.sum((unit @ basis.T) ** 2, axis=1))
        trust = (away + 1e-7) ** -0.25
        trust /= trust.sum()
    norms = np.linalg.norm(rows, axis=1)
    most = sorted(norms)[3] * np.array(weights)  # the median of the weights is 1
    mean = np.average(rows * np.minimum(1, most / norms)[:, None], axis=0, weights=weights)
    found = applied("flag", rows.astype(np.float32), weights)
    np.testing.assert_allclose(found, basis.T @ (basis @ mean), rtol=1e-4, atol=1e-5)
    assert np.linalg.norm(found) <= np.linalg.norm(mean) * (1 + 1e-6)


# --- identities and bounds


@pytest.mark.parametrize("rule", [*ROBUST, *RULES])
def test_equal_contributions_are_the_result(rule):
    rows = np.repeat(draw(1, 7), 7, axis=0)
    np.testing.assert_allclose(applied(rule, rows), rows[0], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("rule", [*ROBUST, "clip"])
def test_result_stays_near_the_honest_ones_whatever_two_liars_send(rule):
    honest = draw(9, 8)
    centre = honest.astype(float).mean(0)
    longest = np.linalg.norm(honest.astype(float), axis=1).max()
    for lie in (-1e3, 1e3, 1e15, 0.0, -1.0):
        rows = np.concatenate([honest[:4], np.float32(lie) * honest[:2], honest[4:]])
        found = applied(rule, rows, liars=2)
        assert np.isfinite(found).all()
        assert np.linalg.norm(found) <= 1.2 * longest
        assert found @ centre > 0.25 * centre @ centre, (rule, lie)


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum", "multi-krum", "bulyan"])
def test_unweighted_rules_do_not_depend_on_order_or_weights(rule):
    rows = draw(9, 9)
    shuffled = rows[np.random.default_rng(1).permutation(9)]
    one, two = applied(rule, rows, [1.0] * 9), applied(rule, shuffled, [float(w) for w in range(1, 10)])
    np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-7)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(ROBUST), st.integers(1, 3), st.integers(0, 10**6))
def test_fewer_contributors_than_needed_are_an_error(rule, liars, seed):
    needs = AggregationSpec(rule, liars).needs
    assert needs >= 2 * liars + 1
    assert np.isfinite(applied(rule, draw(needs, seed), liars=liars)).all()
    with pytest.raises(NotEnoughPeers, match=f"needs {needs} contributors"):
        applied(rule, draw(needs - 1, seed), liars=liars)
    with pytest.raises(NotEnoughPeers):  # a contributor without weight does not count
        applied(rule, draw(needs, seed), [0.0] + [1.0] * (needs - 1), liars=liars)


def test_zeros_and_signed_zeros_have_one_result():
    rows = np.zeros((7, N), np.float32)
    rows[::2] = -0.0
    for rule in ROBUST:
        assert applied(rule, rows).tobytes() == bytes(4 * N), rule


def test_most_zero_contributions_give_a_finite_result():
    rows = draw(9, 10)
    rows[2:7] = 0.0
    for rule in ROBUST:
        assert np.isfinite(applied(rule, rows, liars=1)).all(), rule


@pytest.mark.parametrize("rule", ROBUST)
def test_result_depends_on_the_payloads_only(rule):
    rows, codec = draw(9, 11, size=5000), Int8(64)
    payloads = []
    for row in rows:
        payloads.append(np.zeros(codec.nbytes(row.size), np.uint8))
        codec.encode(row, payloads[-1])
    outs = []
    for given_payloads in ([p.tobytes() for p in payloads], [memoryview(b"x" + p.tobytes())[1:] for p in payloads]):
        outs.append(np.full(5000, np.nan, np.float32))
        dense_rule(AggregationSpec(rule))(codec, given_payloads, [float(w) for w in range(1, 10)], outs[-1])
    assert outs[0].tobytes() == outs[1].tobytes()


# --- pieces and sparse payloads


@pytest.mark.parametrize("rule", ROBUST)
def test_pieces_give_the_result_of_the_whole(rule):
    rows, weights = draw(9, 12, size=3000), [1.0] * 9
    whole, parts = np.zeros(3000, np.float32), np.zeros(3000, np.float32)
    cuts = [(0, 700), (700, 2500), (2500, 3000)]
    spec = AggregationSpec(rule)
    robust.aggregate(spec, lambda: [(0, rows)], weights, whole)
    robust.aggregate(spec, lambda: [(a, np.ascontiguousarray(rows[:, a:b])) for a, b in cuts], weights, parts)
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-5)


CHUNKS = Chunks((("a", (130, 70)), ("b", (5,)), ("d", (300, 64)), ("e", (200,))))


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("piece", [1, 1 << 14, 1 << 18])
def test_sparse_rule_equals_the_rule_on_scattered_vectors(rule, piece, monkeypatch):
    monkeypatch.setattr(rules_module, "PIECE", piece)
    codec, rng = Sparse(900), np.random.default_rng(13)
    base = rng.standard_t(3, CHUNKS.total)
    sent = [codec.select((base + 0.3 * rng.standard_normal(CHUNKS.total)).astype(np.float32), CHUNKS) for _ in range(9)]
    sent[4] = codec.select(np.zeros(CHUNKS.total, np.float32), CHUNKS)
    weights = [float(w) for w in (1, 2, 1, 1, 1, 3, 0, 1, 1)]
    found = sparsemean.flat(sparse_rule(AggregationSpec(rule))(sent, weights, CHUNKS, "contributor_mean"), CHUNKS)
    dense = np.zeros((9, CHUNKS.total), np.float32)
    for one, row in zip(sent, dense, strict=True):
        one.scatter(row)
    counted, expected = np.array(weights) > 0, np.zeros(CHUNKS.total, np.float32)
    for section in CHUNKS.sections:
        rows = np.stack([section.gather(row) for row in dense[counted]])
        part = np.zeros(section.size, np.float32)
        robust.aggregate(AggregationSpec(rule), partial(list, [(0, rows)]), [w for w in weights if w], part)
        section.put(part, expected)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    if piece == 1 << 18:
        assert found.tobytes() == expected.tobytes()


def test_sparse_mean_is_clipped_by_the_rule_clip_only():
    codec = Sparse(64)
    sent = [codec.select(draw(1, i, size=CHUNKS.total)[0] * (1e3 if i == 3 else 1), CHUNKS) for i in range(4)]
    for rule, clips in (("mean", False), ("clip", True)):
        found = sparsemean.flat(sparse_rule(AggregationSpec(rule))(sent, [1.0] * 4, CHUNKS, "mean"), CHUNKS)
        assert found.tobytes() == sparsemean.mean(sent, [1.0] * 4, CHUNKS, "mean", clips).tobytes()
        assert (np.linalg.norm(found) > 50 * np.sqrt(CHUNKS.total) / 8) == (rule == "mean")
    with pytest.raises(ValueError, match="sparse"):
        sparse_rule(AggregationSpec("rda"))


@pytest.mark.trial
def test_demo_coefficients_can_be_aggregated_by_a_robust_rule():
    codec, rng = Demo(32, 256), np.random.default_rng(2)
    layout = Chunks((("m", (64, 48)),), 256)
    base = rng.standard_normal(layout.total)
    rows = [(base + 0.1 * rng.standard_normal(layout.total)).astype(np.float32) for _ in range(5)]
    rows[0] = -100 * rows[0]
    sent = [codec.select(row, layout) for row in rows]
    plain, found = (
        sparsemean.flat(demo_means(sent, [1.0] * 5, layout, "mean", sparse_rule(AggregationSpec(rule))), layout)
        for rule in ("mean", "multi-krum")
    )
    assert found @ base > 0 > plain @ base


def test_combination_of_rows_is_rounded_once():
    rows = np.array([[1.0], [2.0**-30]], np.float32)
    assert coordinate_rules.combination(rows, [1.0, 1.0])[0] == np.float32(1.0)
    assert coordinate_rules.combination(np.repeat(rows, [1, 2**10], axis=0), [1.0] * 1025)[0] == np.float32(
        1 + 2.0**-20
    )
