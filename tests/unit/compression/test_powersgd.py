import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.compression import registry
from thinwire.compression.core.parameter_chunks import Chunks
from thinwire.compression.kernels import thin_factors
from thinwire.compression.powersgd import LowRank, PowerSGD, warm_up

SHAPES = (("a.bias", (40,)), ("a.weight", (64, 96)), ("b.small", (6, 6)), ("c.weight", (50, 7, 9)))
CHUNKS = Chunks(SHAPES)
CODEC = PowerSGD(4)


def gaussian(seed: int, n: int = CHUNKS.total) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def mean(rows: list[np.ndarray], weights: list[float]) -> np.ndarray:
    return np.average(np.array(rows, np.float64), axis=0, weights=weights).astype(np.float32)


def play(peers: list[LowRank], deltas: list[np.ndarray], weights: list[float]) -> list[np.ndarray]:
    """Play one round of all peers; return the result of each."""
    first = mean([peer.prepare(delta) for peer, delta in zip(peers, deltas, strict=True)], weights)
    second = mean([peer.second_vector(first) for peer in peers], weights)
    return [peer.commit(second) for peer in peers]


def test_powersgd_sizes_and_uncompressed_tensors() -> None:
    wide = Chunks((("w", (512, 256)),))
    assert 512 * 256 / (CODEC.first_size(wide) + CODEC.second_size(wide)) == pytest.approx(42.7, abs=0.04)
    # 6 × 6 gains nothing with rank 4, and a vector is no matrix.
    assert CODEC.first_size(CHUNKS) == 4 * (64 + 50) + 40 + 36
    assert CODEC.second_size(CHUNKS) == 4 * (96 + 63)
    assert registry.parse("powersgd(rank=4)") == CODEC == registry.parse(CODEC.spec)
    for rank in (0, 257):
        with pytest.raises(ValueError, match="rank"):
            PowerSGD(rank)


def test_powersgd_factors_are_the_matrix_products() -> None:
    m, q = gaussian(1), CODEC.start(CHUNKS, 5)
    first = CODEC.project(m, q, CHUNKS)
    a = m[40 : 40 + 64 * 96].reshape(64, 96).astype(np.float64)
    p = first[: 4 * 64].reshape(4, 64)
    assert np.abs(p.T - a @ q[: 4 * 96].reshape(4, 96).T).max() < 1e-4
    CODEC.orthonormalise(first, CHUNKS)
    assert np.abs(p @ p.T - np.eye(4)).max() < 1e-6
    second = CODEC.project_back(m, first, CHUNKS)
    assert np.abs(second[: 4 * 96].reshape(4, 96) - p.astype(np.float64) @ a).max() < 1e-4
    # The projection of a on P's columns is the best there is within them.
    rest = CODEC.residual(m, first, second, CHUNKS)[40 : 40 + 64 * 96].reshape(64, 96)
    assert np.abs(p @ rest).max() < 1e-4
    assert (CODEC.residual(m, first, second, CHUNKS)[:40] == 0).all()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 4), rounds=st.integers(1, 4))
def test_powersgd_sent_values_and_residual_sum_to_the_delta(seed: int, count: int, rounds: int) -> None:
    rng = np.random.default_rng(seed)
    weights = list(rng.uniform(0.1, 2.0, count))
    peers = [LowRank(CODEC, CHUNKS, 1) for _ in range(count)]
    sent, given_ = np.zeros(CHUNKS.total), np.zeros(CHUNKS.total)
    for _ in range(rounds):
        deltas = [rng.standard_normal(CHUNKS.total).astype(np.float32) for _ in peers]
        results = play(peers, deltas, weights)
        assert all(result.tobytes() == results[0].tobytes() for result in results)
        assert all(peer.q.tobytes() == peers[0].q.tobytes() for peer in peers)
        sent += results[0]
        given_ += mean(deltas, weights)
    kept = mean([peer.residual for peer in peers], weights)
    assert np.abs(sent + kept - given_).max() < 2e-4


def test_powersgd_warm_start_finds_strongest_directions() -> None:
    rng, chunks = np.random.default_rng(2), Chunks((("w", (64, 96)),))
    u, v = np.linalg.qr(rng.standard_normal((64, 4)))[0], np.linalg.qr(rng.standard_normal((96, 4)))[0]
    delta = ((u * [8, 4, 2, 1]) @ v.T + 0.01 * rng.standard_normal((64, 96))).astype(np.float32).reshape(-1)
    best, q = 0.01 * np.sqrt(64 * 96), CODEC.start(chunks, 3)
    errors = []
    for _ in range(4):
        first = CODEC.project(delta, q, chunks)
        CODEC.orthonormalise(first, chunks)
        q = CODEC.project_back(delta, first, chunks)
        errors.append(np.linalg.norm(CODEC.rebuild(first, q, chunks) - delta))
    assert errors[-1] < 1.05 * best and errors[0] > 1.2 * errors[-1]


def test_powersgd_is_exact_for_low_rank_and_revives_dead_directions() -> None:
    rng, chunks = np.random.default_rng(4), Chunks((("w", (64, 96)),))
    peer = LowRank(CODEC, chunks, 3)
    one = np.outer(rng.standard_normal(64), rng.standard_normal(96)).astype(np.float32).reshape(-1)
    (result,) = play([peer], [one], [1.0])
    assert np.abs(result - one).max() < 1e-5
    (zero,) = play([peer], [np.zeros_like(one)], [1.0])
    assert np.abs(zero).max() < 1e-5
    full = (rng.standard_normal((64, 4)) @ rng.standard_normal((4, 96))).astype(np.float32).reshape(-1)
    for _ in range(30):
        (result,) = play([peer], [full - peer.residual], [1.0])
    assert np.linalg.norm(result - full) < 0.01 * np.linalg.norm(full)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_powersgd_orthonormalization_handles_any_matrix(rank: int) -> None:
    rng = np.random.default_rng(rank)
    cases = [np.zeros((rank, 20)), np.ones((rank, 20)), 1e30 * rng.standard_normal((rank, 20)), np.eye(rank, 20)]
    cases += [1e-30 * rng.standard_normal((rank, 20)), np.cumsum(1e-7 * rng.standard_normal((rank, 20)), axis=0) + 1]
    for case in cases:
        p = case.astype(np.float32)
        thin_factors.orthonormalise(p)
        wide = p.astype(np.float64)
        assert np.abs(wide @ wide.T - np.eye(rank)).max() < 1e-6


def test_powersgd_bits_are_portable() -> None:
    m = ((np.arange(CHUNKS.total) * 7919 % 2003 - 1001) / np.float32(512)).astype(np.float32)
    first = CODEC.project(m, CODEC.start(CHUNKS, 11), CHUNKS)
    CODEC.orthonormalise(first, CHUNKS)
    second = CODEC.project_back(m, first, CHUNKS)
    whole = first.astype("<f4").tobytes() + second.astype("<f4").tobytes()
    whole += CODEC.rebuild(first, second, CHUNKS).astype("<f4").tobytes()
    assert hashlib.sha256(whole).hexdigest()[:16] == "cacb4e7ede9acadb"


def test_powersgd_aborted_round_restores_delta_or_nothing() -> None:
    peer, twin = LowRank(CODEC, CHUNKS, 1), LowRank(CODEC, CHUNKS, 1)
    peer.second_vector(peer.prepare(gaussian(1)))
    peer.rollback()
    assert (peer.residual == 0).all() and (peer.q == twin.q).all() and not peer.pending
    peer.prepare(gaussian(1))
    peer.restore()
    assert (peer.residual == gaussian(1)).all() and (peer.q == twin.q).all()
    for call in (
        peer.restore,
        peer.rollback,
        lambda: peer.second_vector(gaussian(1)),
        lambda: peer.commit(gaussian(1)),
    ):
        with pytest.raises(RuntimeError):
            call()


@pytest.mark.parametrize("rule", ["drop", "restore"])
def test_powersgd_excluded_peer_keeps_residual_by_policy(rule: str) -> None:
    peer, other = LowRank(CODEC, CHUNKS, 1, rule), LowRank(CODEC, CHUNKS, 1)
    peer.prepare(gaussian(1))
    first = other.prepare(gaussian(2))
    peer.second_vector(first)
    second = other.second_vector(first)
    assert peer.commit(second, excluded=True).tobytes() == other.commit(second).tobytes()
    assert peer.q.tobytes() == other.q.tobytes()
    whole = bool((peer.residual == gaussian(1)).all())
    assert whole == (rule == "restore")


def test_powersgd_state_is_saved_and_loaded() -> None:
    peer, twin = LowRank(CODEC, CHUNKS, 1), LowRank(CODEC, CHUNKS, 2)
    play([peer], [gaussian(1)], [1.0])
    twin.load(peer.residual.copy(), peer.q.copy())
    assert play([peer], [gaussian(2)], [1.0])[0].tobytes() == play([twin], [gaussian(2)], [1.0])[0].tobytes()
    bad = peer.q.copy()
    bad[0] = np.nan
    for q in (bad, bad[1:], peer.q.astype(np.float64)):
        with pytest.raises(ValueError):
            twin.load(peer.residual, q)


def test_powersgd_refuses_non_finite_values() -> None:
    peer = LowRank(CODEC, CHUNKS, 1)
    for bad in (np.nan, np.inf):
        delta = gaussian(1)
        delta[7] = bad
        with pytest.raises(ValueError, match="finite"):
            peer.prepare(delta)
        assert not peer.pending


def test_powersgd_warm_up_compiles_every_kernel() -> None:
    warm_up()
    found = (thin_factors.project, thin_factors.project_back, thin_factors.accumulate, thin_factors.orthonormalise)
    before = [len(kernel.nopython_signatures) for kernel in found]
    play([LowRank(CODEC, CHUNKS, 1)], [gaussian(1)], [1.0])
    assert [len(kernel.nopython_signatures) for kernel in found] == before
