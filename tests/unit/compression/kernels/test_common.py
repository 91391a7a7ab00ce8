"""The outer step's arithmetic, which the compiler must not reorder."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.reference import dense as reference
from thinwire.compression.compile_kernels import warm_up
from thinwire.compression.kernels import block_decode, block_encode, common, e3m0, half
from thinwire.compression.registry import dense


def draw(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 3000), st.floats(0, 2), st.floats(0, 1), st.booleans(), st.integers(0, 99))
def test_outer_step_equals_the_reference(n: int, lr: float, mu: float, nesterov: bool, seed: int) -> None:
    theta, momentum, delta = draw(n, seed), draw(n, seed + 1), draw(n, seed + 2)
    expected = reference.outer_step(theta, momentum, delta, lr, mu, nesterov)
    common.outer_step(theta, momentum, delta, lr, mu, nesterov)
    assert theta.tobytes() == expected[0].tobytes()
    assert momentum.tobytes() == expected[1].tobytes()


@pytest.mark.parametrize("nesterov", [True, False])
def test_outer_step_follows_torch_sgd(nesterov: bool) -> None:
    theta = draw(4097, 1)
    momentum = np.zeros_like(theta)
    parameter = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=nesterov)
    for round_ in range(5):
        delta = draw(4097, 10 + round_)
        parameter.grad = torch.from_numpy(delta.copy())
        sgd.step()
        common.outer_step(theta, momentum, delta, 0.7, 0.9, nesterov)
    np.testing.assert_allclose(theta, parameter.detach().numpy(), rtol=0, atol=4e-6)


def test_kernels_do_not_fuse_products_and_sums() -> None:
    # (1 + 2^-12)² = 1 + 2^-11 + 2^-24: the last bit is lost by a rounded product and would survive a fused one.
    one = np.float32(1) + np.float32(2.0**-12)
    theta, momentum = np.zeros(64, np.float32), np.full(64, one)
    delta = np.full(64, -(np.float32(1) + np.float32(2.0**-11)))
    common.outer_step(theta, momentum, delta, 0.0, float(one), False)
    assert not momentum.any()


def test_outer_step_refuses_misshaped_arrays() -> None:
    good = np.zeros(4, np.float32)
    for bad in (np.zeros(5, np.float32), np.zeros(4), np.zeros(8, np.float32)[::2]):
        with pytest.raises(ValueError, match="outer step"):
            common.outer_step(good, good.copy(), bad, 1.0, 0.0)


@pytest.mark.trial
def test_dense_warm_up_compiles_every_kernel() -> None:
    specs = ("fp32", "fp16", "bf16", "int8", "int8(asymmetric=1)", "int4(stochastic=1)", "int3(block=16)")
    warm_up(*specs)
    dispatchers = [
        value
        for module in (common, half, block_encode, block_decode)
        for value in vars(module).values()
        if hasattr(value, "nopython_signatures")
    ]
    before = {d.py_func.__qualname__ + d.py_func.__module__: len(d.nopython_signatures) for d in dispatchers}
    assert len(before) > 15
    frozen = draw(512, 0)
    frozen.flags.writeable = False
    for spec in specs:
        codec = dense(spec)
        out = np.zeros(codec.nbytes(512), np.uint8)
        back = np.zeros(512, np.float32)
        for x in (frozen, draw(512, 1)):
            codec.encode(x, out)
            for payload in (bytes(out), bytearray(out), out):
                codec.decode(payload, back)
                codec.check(payload, 512)
                codec.mean([payload, out], [1, 2], back)
    common.outer_step(back, back.copy(), frozen, 1.0, 0.5)
    assert {d.py_func.__qualname__ + d.py_func.__module__: len(d.nopython_signatures) for d in dispatchers} == before


@pytest.mark.trial
def test_blocks_of_an_uncounted_array_change_no_reference_count() -> None:
    """Each change is atomic; they took up to two thirds of the time of kernels that work block by block."""
    array = numba.types.Array
    compiled = numba.njit(e3m0.encode_blocks.py_func)
    compiled.compile(
        (array(numba.float32, 1, "C"), array(numba.uint8, 1, "C"), numba.int64, array(numba.uint8, 1, "C"))
    )
    assert "call void @NRT_incref" not in compiled.inspect_llvm(compiled.signatures[0])
