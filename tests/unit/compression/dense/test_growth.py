"""Largest ratio of norms by which encoding lengthens a vector, on which the refusal of results rests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.compression import registry
from thinwire.compression.core.codec import SMALLEST

SPECS = (
    *("fp32", "fp16", "bf16", "e3m0(block=64)", "int8(block=256)", "int8(block=16,stochastic=1)", "int4(block=64)"),
    *("int4(block=64,asymmetric=1)", "int3(block=16,asymmetric=1,stochastic=1)", "int3(block=32,stochastic=1)"),
)


def lengthened(codec, x, seed):
    """Return the norm of x after encoding, and the largest one that is allowed."""
    out, back = np.empty(codec.nbytes(x.size), np.uint8), np.empty(x.size, np.float32)
    codec.encode(x, out, seed)
    codec.decode(out, back)
    found, given = (float(np.linalg.norm(one.astype(np.float64))) for one in (back, x))
    return found, given * codec.growth + SMALLEST * x.size**0.5


@pytest.mark.parametrize("spec", SPECS)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 17, 64, 1000]),
    scale=st.sampled_from([1e-12, 1e-7, 1e-4, 1.0, 1e4]),
    kind=st.sampled_from(["normal", "one large", "equal", "positive", "levels"]),
)
def test_encoding_lengthens_no_vector_beyond_the_growth_of_its_codec(spec, seed, size, scale, kind):
    rng, codec = np.random.default_rng(seed), registry.dense(spec)
    x = rng.normal(size=size)
    if kind == "one large":
        x *= 0.01
        x[rng.integers(size)] = 3.0
    elif kind == "equal":
        x[:] = rng.normal()
    elif kind == "positive":
        x = 1.0 + 0.01 * x
    elif kind == "levels":  # just above the middle between two levels, where rounding adds most
        x = np.where(np.arange(size) % 16 == 0, 1.0, 0.5001 / rng.choice([127, 7, 3, 64]))
    found, most = lengthened(codec, (scale * x).astype(np.float32), seed)
    assert found <= most * (1.0 + 1e-6)


def test_growth_of_block_quantizers_is_one_step_in_each_value():
    assert registry.dense("int8(block=256)").growth == pytest.approx(1.0 + 16 / 127, rel=1e-3)
    assert registry.dense("int4(block=64)").growth == pytest.approx(1.0 + 8 / 7, rel=2e-3)
    assert registry.dense("fp32").growth == 1.0
