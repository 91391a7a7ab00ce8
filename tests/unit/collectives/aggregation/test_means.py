"""Outlier screening, and the means of encoded payloads: plain, clipped, of directions and lengths."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.collectives.aggregation.means import clip, directions_and_lengths, mean
from thinwire.collectives.aggregation.screening import MEMORY, NORM_LIMIT, lower_median, outliers
from thinwire.compression.core.codec import Codec
from thinwire.compression.dense.blockint import Int8
from thinwire.compression.dense.floats import Fp32

CODECS: list[Codec] = [Fp32(), Int8(16)]
N = 300


def peer(i: int) -> bytes:
    return bytes([i]) * 32


def encode(codec: Codec, x: np.ndarray) -> bytes:
    out = np.zeros(codec.nbytes(x.size), np.uint8)
    codec.encode(x.astype(np.float32), out)
    return out.tobytes()


def draw(seed: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(N) * scale


@pytest.mark.parametrize(
    ("values", "median"), [([3.0], 3.0), ([4.0, 1.0], 1.0), ([5.0, 1.0, 3.0], 3.0), ([1, 2, 3, 9], 2)]
)
def test_lower_median_of_even_count_is_the_lower_value(values: list[float], median: float) -> None:
    assert lower_median(values) == median


def test_median_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="median"):
        lower_median([])


def test_usual_norm_excludes_an_exploding_majority() -> None:
    norms = {peer(1): 5e4, peer(2): 5e4, peer(3): 10.0}
    assert outliers(norms)[0] == ()
    far, usual = outliers(norms, 10.0)
    assert far == (peer(1), peer(2))
    assert usual == 10.0
    assert outliers({peer(1): 1e9, peer(2): 1e9}, 10.0) == ((peer(1), peer(2)), 100.0)


def test_norm_at_the_limit_passes() -> None:
    assert outliers({peer(1): 2.0 * NORM_LIMIT}, 2.0)[0] == ()
    assert outliers({peer(1): np.nextafter(2.0 * NORM_LIMIT, math.inf)}, 2.0)[0] == (peer(1),)


def test_zero_contributions_do_not_lower_the_usual_norm() -> None:
    assert outliers({peer(1): 0.0, peer(2): 0.0}) == ((), 0.0)
    assert outliers({peer(1): 0.0, peer(2): 0.0, peer(3): 4.0}) == ((), 4.0)
    assert outliers({peer(1): 2.0}, 4.0)[1] == pytest.approx(MEMORY * 4 + (1 - MEMORY) * 2)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.integers(0, 255).map(peer), st.floats(0, 1e12), max_size=12), st.floats(0, 1e6))
def test_outliers_do_not_depend_on_order_or_include_the_median(norms: dict[bytes, float], usual: float) -> None:
    far, after = outliers(norms, usual)
    assert (far, after) == outliers(dict(reversed(norms.items())), usual)
    assert math.isfinite(after) and after >= 0
    lengths = [norm for norm in norms.values() if norm > 0]
    if usual == 0 and lengths:
        assert all(norms[peer] > lower_median(lengths) for peer in far)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.spec)
def test_mean_is_weighted_by_tokens_and_skips_zero_weight(codec: Codec) -> None:
    rows = [draw(i).astype(np.float32) for i in range(3)]
    payloads = [encode(codec, row) for row in rows]
    decoded = []
    for payload in payloads:
        row = np.zeros(N, np.float32)
        codec.decode(payload, row)
        decoded.append(row.astype(np.float64))
    out = np.full(N, np.nan, np.float32)
    mean(codec, payloads, [1, 0, 3], out)
    np.testing.assert_array_equal(out, ((decoded[0] + 3 * decoded[2]) / 4).astype(np.float32))
    mean(codec, payloads, [0, 0, 0], out)
    assert not out.any()
    with pytest.raises(ValueError):
        mean(codec, payloads, [1, 2], out)


def test_common_change_of_scale_excludes_nobody():
    """Data or learning rate change, and every contribution far exceeds the usual norm: the round continues."""
    far, usual = outliers({b"a": 5000.0, b"b": 5000.0}, usual=1.0)
    assert far == (b"a", b"b")
    assert outliers({b"a": 5000.0, b"b": 5000.0}, usual)[0] == ()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.spec)
def test_rda_averages_direction_and_length_separately(codec: Codec) -> None:
    vectors, weights = [draw(1), draw(2, 3.0), draw(3, 0.5)], [1.0, 3.0, 2.0]
    sent = []
    for vector in vectors:
        sent.append(np.empty(N, np.float32))
        codec.decode(encode(codec, vector), sent[-1])
    out = np.full(N, np.nan, np.float32)
    directions_and_lengths(codec, [encode(codec, vector) for vector in vectors], weights, out)
    norms = [float(np.linalg.norm(one.astype(np.float64))) for one in sent]
    direction = sum(w * one.astype(np.float64) / n for w, one, n in zip(weights, sent, norms, strict=True))
    length = np.dot(weights, norms) / 6.0
    np.testing.assert_allclose(out, length * direction / np.linalg.norm(direction), rtol=1e-5, atol=1e-5)
    assert np.linalg.norm(out) == pytest.approx(length, rel=1e-5)
    plain = np.empty(N, np.float32)
    mean(codec, [encode(codec, vector) for vector in vectors], weights, plain)
    assert np.linalg.norm(plain) < 0.9 * length  # different vectors cancel in part


def test_rda_of_equal_vectors_is_that_vector() -> None:
    codec, vector, out = Fp32(), draw(4), np.empty(N, np.float32)
    directions_and_lengths(codec, [encode(codec, vector)] * 3, [1.0, 2.0, 5.0], out)
    np.testing.assert_allclose(out, vector.astype(np.float32), rtol=1e-6)


def test_rda_handles_zero_vectors_and_zero_weights() -> None:
    codec, vector, out = Fp32(), encode(Fp32(), draw(4)), np.full(N, np.nan, np.float32)
    directions_and_lengths(codec, [vector, encode(codec, -draw(4))], [1.0, 1.0], out)
    assert not out.any()
    for other in (-3.0, -0.7):
        directions_and_lengths(codec, [vector, encode(codec, other * draw(4))], [1.0, 1.0], out)
        assert not out.any(), "what rounding leaves is no direction"
    directions_and_lengths(codec, [encode(codec, np.full(N, 3e38, np.float32)), vector], [1.0, 1.0], out)
    assert not out.any(), "nor is there a length beyond all numbers"
    directions_and_lengths(codec, [vector, encode(codec, np.zeros(N))], [1.0, 1.0], out)
    np.testing.assert_allclose(out, 0.5 * draw(4), rtol=1e-5)
    directions_and_lengths(codec, [vector, encode(codec, draw(5))], [1.0, 0.0], out)
    np.testing.assert_allclose(out, draw(4), rtol=1e-5)
    directions_and_lengths(codec, [vector], [0.0], out)
    assert not out.any()


def clipped_plainly(rows: list[np.ndarray], weights: list[float]) -> np.ndarray:
    """Return the clipped mean, computed with Python's own numbers."""
    counted = [([float(x) for x in row], w) for row, w in zip(rows, weights, strict=True) if w > 0]
    norms = [math.sqrt(math.fsum(x * x for x in row)) for row, _ in counted]
    some = sorted(norm for norm in norms if norm > 0)
    limit = some[(len(some) - 1) // 2] if len(some) >= 3 else math.inf
    total = math.fsum(w for _, w in counted)
    heavy = sorted(w for (_, w), norm in zip(counted, norms, strict=True) if norm > 0)
    usual = heavy[(len(heavy) - 1) // 2] if heavy else 1.0
    limits = [limit * max(1.0, w / usual) for _, w in counted]
    factors = [min(1.0, most / norm if norm else 1.0) for most, norm in zip(limits, norms, strict=True)]
    scaled = [[w * factor * x for x in row] for (row, w), factor in zip(counted, factors, strict=True)]
    return np.array([math.fsum(column) / total for column in zip(*scaled, strict=True)])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1.0, 7.0, 1e6]), st.integers(0, 9)), min_size=1, max_size=7),
    st.sampled_from(CODECS),
)
def test_clip_equals_the_reference(given: list[tuple[float, int]], codec: Codec) -> None:
    payloads = [encode(codec, draw(at, scale)) for at, (scale, _) in enumerate(given)]
    weights = [float(weight) for _, weight in given]
    rows = []
    for payload in payloads:
        rows.append(np.zeros(N, np.float32))
        codec.decode(payload, rows[-1])
    out = np.full(N, np.nan, np.float32)
    clip(codec, payloads, weights, out)
    if not any(weights):
        assert not out.any()
        return
    expected = clipped_plainly(rows, weights)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6 * max(1e-30, np.abs(expected).max()))


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 9), st.integers(0, 2**20), st.floats(-6, 6), st.integers(1, 3))
def test_one_contributor_moves_a_clipped_mean_by_no_more_than_its_weight(
    peers: int, seed: int, power: float, weight: int
) -> None:
    codec, honest = Fp32(), [draw(seed + i) for i in range(peers - 1)]
    weights = [1.0] * (peers - 1) + [float(weight)]
    longest = max(float(np.linalg.norm(row)) for row in honest)
    results = []
    for liar in (np.zeros(N), -(10**power) * honest[0]):
        out = np.empty(N, np.float32)
        clip(codec, [encode(codec, row) for row in [*honest, liar]], weights, out)
        results.append(out.astype(np.float64))
    # The lie also moves the limit, by which each honest part may shrink; both parts are at most the longest honest norm.
    honest_share, share = (peers - 1) / sum(weights), weight / sum(weights)
    assert np.linalg.norm(results[1] - results[0]) <= share * weight * longest + honest_share * spread(honest) + 1e-4


def spread(rows: list[np.ndarray]) -> float:
    """Return by how much the limit can change between the shortest and the longest of these rows."""
    norms = [float(np.linalg.norm(row)) for row in rows]
    return max(norms) - min(norms)


def test_clip_of_two_contributors_is_their_mean() -> None:
    codec, rows = Fp32(), [draw(1), draw(2, 100.0)]
    found, plain = np.empty(N, np.float32), np.empty(N, np.float32)
    clip(codec, [encode(codec, row) for row in rows], [1.0, 3.0], found)
    mean(codec, [encode(codec, row) for row in rows], [1.0, 3.0], plain)
    assert found.tobytes() == plain.tobytes()
    clip(codec, [encode(codec, row) for row in [*rows, draw(3)]], [1.0, 3.0, 0.0], found)
    assert found.tobytes() == plain.tobytes(), "a contributor of weight 0 does not make clipping possible"


def test_contribution_of_more_steps_may_be_longer_in_proportion() -> None:
    """Step balancing: twice the steps have twice the tokens and up to twice the length, and are not clipped."""
    codec, rows = Fp32(), [draw(1), draw(2), draw(3), 2.0 * draw(4)]
    rows = [row / np.linalg.norm(row) * length for row, length in zip(rows, (1.0, 1.0, 1.0, 2.0), strict=True)]
    found, plain = np.empty(N, np.float32), np.empty(N, np.float32)
    payloads = [encode(codec, row) for row in rows]
    clip(codec, payloads, [5.0, 5.0, 5.0, 10.1], found)
    mean(codec, payloads, [5.0, 5.0, 5.0, 10.1], plain)
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-6)
    clip(codec, payloads, [5.0] * 4, found)
    mean(codec, payloads, [5.0] * 4, plain)
    assert np.linalg.norm(found) < 0.95 * np.linalg.norm(plain)
