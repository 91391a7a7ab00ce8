import pytest
import torch
from thinwire.compression.activations.subspace import basis
from thinwire.compression.activations.subspace import table as embeddings
from thinwire.compression.boundary_codec import Boundary
from thinwire.compression.core.codec import CodecError
from thinwire.compression.registry import SpecError

WIDTH, VOCABULARY, SEED = 64, 300, 7
SPECS = {"fp32": 0.0, "bf16": 0.004, "fp16": 0.001, "rows(bits=8)": 0.01, "rows(bits=4)": 0.15, "tah": 0.15}


def sample(seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(2, 5, WIDTH, generator=g), torch.randint(0, VOCABULARY, (2, 5), generator=g)


def boundary(spec):
    return Boundary(spec, WIDTH, VOCABULARY, SEED)


@pytest.mark.parametrize("spec", SPECS)
def test_boundary_round_trips_within_codec_error_and_stated_size(spec):
    one, (x, _) = boundary(spec), sample()
    assert one.spec == boundary(one.spec).spec and one.confined == 0
    for backward in (False, True):
        payload = one.pack(x, backward=backward)
        assert len(payload) == one.nbytes(2, 5, backward=backward)
        back, tokens = one.unpack(payload, 2, 5, backward=backward)
        limit = min(SPECS[spec], 0.01) if backward else SPECS[spec]
        assert back.shape == x.shape and tokens is None
        assert float((back - x).norm() / x.norm()) <= limit
        assert one.pack(x, backward=backward) == payload, "a retried micro-batch is the same"


def test_subspace_boundary_uses_tokens_and_bridges_missing_stage():
    one, (noise, tokens) = boundary("subspace(k=8)"), sample()
    u, table = torch.from_numpy(basis(WIDTH, 8, SEED)), torch.from_numpy(embeddings(VOCABULARY, WIDTH, SEED))
    x = table[tokens] + noise[..., :8] @ u.T
    payload = one.pack(x, tokens, backward=False)
    assert one.confined == 8 and len(payload) == 10 * (16 + 2) == one.nbytes(2, 5, backward=False)
    back, ids = one.unpack(payload, 2, 5, backward=False)
    assert torch.equal(ids, tokens) and float((back - x).norm() / x.norm()) < 0.004
    again, _ = one.unpack(one.pack(back, ids, backward=False), 2, 5, backward=False)
    assert float((again - back).norm() / back.norm()) < 1e-3
    gradient = one.pack(noise, backward=True)
    assert len(gradient) == 160
    found, none = one.unpack(gradient, 2, 5, backward=True)
    inside = noise @ u @ u.T
    assert none is None and float((found - inside).norm() / inside.norm()) < 0.004


@pytest.mark.parametrize("spec", [*SPECS, "subspace(k=8)"])
@pytest.mark.parametrize("backward", [False, True])
def test_boundary_refuses_invalid_payloads(spec, backward):
    one, (x, tokens) = boundary(spec), sample()
    payload = one.pack(x, tokens, backward=backward)
    for bad in (payload[:-1], payload + b"\0", b"", payload * 2):
        with pytest.raises(CodecError):
            one.unpack(bad, 2, 5, backward=backward)
    with pytest.raises(CodecError):
        one.unpack(b"\xff" * len(payload), 2, 5, backward=backward)
    for value in (float("nan"), float("inf")):
        spoiled = x.clone()
        spoiled[1, 2, 3] = value
        with pytest.raises(CodecError, match="finite"):
            one.pack(spoiled, tokens, backward=backward)


@pytest.mark.parametrize("spec", ["topk(k=4)", "powersgd(rank=2)", "int8(stochastic=1)", "nothing", "rows(bits=7)"])
def test_boundary_with_non_activation_codec_is_a_manifest_error(spec):
    with pytest.raises(SpecError):
        boundary(spec)
