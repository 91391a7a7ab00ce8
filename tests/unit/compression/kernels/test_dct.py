import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.reference.dct import forward, inverse, inverse_torch
from thinwire.compression.kernels import dct


def blocks(seed: int, side: int, count: int = 3, spread: float = 0.0) -> np.ndarray:
    """Gaussian blocks whose entries differ in scale by e**spread."""
    rng = np.random.default_rng(seed)
    shape = (count, side, side)
    return (rng.standard_normal(shape) * np.exp(spread * rng.standard_normal(shape))).astype(np.float32)


@pytest.mark.parametrize("side", dct.SIDES)
def test_dct_matrix_is_the_orthonormal_cosine_transform(side: int) -> None:
    d = dct.matrix(side).astype(np.float64)
    assert np.linalg.norm(d.T @ d - np.eye(side)) < 1e-5
    i, j = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    exact = np.sqrt(np.where(j > 0, 2, 1) / side) * np.cos(np.pi * (2 * i + 1) * j / (2 * side))
    assert np.abs(d - exact).max() < 2**-26


@pytest.mark.parametrize("side", dct.SIDES)
def test_dct_equals_matrix_products(side: int) -> None:
    x, d = blocks(1, side), dct.matrix(side).astype(np.float64)
    there, back = forward(x), inverse(x)
    assert np.abs(there - d.T @ x.astype(np.float64) @ d).max() < 4e-6
    assert np.abs(back - d @ x.astype(np.float64) @ d.T).max() < 4e-6


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), side=st.sampled_from(dct.SIDES), spread=st.sampled_from([0.0, 3.0, 12.0]))
def test_dct_kernel_and_torch_agree_bit_for_bit(seed: int, side: int, spread: float) -> None:
    x = blocks(seed, side, 2, spread)
    for fast, slow in ((forward, dct.forward_torch), (inverse, inverse_torch)):
        assert np.array_equal(fast(x), slow(torch.from_numpy(x)).numpy())


def test_dct_inverts() -> None:
    x = blocks(2, 64)
    assert np.abs(inverse(forward(x)) - x).max() < 4e-6


def test_dct_bits_are_portable() -> None:
    # Small integers by a rule, so that the input depends on no generator.
    x = ((np.arange(2 * 64 * 64) * 7919 % 2003 - 1001) / np.float32(64)).astype(np.float32).reshape(2, 64, 64)
    there, back = forward(x), inverse(x)
    digests = [hashlib.sha256(array.astype("<f4").tobytes()).hexdigest()[:16] for array in (there, back)]
    assert digests == ["1aba6bffc135bca6", "f463b0800f954d60"]


def test_dct_refuses_other_sides() -> None:
    with pytest.raises(ValueError, match="side"):
        dct.matrix(48)
