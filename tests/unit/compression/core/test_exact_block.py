"""Buffers that travel exactly beside encoded vectors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.aggregation.means import clip
from thinwire.collectives.rounds.data_planes.owner_results import Reducer
from thinwire.collectives.topology.shards import Grid
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.exact_block import BufferedCodec, ExactBlock
from thinwire.compression.registry import dense
from thinwire.node.state.pseudogradient_coder import PseudogradientCoder

counts = st.integers(0, 40)


@given(
    st.integers(1, 50),
    st.integers(1, 20),
    counts,
    counts,
    st.integers(1, 4),
    st.sampled_from(["fp32", "int8(block=16)"]),
)
def test_buffered_chunks_carry_the_whole_block_exactly(total, chunk, averaged, copied, peers, name):
    codec, cut, pool = (
        BufferedCodec(dense(name), ExactBlock(averaged, copied), total),
        Grid(total, chunk),
        BufferPool(1 << 16),
    )
    rng = np.random.default_rng(total)
    blocks = [rng.standard_normal(averaged + copied).astype(np.float32) for _ in range(peers)]
    weights = [float(1 + (3 * peer) % peers) for peer in range(peers)]
    sent = [
        list(PseudogradientCoder(codec, cut, pool, None, block).encoded(rng.standard_normal(total).astype(np.float32)))
        for block in blocks
    ]
    sizes = [cut.size(index) for index in range(len(cut))]
    reducer = Reducer(codec, clip, pool)
    results = [reducer.result([each[index] for each in sent], weights, sizes[index]) for index in range(len(cut))]
    for payload, n in zip(results, sizes, strict=True):
        assert np.isfinite(codec.check(payload, n)) and memoryview(payload).nbytes == codec.nbytes(n)
    found = codec.block_of(results, sizes)
    heaviest = weights.index(max(weights))
    mean = np.average(np.stack(blocks).astype(np.float64), axis=0, weights=weights)
    np.testing.assert_allclose(found[:averaged], mean[:averaged], rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(found[averaged:], blocks[heaviest][averaged:])
    np.testing.assert_array_equal(codec.block_of(sent[0], sizes), blocks[0])


@given(st.floats(0, 2.0**127, width=32), st.lists(st.integers(1, 2**40), min_size=1, max_size=9))
def test_combine_of_equal_values_is_that_value(value, weights):
    one = np.array([value], np.float32)
    assert ExactBlock(1).combine([one] * len(weights), [float(weight) for weight in weights]) == one


@pytest.mark.parametrize("weights", [[0.0, 0.0], [-1.0, 2.0]])
def test_combine_refuses_weights_without_a_mean(weights):
    with pytest.raises(ValueError, match="have no mean"):
        ExactBlock(1).combine([np.ones(1, np.float32)] * 2, weights)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda payload: payload[:-1], "length"),
        (lambda payload: payload + b"\0", "length"),
        (lambda payload: payload[:-4] + np.float32(np.nan).tobytes(), "not finite"),
        (lambda payload: np.float32(np.inf).tobytes() + payload[4:], "not finite"),
    ],
)
def test_check_refuses_damaged_payloads(damage, reason):
    codec = BufferedCodec(dense("fp32"), ExactBlock(2, 1), 4)
    (payload,) = PseudogradientCoder(codec, Grid(4, 4), BufferPool(1 << 10), None, np.ones(3, np.float32)).encoded(
        np.ones(4, np.float32)
    )
    assert codec.check(bytes(payload), 4) == 4.0
    with pytest.raises(CodecError) as refused:
        codec.check(damage(bytes(payload)), 4)
    assert refused.value.reason == reason
