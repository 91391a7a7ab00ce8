"""The top-k codec in torch: the same selections and values as the kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.parameter_chunks import Chunks
from thinwire.compression.sparse import mean, torch_backend
from thinwire.compression.sparse.topk import Sparse

from benchmarks.compression.torchmeans import sparse_mean, sparse_scatter

SHAPES = (("a", (130, 70)), ("b", (5,)), ("c", ()), ("d", (0, 3)), ("e", (1, 1)), ("f", (3, 5, 7)), ("h", (300,)))
SCALES = {"t3": 1.0, "ties": 1.0, "too small": 1e-20, "too large": 1e30, "subnormal": 1e-41}
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
codecs = st.builds(
    lambda chunk, k, values, indices: Sparse(min(k, chunk), chunk, values, indices),
    st.sampled_from([256, 4096]),
    st.sampled_from([1, 3, 64, 256, 1500, 4096]),
    st.sampled_from(["2bit", "1bit"]),
    st.sampled_from(["rice", "fixed"]),
)


def draw(kind: str, n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.integers(-2, 3, n) if kind == "ties" else rng.standard_t(3, n)
    return (values * SCALES[kind]).astype(np.float32)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(codecs, st.sampled_from(sorted(SCALES)), st.integers(0, 9))
def test_sparse_torch_backend_equals_kernels(device: str, codec: Sparse, kind: str, seed: int) -> None:
    chunks = Chunks((*SHAPES, ("z", (64, 192))), codec.chunk)
    a = draw(kind, chunks.total, seed)
    payload = codec.encode(codec.select(a, chunks))
    selected = torch_backend.select(codec, torch.from_numpy(a).to(device), chunks)
    assert codec.encode(selected) == payload
    out, moved = a.copy(), torch.from_numpy(a.copy()).to(device)
    for scale in (1.0, -0.3):
        selected.scatter(out, scale)
        sparse_scatter(codec.decode(payload, chunks), moved, scale)
        assert moved.cpu().numpy().tobytes() == out.tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("denominator", mean.DENOMINATORS)
def test_sparse_torch_mean_has_kernel_bits(device: str, denominator: str) -> None:
    chunks, weights = Chunks((*SHAPES, ("z", (64, 192)))), [1.0, 0.0, 2.5, 0.7]
    for codec in (Sparse(), Sparse(700, values="1bit"), Sparse(4096)):
        selected = [codec.select(draw("t3", chunks.total, i) * np.float32(3**i), chunks) for i in range(4)]
        for clip in (False, True):
            expected = mean.mean(selected, weights, chunks, denominator, clip)
            found = sparse_mean(selected, weights, chunks, device, denominator, clip)
            assert found.cpu().numpy().tobytes() == expected.tobytes()


def test_sparse_torch_backend_splits_large_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "GROUP", 2)
    chunks, codec = Chunks((("m", (300, 200)),)), Sparse()
    a = draw("ties", chunks.total)
    selected = torch_backend.select(codec, torch.from_numpy(a), chunks)
    assert codec.encode(selected) == codec.encode(codec.select(a, chunks))


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_sparse_torch_backend_refuses_non_finite_and_misshaped_tensors(bad: float) -> None:
    chunks = Chunks(SHAPES)
    for at in (0, 9106, chunks.total - 1):
        a = torch.from_numpy(draw("t3", chunks.total))
        a[at] = bad
        with pytest.raises(CodecError) as caught:
            torch_backend.select(Sparse(), a, chunks)
        assert caught.value.reason == "not finite"
    for wrong in (a[1:], a.double(), a.repeat(2)[::2]):
        with pytest.raises(ValueError):
            torch_backend.select(Sparse(), wrong, chunks)
    with pytest.raises(ValueError):
        torch_backend.select(Sparse(8, 256), a, chunks)
