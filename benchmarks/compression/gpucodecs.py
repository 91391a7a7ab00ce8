"""The GPU's part of benchmarks/compression/codecspeed.py, in GB/s of fp32 read.

Rows "encode" and "average" stay on the device. Rows "contribution" are what a peer does with a model on the device: by "device"
it copies the outer parameters there, subtracts, encodes, and copies the payload to the host; by "host" it copies the model
to the host, subtracts and encodes there with one thread. Both write the same bytes, which is checked.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from thinwire.compression import device as encoding
from thinwire.compression import registry
from thinwire.compression.core.parameter_chunks import Chunks
from thinwire.compression.core.types import Floats
from thinwire.compression.dense import torch_backend
from thinwire.compression.dense.blockint import Integers
from thinwire.compression.sparse.topk import Selected, Sparse
from torch import Tensor

from benchmarks.compression.torchmeans import dense_mean

CODECS = (Integers(8), Integers(8, 4096), Integers(4), Integers(4, asymmetric=True), Integers(3))
PEERS = 4


def measure(seed: int, repeats: int, device: str = "cuda", elements: int = 1 << 28) -> dict[str, float]:
    """Medians by row, of a gigabyte that is and stays on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(elements, generator=generator, device=device)
    target = torch.empty_like(x)
    acts: dict[str, tuple[Callable[[], object], int]] = {"copy": (lambda: target.copy_(x), 1)}
    for codec in CODECS:
        payload = torch_backend.encode(codec, x)
        acts[f"{codec.spec} encode"] = (partial(torch_backend.encode, codec, x), 1)
        acts[f"{codec.spec} average"] = (
            partial(dense_mean, codec, [payload] * PEERS, [1.0] * PEERS, x.numel()),
            PEERS,
        )
    acts |= contributions(x, target)
    times: dict[str, list[float]] = {name: [] for name in acts}
    for turn in range(repeats + 1):
        for name, (act, _) in acts.items():
            _wait(device)
            start = time.perf_counter()
            act()
            _wait(device)
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: reads * x.nbytes / statistics.median(times[name]) / 1e9 for name, (_, reads) in acts.items()}


def contributions(model: Tensor, delta: Tensor) -> dict[str, tuple[Callable[[], object], int]]:
    """Return the rows of contributions of a flat model. delta: memory on the device for its change."""
    theta = model.cpu().numpy() * np.float32(1.01)
    host = np.empty_like(theta)
    acts: dict[str, tuple[Callable[[], object], int]] = {}
    for codec in CODECS[:3:2]:
        out = [np.empty(codec.nbytes(theta.size), np.uint8) for _ in range(2)]
        encoders = (
            partial(_by_device, codec, theta, model, delta, out[0]),
            partial(_by_host, codec, theta, model, host, out[1]),
        )
        for name, act in zip(("device", "host"), encoders, strict=True):
            act()
            acts[f"{codec.spec} contribution by {name}"] = act, 1
        if not np.array_equal(out[0], out[1]):
            raise RuntimeError(f"{codec.spec}: device and host write different bytes")
    sparse, width = registry.parse("topk(k=64,chunk=4096)|2bit|rice"), 4096
    assert isinstance(sparse, Sparse)
    chunks = Chunks((("w", (theta.size // width, width)),))

    def select_by_device() -> bytes:
        chosen = encoding.select(sparse, lambda section: section.gather(theta), chunks, model.device)
        assert isinstance(chosen, Selected)
        return sparse.encode(chosen)

    selections = select_by_device, lambda: sparse.encode(sparse.select(theta, chunks))
    if selections[0]() != selections[1]():
        raise RuntimeError("device and host select different elements")
    for name, select in zip(("device", "host"), selections, strict=True):
        acts[f"{sparse.spec} contribution by {name}"] = select, 1
    return acts


def _by_device(codec: Integers, theta: Floats, model: Tensor, delta: Tensor, out: NDArray[np.uint8]) -> None:
    delta.copy_(model)
    encoding.subtract_from(theta, delta)
    encoding.encode(codec, delta, out)


def _by_host(codec: Integers, theta: Floats, model: Tensor, delta: Floats, out: NDArray[np.uint8]) -> None:
    torch.from_numpy(delta).copy_(model)
    encoding.subtract_from(theta, delta)
    encoding.encode(codec, delta, out)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
