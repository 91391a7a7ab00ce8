"""Block quantizers in torch: the same bytes and the same refusals as the kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kit.reference import dense as reference
from thinwire.compression.core.codec import CodecError
from thinwire.compression.dense import torch_backend
from thinwire.compression.dense.blockint import Int4, Int8, Integers

from benchmarks.compression.torchmeans import dense_decode, dense_mean

CODECS = [
    Integers(bits, block, asymmetric, stochastic)
    for bits, block in ((8, 16), (8, 100), (8, 256), (4, 16), (4, 256), (3, 24))
    for asymmetric in (False, True)
    for stochastic in (False, True)
]
SEED = 0xFEDCBA9876543210
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = hnp.arrays(np.float32, st.integers(0, 600), elements=finite)


def encode(codec: Integers, x: np.ndarray) -> bytes:
    out = np.zeros(codec.nbytes(x.size), np.uint8)
    codec.encode(x, out, SEED)
    return out.tobytes()


def tensor(payload: bytes, device: str) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
        if payload
        else torch.zeros(0, dtype=torch.uint8)
    )


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=150, deadline=None)
@given(vectors, st.sampled_from(CODECS), st.sampled_from([1.0, 1e-3, 1e-7, 1e-36]), st.sampled_from([0.0, 1.0, -7e4]))
def test_dense_torch_backend_writes_and_reads_kernel_bytes(
    device: str, x: np.ndarray, codec: Integers, factor: float, shift: float
) -> None:
    x = (x * np.float32(factor)).clip(-3e38, 3e38) + np.float32(shift)
    payload = encode(codec, x)
    assert torch_backend.encode(codec, torch.from_numpy(x).to(device), SEED).cpu().numpy().tobytes() == payload
    back = np.zeros_like(x)
    codec.decode(payload, back)
    assert dense_decode(codec, tensor(payload, device), x.size).cpu().numpy().tobytes() == back.tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.spec)
def test_dense_torch_mean_has_kernel_bits(codec: Integers, device: str) -> None:
    n, weights = 3001, [3.0, 0.5, 1e6]
    rng = np.random.default_rng(4)
    payloads = [
        encode(codec, (rng.standard_t(3, n) * 10.0 ** rng.uniform(-9, 5, n)).astype(np.float32)) for _ in weights
    ]
    out = np.zeros(n, np.float32)
    codec.mean(payloads, weights, out)
    found = dense_mean(codec, [tensor(payload, device) for payload in payloads], weights, n)
    assert found.cpu().numpy().tobytes() == out.tobytes()
    with pytest.raises(ValueError, match="weights"):
        dense_mean(codec, [tensor(payloads[0], device)], [0.0], n)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(CODECS), st.integers(1, 60), st.data())
def test_dense_torch_backend_refuses_what_kernels_refuse(codec: Integers, n: int, data: st.DataObject) -> None:
    payload = bytearray(encode(codec, np.random.default_rng(n).standard_normal(n).astype(np.float32)))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] = data.draw(st.sampled_from([0, 0x80, 0xFF, 0x7C, 0xFC, payload[at] ^ 0x80, payload[at] ^ 0x10]))
    try:
        codec.check(payload, n)
    except CodecError as error:
        with pytest.raises(CodecError):
            dense_decode(codec, tensor(bytes(payload), "cpu"), n)
        assert error.reason in ("encoding", "not finite")
    else:
        dense_decode(codec, tensor(bytes(payload), "cpu"), n)


def test_dense_torch_backend_refuses_misshaped_tensors() -> None:
    with pytest.raises(CodecError, match="not finite"):
        torch_backend.encode(Int8(), torch.tensor([1.0, float("nan")]))
    with pytest.raises(CodecError, match="expected"):
        dense_decode(Int4(), torch.zeros(9, dtype=torch.uint8), 16)
    with pytest.raises(ValueError, match="flat float32"):
        torch_backend.encode(Int4(), torch.zeros(4, 4))
    with pytest.raises(ValueError, match="flat uint8"):
        dense_decode(Int4(), torch.zeros(10), 16)


def test_dense_torch_stochastic_rounding_equals_the_reference() -> None:
    index = np.arange(5000, dtype=np.uint64)
    found = torch_backend.uniform(torch.arange(5000), SEED).numpy()
    assert found.tobytes() == reference.uniform(index, SEED).tobytes()
