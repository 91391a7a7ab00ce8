"""The GPU's part of benchmarks/compression/codecspeed.py: encoding and averaging on the device, in GB/s of fp32 read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from thinwire.compression.dense import torch_backend
from thinwire.compression.dense.blockint import Integers

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


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
