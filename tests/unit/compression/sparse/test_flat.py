"""The sparse codec of flat chunks."""

from __future__ import annotations

import numpy as np
import pytest
from thinwire.compression.core.codec import CodecError
from thinwire.compression.sparse import mean as sparsemean
from thinwire.compression.sparse.flat import PORTION, FlatSparse
from thinwire.compression.sparse.portions import portion_chunks
from thinwire.compression.sparse.topk import Sparse
from thinwire.sims.invariants.sparse_mean import marks, sparse_mean

CODEC = FlatSparse(Sparse(4, 256))


@pytest.mark.parametrize("size", [1, 100, 256, 1000, 2048])
def test_largest_values_of_each_block_of_adjacent_elements_arrive(size):
    values = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    payload, out = CODEC.payload(values), np.full(size, np.nan, np.float32)
    CODEC.decode(payload, out)
    assert len(payload) <= CODEC.nbytes(size) and CODEC.spec == "topk(k=4,chunk=256)|2bit|rice"
    assert CODEC.check(payload, size) == pytest.approx(float(np.dot(out, out)), rel=1e-6)
    for start in range(0, size, 256):
        block, sent = values[start : start + 256], out[start : start + 256]
        count = max(1, round(4 * block.size / 256))
        assert set(np.flatnonzero(sent)) == set(np.argsort(-np.abs(block))[:count])
        assert (np.sign(sent[sent != 0]) == np.sign(block[sent != 0])).all()


def test_payload_of_another_size_or_with_missing_bytes_is_refused():
    payload = CODEC.payload(np.random.default_rng(0).standard_normal(1000).astype(np.float32))
    for other, size in ((payload[:-1], 1000), (payload + b"\0", 1000), (payload, 999 - 256), (b"", 1000)):
        with pytest.raises(CodecError):
            CODEC.check(other, size)
        with pytest.raises(CodecError):
            CODEC.decode(other, np.empty(size, np.float32))


def test_value_that_is_not_finite_is_not_encoded():
    with pytest.raises(CodecError, match="not finite"):
        CODEC.payload(np.array([1.0, np.nan, 2.0], np.float32))


def test_mean_divides_each_value_by_its_senders_or_by_the_usual_number_of_them():
    """Of four members three send the same values, and one other values; the norms are 2, 4, 6, 8, clipped to 4."""
    values = np.zeros((4, 256), np.float32)
    values[:3, [3, 70, 90, 200]] = [[1.0], [2.0], [3.0]]
    values[3, [3, 11, 12, 13]] = 4.0
    payloads, out = [CODEC.payload(one) for one in values], np.full(256, np.nan, np.float32)
    CODEC.mean(payloads, out)
    # One value with four senders, three with three: usually 3.25 of four.
    expected = np.zeros(256)
    expected[3] = (1 + 2 + 2 + 2) / 4
    expected[[70, 90, 200]] = (1 + 2 + 2) / 3.25
    expected[[11, 12, 13]] = 2 / 3.25
    np.testing.assert_allclose(out, expected, rtol=1e-3)


@pytest.mark.parametrize("size", [1, 100, 5000, 70_000])
@pytest.mark.parametrize("members", [1, 2, 5])
def test_mean_equals_the_reference_of_simulations(size, members):
    codec = FlatSparse(Sparse(64, 4096))
    rng = np.random.default_rng(size)
    common = rng.standard_normal(size)
    values = [(common + rng.standard_normal(size)).astype(np.float32) for _ in range(members)]
    values[-1][: PORTION if size > PORTION else size // 2] = 0.0
    values[0] *= 50
    payloads, out = [codec.payload(one) for one in values], np.full(size, np.nan, np.float32)
    codec.mean(payloads, out)
    decoded = np.zeros((members, size), np.float32)
    for payload, one in zip(payloads, decoded, strict=True):
        codec.decode(payload, one)
    expected = sparse_mean(list(decoded), [marks(codec, payload, size) for payload in payloads])
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-7)
    if members == 1:
        chunks = portion_chunks(size, PORTION, codec.codec.chunk)
        alone = sparsemean.mean([codec.codec.decode(payloads[0], chunks)], [1.0], chunks)
        assert out.tobytes() == decoded[0].tobytes() == alone.tobytes()


def test_tensors_of_all_sizes_gain_from_a_chunk_with_values_of_four_scales():
    """With common levels the smallest values would be rounded up to those of the largest."""
    codec, size = FlatSparse(Sparse(64, 4096)), 1 << 18
    scales = np.repeat(np.array([1, 0.1, 0.01, 0.001], np.float32), size // 4)
    values = np.random.default_rng(0).standard_normal(size).astype(np.float32) * scales
    payload, out = codec.payload(values), np.empty(size, np.float32)
    codec.decode(payload, out)
    assert codec.check(payload, size) == pytest.approx(float(np.dot(out, out)), rel=1e-5)
    assert len(payload) <= codec.nbytes(size)
    for want, sent in zip(np.split(values, 4), np.split(out, 4), strict=True):
        assert np.linalg.norm(want - sent) < 0.97 * np.linalg.norm(want)
