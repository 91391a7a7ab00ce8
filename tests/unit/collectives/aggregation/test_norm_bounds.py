"""Bounds of the norm of a result, for every rule and any contributions."""

from __future__ import annotations

import math
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.aggregation.norm_bounds import norm_bound
from thinwire.collectives.aggregation.rule_factory import RULES, dense_rule
from thinwire.compression.dense.floats import Fp32
from thinwire.swarm.aggregation_spec import NEEDS, AggregationSpec

ROBUST = ("clip", "centered-clip", "trimmed-mean", "median", "flag", "krum", "multi-krum", "bulyan")
"""Rules whose bound does not follow the longest contribution."""


def outcome(spec, rows, weights):
    """Return the norm of the aggregate, and its bound."""
    payloads = [row.view(np.uint8) for row in rows]
    out = np.empty(rows.shape[1], np.float32)
    dense_rule(spec)(Fp32(), payloads, weights, out)
    norms = [math.sqrt(Fp32().check(payload, out.size)) for payload in payloads]
    return float(np.linalg.norm(out.astype(np.float64))), norm_bound(spec)(norms, weights)


@pytest.mark.parametrize("rule", [*chain(RULES, NEEDS)])
@given(
    seed=st.integers(0, 2**32),
    extra=st.integers(0, 5),
    liars=st.integers(1, 2),
    spread=st.sampled_from([0.0, 0.3, 3.0]),
    common=st.sampled_from([0.0, 1.0, 10.0]),
    size=st.sampled_from([1, 2, 30]),
)
def test_no_aggregate_is_longer_than_its_bound(rule, seed, extra, liars, spread, common, size):
    """Contributions: a common direction and noise, with lengths that differ by orders of magnitude."""
    spec, rng = AggregationSpec(rule, liars), np.random.default_rng(seed)
    count = max(spec.needs, 1) + extra
    rows = common * rng.normal(size=size) + rng.normal(size=(count, size))
    rows = np.ascontiguousarray(rows * np.exp(spread * rng.normal(size=(count, 1))), np.float32)
    rows *= rng.choice([-1, 1], size=(count, 1), p=[0.2, 0.8]).astype(np.float32)
    weights = [float(weight) for weight in rng.integers(1, 9, count)] if seed % 2 else [4.0] * count
    norm, bound = outcome(spec, rows, weights)
    assert norm <= bound * (1.0 + 1e-6)


@pytest.mark.parametrize("rule", ROBUST)
def test_one_endless_contribution_raises_the_bound_to_a_few_honest_norms(rule):
    spec = AggregationSpec(rule, 1)
    norms = [1.0] * 8
    usual, raised = norm_bound(spec)(norms, [1.0] * 8), norm_bound(spec)([*norms[:-1], 1e9], [1.0] * 8)
    assert usual <= raised <= 10.0


@pytest.mark.parametrize(
    ("rule", "bound"), [("median", 7.9), ("centered-clip", 5.9), ("krum", 16.6), ("bulyan", 23.8), ("clip", 1.0)]
)
def test_bound_of_64_equal_norms_is_that_of_the_document(rule, bound):
    """The figures of docs/design/data-planes.md, with one liar."""
    assert norm_bound(AggregationSpec(rule))([1.0] * 64, [1.0] * 64) == pytest.approx(bound, abs=0.05)


def test_bound_of_equal_norms_is_that_norm_for_means():
    for rule in ("mean", "clip", "rda", "flag", "geometric-median"):
        assert norm_bound(AggregationSpec(rule))([2.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.0, rel=1e-4)


def test_contributions_without_weight_do_not_count():
    assert norm_bound(AggregationSpec("mean"))([2.0, 50.0], [1.0, 0.0]) == pytest.approx(2.0, rel=1e-4)
    assert norm_bound(AggregationSpec("mean"))([50.0], [0.0]) == 0.0


def test_centered_clipping_has_no_bound_if_the_longest_have_half_of_the_weight():
    assert norm_bound(AggregationSpec("centered-clip"))([1.0, 1.0, 9.0], [1.0, 1.0, 2.0]) == math.inf
