from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.reference.dct import forward, inverse
from thinwire.compression import registry
from thinwire.compression.core import parameter_chunks
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.parameter_chunks import Chunks
from thinwire.compression.kernels import block_dct, dct
from thinwire.compression.kernels.threads import Team
from thinwire.compression.sparse import demo
from thinwire.compression.sparse import mean as sparsemean
from thinwire.compression.sparse.demo import Demo

SHAPES = (("a.bias", (5,)), ("a.weight", (70, 65)), ("b.weight", (64, 128)), ("z.scale", (130,)))
CHUNKS = Chunks(SHAPES)


def gaussian(seed: int, chunks: Chunks = CHUNKS) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(chunks.total).astype(np.float32)


def back(coefficients: np.ndarray, chunks: Chunks) -> np.ndarray:
    return synthesised(coefficients, chunks, np.zeros(chunks.total, np.float32))


def analysed(flat: np.ndarray, chunks: Chunks, team: Team = sparsemean.ALONE) -> np.ndarray:
    return np.concatenate([demo.analyse(section, section.gather(flat), team) for section in chunks.sections])


def synthesised(
    coefficients: np.ndarray, chunks: Chunks, out: np.ndarray, scale: float = 1.0, team: Team = sparsemean.ALONE
) -> np.ndarray:
    for section, spectral in zip(chunks.sections, demo.spectrum(chunks).sections, strict=True):
        values = section.gather(out)
        demo.synthesise(section, spectral.gather(coefficients), values, scale, team)
        section.put(values, out)
    return out


def mean(contributions: list[demo.Coefficients], weights: list[float], chunks: Chunks, *more: Any) -> np.ndarray:
    return sparsemean.flat(demo.means(contributions, weights, chunks, *more), chunks)


def exact(flat: np.ndarray, chunks: Chunks) -> np.ndarray:
    """All coefficients, by matrix products in float64."""
    d = dct.matrix(chunks.side).astype(np.float64)
    blocks = chunks.cut(flat).reshape(-1, chunks.side, chunks.side).astype(np.float64)
    return (d.T @ blocks @ d).reshape(chunks.count, chunks.chunk)


def test_demo_transform_inverts() -> None:
    flat = gaussian(1)
    coefficients = analysed(flat, CHUNKS)
    assert coefficients.shape == (demo.spectrum(CHUNKS).total,)
    assert np.abs(coefficients.reshape(CHUNKS.count, -1) - exact(flat, CHUNKS)).max() < 1e-5
    assert np.abs(back(coefficients, CHUNKS) - flat).max() < 1e-5


def test_demo_kernels_equal_reference_for_any_thread_count() -> None:
    chunks = Chunks((("a", (100, 300)), ("b", (33, 1)), ("c", (1, 40)), ("v", (1000,)), ("w", (24,))), 256)
    flat = gaussian(8, chunks)
    blocks = chunks.cut(flat).reshape(-1, 16, 16)
    blocks, joined = forward(blocks), np.empty(chunks.total, np.float32)
    chunks.join(inverse(blocks).reshape(chunks.count, -1), joined)
    for threads in (1, 3):
        with Team(threads) as team:
            assert analysed(flat, chunks, team).tobytes() == blocks.tobytes()
            out = synthesised(blocks.reshape(-1), chunks, flat.copy(), -0.75, team)
        assert out.tobytes() == (flat + np.float32(-0.75) * joined).tobytes()


def test_demo_sends_largest_coefficients_of_each_block() -> None:
    flat = gaussian(2)
    selected = Demo(k=9, indices="fixed").select(flat, CHUNKS).selected
    magnitudes = np.abs(exact(flat, CHUNKS))
    picked = np.concatenate([part.indices.reshape(-1, 9) for part in selected.parts])
    for row, chosen in zip(magnitudes, picked, strict=True):
        assert set(chosen.tolist()) == set(np.argsort(row)[-9:].tolist())


def test_demo_with_all_coefficients_averages_the_momenta_exactly() -> None:
    # Coefficients are multiples of 1/16 below 2**7, which the dense mode's fp16 holds exactly, so only the transforms
    # round, in float32. This needs whole blocks; padding would change their coefficients.
    chunks, rng, codec = Chunks((("m", (64, 128)), ("v", (4096,)))), np.random.default_rng(3), Demo(k=4096)
    momenta, contributions = [], []
    for _ in range(3):
        levels = rng.integers(-2000, 2001, chunks.total) / 16
        momentum = back(levels.astype(np.float32), chunks)
        momenta.append(momentum.copy())
        contributions.append(codec.decode(codec.encode(codec.select(momentum, chunks)), chunks))
        contributions[-1].scatter(momentum, -1.0)
        assert np.abs(momentum).max() < 4e-6 * np.abs(momenta[-1]).max()
    average = mean(contributions, [1.0, 1.0, 1.0], chunks, "mean", partial(sparsemean.means, clip=False))
    assert np.abs(average - np.mean(momenta, axis=0)).max() < 4e-6 * np.abs(average).max()


def test_demo_with_all_coefficients_of_padded_blocks_leaves_fp16_rounding() -> None:
    momentum = gaussian(6)
    before = np.linalg.norm(momentum)
    Demo(k=4096).select(momentum, CHUNKS).scatter(momentum, -1.0)
    assert np.linalg.norm(momentum) < 2**-11 * before


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    k=st.sampled_from([1, 2, 31, 255, 256]),
    values=st.sampled_from(["1bit", "2bit"]),
    indices=st.sampled_from(["rice", "fixed"]),
)
def test_demo_payload_decodes_to_selection(seed: int, k: int, values: str, indices: str) -> None:
    chunks = Chunks((("m", (17, 30)), ("v", (3,))), 256)
    codec, flat = Demo(k, 256, values, indices), gaussian(seed, chunks)
    assert registry.parse(codec.spec) == codec
    selected = codec.select(flat, chunks)
    payload = codec.encode(selected)
    assert len(payload) == codec.nbytes(selected) <= codec.bound(chunks)
    there, here = np.zeros(chunks.total, np.float32), np.zeros(chunks.total, np.float32)
    selected.scatter(here)
    codec.decode(payload, chunks).scatter(there)
    assert there.tobytes() == here.tobytes()
    assert codec.encode(codec.decode(payload, chunks)) == payload


def test_demo_removes_sent_coefficients_from_momentum() -> None:
    momentum, gradient, codec = np.zeros(CHUNKS.total, np.float32), gaussian(4), Demo(k=32)
    momentum += 2 * gradient
    before = momentum.astype(np.float64)
    selected = codec.select(momentum, CHUNKS)
    sent = np.zeros(CHUNKS.total, np.float32)
    selected.scatter(sent)
    selected.scatter(momentum, -1.0)
    assert np.abs(momentum + sent - before).max() < 1e-5
    assert 0 < (momentum.astype(np.float64) ** 2).sum() < (before**2).sum()


def test_demo_needs_few_coefficients_for_smooth_momentum() -> None:
    i, j = np.meshgrid(np.arange(64), np.arange(64), indexing="ij")
    smooth = (np.sin(i / 17) * np.cos(j / 23)).astype(np.float32).reshape(-1)
    chunks, rest = Chunks((("m", (64, 64)),)), smooth.copy()
    for _ in range(4):
        Demo(k=32).select(rest, chunks).scatter(rest, -1.0)
    assert (rest**2).sum() < 0.02 * (smooth**2).sum()


def test_demo_mean_divides_by_senders_of_each_coefficient() -> None:
    chunks = Chunks((("m", (64, 64)),))
    waves = []
    for frequency in (3, 40):
        wave = np.zeros((1, 64, 64), np.float32)
        wave[0, frequency, 5] = 8.0
        waves.append(back(wave.reshape(-1), chunks))
    codec = Demo(k=1)
    sent = [codec.select(wave, chunks) for wave in waves]
    assert np.abs(mean(sent, [1.0, 3.0], chunks, "contributor_mean") - (waves[0] + waves[1])).max() < 1e-3
    weighed = (waves[0] + 3 * waves[1]) / 4
    assert np.abs(mean(sent, [1.0, 3.0], chunks, "mean") - weighed).max() < 1e-3


def test_demo_step_uses_sign_and_decoupled_decay() -> None:
    theta = np.array([1.0, -2.0, 4.0], np.float32)
    (section,) = Chunks((("v", (3,)),)).sections
    demo.step(theta, iter([(section, np.array([1e-9, -3.0, 0.0], np.float32))]), 0.25, 0.5)
    assert theta.tolist() == [0.625, -1.5, 3.5]


def test_demo_refuses_non_finite_values() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        flat = gaussian(5)
        flat[100] = bad
        with pytest.raises(CodecError, match="finite"):
            Demo().select(flat, CHUNKS)


def test_demo_checks_its_parameters() -> None:
    for bad in (dict(k=0), dict(k=257, chunk=256), dict(chunk=100), dict(values="3bit"), dict(indices="gray")):
        with pytest.raises(ValueError):
            Demo(**bad)


def test_demo_warm_up_compiles_every_kernel() -> None:
    demo.warm_up()
    kernels = (block_dct.analyse, block_dct.synthesise)
    before = [len(kernel.nopython_signatures) for kernel in kernels]
    flat = gaussian(9)
    selected = Demo().select(flat, CHUNKS)
    selected.scatter(flat, -1.0)
    mean([selected], [1.0], CHUNKS)
    assert [len(kernel.nopython_signatures) for kernel in kernels] == before


def test_demo_has_the_same_bits_strip_by_strip(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, found = Demo(k=9), []
    for strip in (1 << 18, 1):
        monkeypatch.setattr(parameter_chunks, "STRIP", strip)
        sent = [codec.select(gaussian(seed), CHUNKS) for seed in (1, 2, 3)]
        found.append([*map(codec.encode, sent), mean(sent, [1.0, 2.0, 3.0], CHUNKS).tobytes()])
    assert found[0] == found[1]
