import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.reference.activations import Crossing
from thinwire.compression import registry
from thinwire.compression.activations import subspace
from thinwire.compression.activations.subspace import Subspace
from thinwire.compression.core.codec import CodecError
from torch import Tensor

WIDTH, K, VOCABULARY, LAYERS = 32, 8, 40, 3


class Stages:
    """Small pre-norm transformer in float64 whose reparametrised weights write only into span(U)."""

    def __init__(self, reparametrised: bool) -> None:
        g = torch.Generator().manual_seed(1)
        self.u = torch.linalg.qr(torch.from_numpy(subspace.basis(WIDTH, K, 3)).double())[0]
        self.fixed = torch.from_numpy(subspace.table(VOCABULARY, WIDTH, 3)).double()
        self.parameters: dict[str, Tensor] = {}

        def new(name: str, *shape: int) -> Tensor:
            made = torch.randn(*shape, generator=g, dtype=torch.float64) * 0.3
            self.parameters[name] = made.requires_grad_()
            return made

        inner = K if reparametrised else WIDTH
        self.reparametrised = reparametrised
        self.embed = new("embed", VOCABULARY, inner)
        for i in range(LAYERS):
            new(f"qkv{i}", WIDTH, 3 * WIDTH)
            new(f"out{i}", WIDTH, inner)
            new(f"up{i}", WIDTH, 4 * WIDTH)
            new(f"down{i}", 4 * WIDTH, inner)
        new("head", WIDTH, VOCABULARY)

    def _out(self, y: Tensor) -> Tensor:
        return y @ self.u.T if self.reparametrised else y

    def loss(self, tokens: Tensor, crossing: bool) -> Tensor:
        p, x0 = self.parameters, self.fixed[tokens]
        x = x0 + self._out(p["embed"][tokens])
        norm = torch.nn.functional.layer_norm
        for i in range(LAYERS):
            q, k, v = (norm(x, (WIDTH,)) @ p[f"qkv{i}"]).chunk(3, dim=-1)
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self._out(y @ p[f"out{i}"])
            x = x + self._out(torch.nn.functional.gelu(norm(x, (WIDTH,)) @ p[f"up{i}"]) @ p[f"down{i}"])
            if crossing:
                x = Crossing.apply(x, x0, self.u)  # type: ignore[no-untyped-call]
        logits = norm(x, (WIDTH,)) @ p["head"]
        return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))

    def gradients(self, tokens: Tensor, crossing: bool) -> tuple[float, list[Tensor]]:
        loss = self.loss(tokens, crossing)
        return loss.item(), list(torch.autograd.grad(loss, list(self.parameters.values())))


def difference(reparametrised: bool) -> tuple[float, float]:
    """Return the differences of loss and (relative, maximum) gradients, with and without boundaries."""
    model = Stages(reparametrised)
    tokens = torch.randint(0, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(2))
    plain, expected = model.gradients(tokens, False)
    crossed, found = model.gradients(tokens, True)
    errors = [float((a - b).norm() / a.norm()) for a, b in zip(expected, found, strict=True)]
    return abs(plain - crossed), max(errors)


def test_subspace_boundaries_preserve_loss_and_gradient_of_confined_weights() -> None:
    loss, gradient = difference(True)
    assert loss < 1e-14 and gradient < 1e-13


def test_subspace_boundaries_change_loss_and_gradient_of_free_weights() -> None:
    loss, gradient = difference(False)
    assert loss > 1e-3 and gradient > 0.3


def test_subspace_boundary_bridges_missing_stage() -> None:
    u = torch.from_numpy(subspace.basis(WIDTH, K, 3)).double()
    u = torch.linalg.qr(u)[0]
    x0, h = torch.randn(5, WIDTH, dtype=torch.float64), torch.randn(5, K, dtype=torch.float64)
    again = subspace.compress(subspace.restore(h, x0, u), x0, u)
    assert float((again - h).abs().max()) < 1e-14


@pytest.mark.parametrize(("width", "k"), [(1, 1), (8, 8), (64, 5), (256, 40)])
def test_subspace_basis_is_orthonormal_and_portable(width: int, k: int) -> None:
    u = subspace.basis(width, k, 9)
    assert u.shape == (width, k) and np.abs(u.T.astype(np.float64) @ u - np.eye(k)).max() < 1e-6
    assert np.array_equal(u, subspace.basis(width, k, 9))
    assert width == 1 or not np.array_equal(u, subspace.basis(width, k, 10))
    for bad in (0, width + 1):
        with pytest.raises(ValueError):
            subspace.basis(width, bad, 9)


def test_subspace_payload_bits_are_portable() -> None:
    drawn = (subspace.basis(96, 12, 5), subspace.table(50, 24, 5))
    digests = [hashlib.sha256(array.astype("<f4").tobytes()).hexdigest()[:16] for array in drawn]
    assert digests == ["60f72b49963e1a7f", "21bc254c5aa3af4a"]


def test_subspace_table_has_small_values() -> None:
    assert subspace.table(500, 64, 1).std() == pytest.approx(0.02, rel=0.02)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(0, 9),
    vocabulary=st.sampled_from([0, 1, 300, 65536, 65537, 200_000]),
)
def test_subspace_payload_round_trips(seed: int, rows: int, vocabulary: int) -> None:
    rng, codec = np.random.default_rng(seed), Subspace(6)
    h = rng.standard_normal((rows, 6)).astype(np.float32)
    tokens = rng.integers(0, vocabulary, rows) if vocabulary else None
    payload = codec.encode(h, tokens, vocabulary)
    assert len(payload) == codec.nbytes(rows, vocabulary)
    back, ids = codec.decode(payload, rows, vocabulary)
    assert (back == torch.from_numpy(h).bfloat16().float().numpy()).all()
    assert ids is tokens is None or (ids == tokens).all()
    assert codec.encode(back, ids, vocabulary) == payload


def test_subspace_payload_sizes() -> None:
    assert Subspace(40).nbytes(1, 50_000) == 82
    assert 2 * 1024 / Subspace(160).nbytes(1, 50_000) == pytest.approx(6.36, abs=0.01)
    assert Subspace(40).nbytes(1, 65_537) == 84
    assert registry.parse("subspace(k=40)") == Subspace(40) == registry.parse(Subspace(40).spec)


def test_subspace_codec_refuses_invalid_payloads() -> None:
    codec = Subspace(4)
    payload = codec.encode(np.ones((2, 4), np.float32), np.array([1, 299]), 300)
    codec.decode(payload, 2, 300)
    for bad, said in (
        (payload[:-1], "bytes"),
        (payload + b"\0", "bytes"),
        (payload[:2] + b"\x2c\x01" + payload[4:], "vocabulary"),
        (payload[:-2] + b"\x80\x7f", "finite"),
        (payload[:-2] + b"\xc0\xff", "finite"),
    ):
        with pytest.raises(CodecError, match=said):
            codec.decode(bad, 2, 300)
    for value in (np.nan, np.inf, np.float32(3.4e38)):
        h = np.ones((2, 4), np.float32)
        h[0, 0] = value
        with pytest.raises(CodecError, match="finite"):
            codec.encode(h)
    for wrong in (np.ones((2, 5), np.float32), np.ones((2, 4)), np.ones(4, np.float32)):
        with pytest.raises(ValueError):
            codec.encode(wrong)
    with pytest.raises(ValueError, match="vocabulary"):
        codec.encode(np.ones((1, 4), np.float32), np.array([300]), 300)
    with pytest.raises(ValueError, match="one for each row"):
        codec.encode(np.ones((1, 4), np.float32), np.array([1, 2]), 300)
