"""Sections confined to the subspace against the projected whole model."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.compression.activations import subspace
from thinwire.compression.boundary_codec import Boundary
from thinwire.compression.core.codec import CodecError
from thinwire.node.pipeline.model.frozen_embedding import FrozenEmbedding, nbytes
from thinwire.node.pipeline.model.held_stage import HeldStage
from thinwire.node.pipeline.model.section import ModelSection
from thinwire.node.pipeline.model.staged_model import StagedModel
from thinwire.node.pipeline.model.whole_model_view import WholeModelView
from thinwire.node.state.fragments import fragments_of
from thinwire.node.state.layout import layout_of
from thinwire.node.training.models.transformer import ModelConfig, Transformer
from thinwire.swarm.manifest.parser import parse

K, SEED, WIDTH, VOCAB = 4, 7, 16, 23
U = torch.from_numpy(subspace.basis(WIDTH, K, SEED))
WRITERS = ("attention.out.weight", "feedforward.out.weight")


def made(tied=True, layers=2):
    model = Transformer(ModelConfig(VOCAB, layers, WIDTH, 2, 12, tied=tied), 3)
    layout = layout_of(model)
    first = np.empty(layout.total, np.float32)
    layout.read(model, first)
    view = WholeModelView(model, layout, K, SEED)
    return ModelSection(model, range(layers), ends=True), layout, first, view


def read(projection, layout):
    out = np.full(layout.total, np.nan, np.float32)
    projection.read(0, layout.total, out)
    return out


@cache
def shared():
    """Projection for all draws."""
    return made()


def drawn(layout, seed=5):
    """Return a state as full replicas make it, in no subspace."""
    return np.random.default_rng(seed).normal(0, 0.1, layout.total).astype(np.float32)


def train(section, seed=1):
    """Change all trained parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in section.module.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("tied", [True, False])
def test_projected_model_reads_back_what_was_written(tied):
    _, layout, first, projection = made(tied)
    assert np.array_equal(read(projection, layout), first)
    projection.write(drawn(layout))
    assert np.array_equal(read(projection, layout), drawn(layout))


def test_projected_pseudo_gradient_stays_in_the_subspace():
    section, layout, _, projection = made()
    theta = drawn(layout)
    projection.write(theta)
    before = {name: parameter.detach().clone() for name, parameter in section.module.named_parameters()}
    train(section)
    delta = layout.split(read(projection, layout) - theta)
    for name, parameter in section.module.named_parameters():
        found, step = torch.from_numpy(delta[name]), parameter.detach() - before[name]
        if name.endswith(WRITERS):
            assert torch.allclose(found, U @ step, atol=1e-6)
        elif name == "embedding.weight":
            assert torch.allclose(found, step @ U.mT, atol=1e-6)
        else:
            assert torch.allclose(found, step, atol=1e-6)
        assert float(step.norm()) > 0.01


@pytest.mark.parametrize("tied", [True, False])
def test_projected_section_equals_projected_model(tied):
    section, layout, _, projection = made(tied)
    theta = drawn(layout)
    projection.write(theta)
    plain = Transformer(ModelConfig(VOCAB, 2, WIDTH, 2, 12, tied=tied), 3)
    layout.write(plain, theta)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.endswith(WRITERS):
                parameter.copy_(U @ U.mT @ parameter)
    tokens = torch.arange(12)[None] % VOCAB
    with torch.no_grad():
        # Of the embedding only the eighth bit is lost.
        assert torch.allclose(section.loss(section.front(tokens), tokens), plain(tokens, tokens)[1], rtol=2e-3)


def test_boundary_is_exact_for_drifted_embedding():
    section, layout, _, projection = made()
    before, host = projection.frozen, Boundary(f"subspace(k={K})", WIDTH, VOCAB, SEED)
    host.freeze(before.rows(VOCAB, WIDTH))
    projection.write(drawn(layout))
    assert projection.frozen.tag not in (0, before.tag)
    assert len(projection.frozen.payload) == nbytes(VOCAB, WIDTH)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        x = section.front(tokens)
    found = []
    for _ in range(2):
        found.append(host.unpack(host.pack(x, tokens, backward=False), 1, 12, backward=False)[0])
        host.freeze(FrozenEmbedding.of(projection.frozen.payload).rows(VOCAB, WIDTH))
    old, new = (float((one - x).norm() / x.norm()) for one in found)
    assert new < 0.004 < 0.1 < old


def test_frozen_rows_payload_determines_the_bits():
    frozen = FrozenEmbedding.encode(torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1)))
    again = FrozenEmbedding.of(frozen.payload)
    assert again == frozen and torch.equal(again.rows(VOCAB, WIDTH), frozen.rows(VOCAB, WIDTH))
    for bad in (frozen.payload[:-1], frozen.payload + b"\0", b"", b"\xff" * len(frozen.payload)):
        assert FrozenEmbedding.of(bad).tag != frozen.tag
        with pytest.raises(CodecError):
            FrozenEmbedding.of(bad).rows(VOCAB, WIDTH)
    with pytest.raises(CodecError):
        FrozenEmbedding.encode(torch.full((VOCAB, WIDTH), float("nan")))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_projected_model_reads_and_writes_any_range(data):
    section, layout, _, projection = shared()
    keep = data.draw(st.sampled_from([0.0, 0.25]))
    theta = drawn(layout, data.draw(st.integers(0, 9)))
    start = data.draw(st.integers(0, layout.total))
    stop = data.draw(st.integers(start, layout.total))
    projection.write(theta)
    train(section)
    before = read(projection, layout)
    expected = before.copy()
    expected[start:stop] = keep * before[start:stop] + (1 - keep) * theta[::-1][start:stop]
    projection.write(theta[::-1][start:stop].copy(), start, keep)
    assert np.allclose(read(projection, layout), expected, atol=1e-6)
    some = np.empty(stop - start, np.float32)
    projection.read(start, stop, some)
    assert np.allclose(some, expected[start:stop], atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_projected_stage_starts_with_whole_model_parameters(stage):
    manifest = parse(
        f"[model]\nlayers = 3\nwidth = {WIDTH}\nheads = 2\ncontext = 8\n[outer]\nmethod = 'streaming'\n"
        f"[pipeline]\nstages = 3\ncodec = 'subspace(k={K})'\n"
    )
    holding, model = (
        HeldStage(StagedModel(manifest, VOCAB), stage),
        Transformer(ModelConfig(VOCAB, 3, WIDTH, 2, 8), manifest.run.seed),
    )
    whole = np.empty(holding.layout.total, np.float32)
    layout_of(model).read(model, whole)
    assert holding.layout.digest == layout_of(model).digest
    found, part = holding.parameters(), fragments_of(manifest, holding.layout)[stage]
    assert np.array_equal(part.take(found), part.take(whole))
    assert np.count_nonzero(found) == np.count_nonzero(part.take(found))
    assert bool(holding.frozen.tag) == (stage == 0)
