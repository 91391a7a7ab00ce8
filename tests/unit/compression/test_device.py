"""The choice between CPU kernels and torch for contributions, and the bytes that both write."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from thinwire.collectives import deterministic_rounding
from thinwire.compression import device, registry
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.parameter_chunks import Chunks, Section

CHUNKS = Chunks((("a", (130, 70)), ("b", (5,)), ("c", (64, 192)), ("d", (300,))))
CUDA = SimpleNamespace(type="cuda")
"""Stands for a device that this machine may not have."""


def draw(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(3, n).astype(np.float32)


@pytest.mark.parametrize("spec", ["int8", "int4(asymmetric=1)", "int3(stochastic=1)", "topk", "demo"])
def test_codecs_with_torch_implementation_encode_on_cuda_only(spec: str) -> None:
    codec = registry.parse(spec)
    assert device.encoding_device(codec, CUDA) is CUDA  # type: ignore[arg-type, comparison-overlap]
    assert device.encoding_device(codec, device.HOST) is None
    assert device.encoding_device(codec, torch.device("meta")) is None


@pytest.mark.parametrize("spec", ["fp32", "fp16", "bf16", "e3m0", "powersgd"])
def test_other_codecs_encode_on_the_host(spec: str) -> None:
    assert device.encoding_device(registry.parse(spec), CUDA) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", ["int8", "int4(asymmetric=1)", "int3(block=64,stochastic=1)"])
def test_dense_payload_of_a_tensor_equals_that_of_the_array(spec: str) -> None:
    codec = registry.dense(spec)
    x = draw(1, 5_000)
    expected, found = np.zeros((2, codec.nbytes(x.size)), np.uint8)
    deterministic_rounding.encode(codec, x, expected)
    deterministic_rounding.encode(codec, torch.from_numpy(x), found)
    assert found.tobytes() == expected.tobytes() != bytes(expected.size)


@pytest.mark.parametrize("spec", ["topk(k=64)|2bit|rice", "topk(k=9)|1bit|fixed", "demo(k=32)|2bit|rice"])
def test_selection_on_a_device_equals_that_of_the_kernels(spec: str) -> None:
    codec: object = registry.parse(spec)
    a = draw(2, CHUNKS.total)
    expected = codec.select(a, CHUNKS)  # type: ignore[attr-defined]
    found = device.select(codec, partial(Section.gather, flat=a), CHUNKS, device.HOST)  # type: ignore[arg-type]
    assert codec.encode(found) == codec.encode(expected)  # type: ignore[attr-defined]
    a[7] = np.inf
    with pytest.raises(CodecError):
        device.select(codec, partial(Section.gather, flat=a), CHUNKS, device.HOST)  # type: ignore[arg-type]


@pytest.mark.parametrize("where", [None, device.HOST])
def test_vectors_subtract_and_report_values_that_are_not_finite(where: torch.device | None) -> None:
    x = device.empty(100, where)
    x[:] = device.placed(draw(3, 100), where)
    device.subtract_from(draw(4, 100), x)
    assert device.finite(x) and np.array_equal(np.asarray(x), draw(4, 100) - draw(3, 100))
    x[3] = float("nan")
    assert not device.finite(x)
