"""Vectors that are encoded and decoded chunk by chunk."""

import numpy as np
import pytest
from thinwire.collectives.topology.shards import Grid
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.compression import registry
from thinwire.node.state.pseudogradient_coder import PseudogradientCoder

SIZE, CHUNK = 1000, 300
VECTOR = np.random.default_rng(1).standard_normal(SIZE).astype(np.float32)
MODEL = np.random.default_rng(2).standard_normal(SIZE).astype(np.float32)


def read(start, stop, out):
    out[:] = MODEL[start:stop]


@pytest.fixture
def coder():
    return PseudogradientCoder(
        registry.dense("fp32"), Grid(SIZE, CHUNK), BufferPool(1 << 20), None, np.empty(0, np.float32)
    )


def decoded(coder, payloads):
    out = np.full(SIZE, np.nan, np.float32)
    for low, high, values in coder.decoded(list(payloads)):
        out[low:high] = values
    return out


def test_encoded_vector_is_decoded_to_the_same_values(coder):
    assert np.array_equal(decoded(coder, coder.encoded(VECTOR)), VECTOR)


@pytest.mark.parametrize("share", [None, 0.3])
def test_difference_to_the_model_is_encoded_with_its_share(coder, share):
    expected = VECTOR - MODEL
    if share is not None:
        expected *= np.float32(share)
    assert np.array_equal(decoded(coder, coder.differences(VECTOR, read, share)), expected)


def test_difference_that_is_not_finite_names_its_elements(coder):
    broken = VECTOR.copy()
    broken[CHUNK] = np.inf
    with pytest.raises(FloatingPointError, match="elements 300 to 600"):
        list(coder.differences(broken, read))
