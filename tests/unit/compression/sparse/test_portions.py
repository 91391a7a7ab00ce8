"""The sparse codec on portions: their payloads together equal the whole payload, and sums lose nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.compression.core.codec import CodecError
from thinwire.compression.sparse import mean as sparsemean
from thinwire.compression.sparse.portions import PortionCodecs, portion_chunks
from thinwire.compression.sparse.topk import Sparse

NARROW, BROAD = Sparse(4, 256), Sparse(16, 256)


def values(seed, n):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


@given(st.integers(1, 3000), st.sampled_from([256, 512, 1024]), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_payload_is_concatenation_of_those_of_its_portions(total, portion, seed):
    portions, x = PortionCodecs(NARROW, BROAD), values(seed, total)
    chunks = portion_chunks(total, portion, 256)
    said = NARROW.select(x, chunks)
    pieces = list(portions.split(NARROW.encode(said), said))
    assert len(pieces) == len(chunks.sections) == -(-total // portion)
    whole, apart = np.zeros(total, np.float32), np.zeros(total, np.float32)
    said.scatter(whole)
    for index, piece in enumerate(pieces):
        start, stop = index * portion, min(total, (index + 1) * portion)
        alone = portion_chunks(stop - start, stop - start, 256)
        assert bytes(piece) == NARROW.encode(NARROW.select(x[start:stop].copy(), alone))
        assert len(piece) <= portions.nbytes(stop - start)
        NARROW.decode(piece, alone).scatter(apart[start:stop])
        assert portions.check(piece, stop - start) == pytest.approx(float(np.square(apart[start:stop]).sum()), rel=1e-5)
    np.testing.assert_array_equal(whole, apart)
    assert NARROW.decode(b"".join(pieces), chunks).codec == NARROW


@pytest.mark.parametrize("denominator", sparsemean.DENOMINATORS)
@pytest.mark.parametrize("beta", [1.0, 0.8])
def test_sum_and_residual_conserve_the_mean(beta, denominator):
    """β kept + mean = sent + kept', in every round; with β = 1 nothing is ever lost."""
    n, portions = 900, PortionCodecs(NARROW, BROAD, beta, denominator)
    chunks, kept, sums, sent = portion_chunks(n, n, 256), None, np.zeros(n), np.zeros(n)
    for round in range(6):
        said = [NARROW.select(values(10 * round + i, n), chunks) for i in range(4)]
        mean = sparsemean.mean(said, [1.0, 2.0, 1.0, 3.0], chunks, denominator)
        result, rest = portions.reduce([NARROW.encode(one) for one in said], [1.0, 2.0, 1.0, 3.0], kept, n)
        decoded = np.zeros(n, np.float32)
        BROAD.decode(result, chunks).scatter(decoded)
        before = np.zeros(n) if kept is None else kept
        np.testing.assert_allclose(decoded + rest, mean + beta * before, atol=1e-6)
        assert np.count_nonzero(decoded) <= BROAD.k * 4 and np.linalg.norm(rest) > 0
        assert portions.check_sum(result, n) == pytest.approx(float(np.square(decoded).sum()), rel=1e-5)
        kept, sums, sent = rest, sums + mean, sent + decoded
    if beta == 1.0:
        np.testing.assert_allclose(sent + kept, sums, atol=1e-5)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("beta", [0.5, 0.8])
def test_residual_is_bounded_by_the_means(beta, alike):
    """By β / (1 − β) times the longest mean: at most this is lost with an owner."""
    n, portions = 900, PortionCodecs(NARROW, BROAD, beta)
    chunks, kept, longest = portion_chunks(n, n, 256), None, 0.0
    for round in range(20):
        said = [NARROW.select(values(0 if alike else 10 * round + i, n), chunks) for i in range(4)]
        longest = max(longest, np.linalg.norm(sparsemean.mean(said, [1.0] * 4, chunks, "contributor_mean")))
        _, kept = portions.reduce([NARROW.encode(one) for one in said], [1.0] * 4, kept, n)
        assert beta * np.linalg.norm(kept) <= beta / (1 - beta) * longest


def test_round_does_not_change_residual_before_commit():
    n, portions = 512, PortionCodecs(NARROW, BROAD)
    payload = NARROW.encode(NARROW.select(values(1, n), portion_chunks(n, n, 256)))
    kept = values(2, n)
    before = kept.copy()
    first, second = (portions.reduce([payload], [1.0], kept, n) for _ in range(2))
    assert first[0] == second[0]
    np.testing.assert_array_equal(first[1], second[1])
    np.testing.assert_array_equal(kept, before)


def test_residual_has_no_unrepresentable_values():
    n, portions = 256, PortionCodecs(NARROW, BROAD)
    payload = NARROW.encode(NARROW.select(values(1, n), portion_chunks(n, n, 256)))
    result, rest = portions.reduce([payload], [1.0], np.full(n, np.inf, np.float32), n)
    assert portions.check_sum(result, n) == 0.0 and not rest.any()


def test_codec_refuses_payloads_of_other_size_or_codec():
    n, portions = 600, PortionCodecs(NARROW, BROAD)
    narrow, broad = (one.encode(one.select(values(1, n), portion_chunks(n, n, 256))) for one in (NARROW, BROAD))
    for check, payload in ((portions.check, broad), (portions.check_sum, narrow)):
        with pytest.raises(CodecError):
            check(payload, n)
    for payload in (narrow[:-1], narrow + b"\0", b""):
        with pytest.raises(CodecError, match=r"."):
            portions.check(payload, n)
    with pytest.raises(CodecError):
        portions.check(narrow, 2 * n)
