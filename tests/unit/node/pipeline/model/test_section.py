"""Sections and stages without a network: a split model computes the same as the whole model."""

import pytest
import torch
from kit.reference.activations import Crossing
from thinwire.compression.activations import subspace
from thinwire.node.pipeline.model.section import ModelSection, cut
from thinwire.node.pipeline.model.stage import Stage
from thinwire.node.pipeline.model.staged_model import StagedModel
from thinwire.node.pipeline.model.subspace_model import confine
from thinwire.node.training.models.transformer import ModelConfig, Transformer
from thinwire.swarm.manifest.parser import parse

CONFIG = ModelConfig(vocab=29, layers=5, width=16, heads=2, context=12)
K, SEED, MICROS = 6, 3, 6


def batches(count=MICROS, seed=5):
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, CONFIG.vocab, (count, 2, 9), generator=g)
    return [(row[:, :-1], row[:, 1:]) for row in rows]


def made(dtype, confined=False, tied=True):
    model = Transformer(ModelConfig(vocab=29, layers=5, width=16, heads=2, context=12, tied=tied), seed=1)
    with torch.no_grad():  # larger than first values, so that blocks have an effect
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embedding" not in name:
                parameter.mul_(8)
    if confined:
        confine(model, K, SEED)
    model = model.to(dtype)
    if confined and dtype == torch.float64:  # the basis is orthonormal to float32's precision; here exactly
        exact = torch.linalg.qr(torch.from_numpy(subspace.basis(16, K, SEED)).double())[0]
        for name, buffer in model.named_buffers():
            if name.endswith("u"):
                buffer.copy_(exact)
    return model


class Chain:
    """Four stages of one model in one process; `crosses` is called between any two."""

    def __init__(self, model, *, recompute=False, crosses=lambda x, tokens: x):
        self.sections = [ModelSection(model, span, not at) for at, span in enumerate(cut(5, (1, 1, 2, 1)))]
        self.front = Stage(self.sections[0].front, recompute=recompute)
        self.tail = Stage(self.sections[0].loss, recompute=recompute)
        self.middle = [Stage(one, recompute=recompute) for one in self.sections[1:]]
        self.crosses, self.losses = crosses, {}

    def forward(self, micro, batch, skipped=()):
        tokens, targets = batch
        x = self.crosses(self.front.forward(micro, tokens), tokens)
        for number, stage in enumerate(self.middle, 1):
            if number not in skipped:
                x = self.crosses(stage.forward(micro, x), tokens)
        self.losses[micro] = self.tail.forward(micro, x, targets)

    def backward(self, micro, skipped=()):
        gradient = self.tail.backward(micro, torch.ones_like(self.losses[micro]))
        for number, stage in reversed(list(enumerate(self.middle, 1))):
            if number not in skipped:
                gradient = stage.backward(micro, gradient)
        self.front.backward(micro, gradient)


def gpipe(micros):
    return [("forward", m) for m in micros] + [("backward", m) for m in reversed(micros)]


def one_forward_one_backward(micros, stages=4):
    order = [("forward", m) for m in micros[:stages]]
    for at, micro in enumerate(micros):
        order.append(("backward", micro))
        order += [("forward", micros[at + stages])] if at + stages < len(micros) else []
    return order


def reference(model, skips):
    """Return losses and gradients of the whole model in one process, without the skipped blocks."""
    spans = cut(5, (1, 1, 2, 1))
    losses = {}
    for micro, (tokens, targets) in enumerate(batches()):
        x = model.embedding(tokens)
        cos, sin = model.cos[: tokens.shape[1]], model.sin[: tokens.shape[1]]
        for layer, block in enumerate(model.blocks):
            stage = next(at for at, span in enumerate(spans) if layer in span)
            x = x if stage in skips.get(micro, ()) else block(x, cos, sin)
        loss = torch.nn.functional.cross_entropy(model.head(model.norm(x)).flatten(0, 1), targets.flatten())
        loss.backward()
        losses[micro] = loss.detach()
    return losses, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def compare(model, chain, order, skips, tolerance):
    losses, expected = reference(model, skips)
    model.zero_grad()
    data = batches()
    for what, micro in order:
        if what == "forward":
            chain.forward(micro, data[micro], skips.get(micro, ()))
        else:
            chain.backward(micro, skips.get(micro, ()))
    for micro, loss in losses.items():
        assert abs(chain.losses[micro] - loss) <= tolerance
    assert len(expected) > 30
    for name, parameter in model.named_parameters():
        worst = (parameter.grad - expected[name]).norm() / expected[name].norm().clamp_min(1e-30)
        assert worst <= tolerance, name


SKIPS = {0: (2,), 1: (1, 3), 4: (1, 2, 3)}


@pytest.mark.parametrize("order", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize("skips", [{}, SKIPS], ids=["full", "skipped"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("recompute", [False, True])
def test_four_stage_gradients_equal_one_process(order, skips, dtype, tolerance, recompute):
    model = made(dtype)
    compare(model, Chain(model, recompute=recompute), order(range(MICROS)), skips, tolerance)


@pytest.mark.parametrize("order", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize("skips", [{}, SKIPS], ids=["full", "skipped"])
@pytest.mark.parametrize("tied", [True, False])
def test_subspace_boundaries_are_exact_for_confined_model(order, skips, tied):
    model = made(torch.float64, confined=True, tied=tied)

    def crosses(x, tokens):
        embedding = model.embedding
        return Crossing.apply(x, embedding.fixed[tokens], embedding.u)

    compare(model, Chain(model, crosses=crosses), order(range(MICROS)), skips, 1e-12)


def test_subspace_boundaries_are_lossy_for_free_model():
    model = made(torch.float64)
    u = torch.linalg.qr(torch.from_numpy(subspace.basis(16, K, SEED)).double())[0]
    zero = torch.zeros((), dtype=torch.float64)
    chain = Chain(model, crosses=lambda x, tokens: Crossing.apply(x, zero, u))
    chain.forward(0, batches()[0])
    with torch.no_grad():
        assert abs(chain.losses[0] - model(*batches()[0])[1]) > 1e-2


@pytest.mark.parametrize("recompute", [False, True])
def test_retried_micro_batch_counts_once(recompute):
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4).double()
    stage = Stage(layer, recompute=recompute)
    x, g = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    stage.forward(7, x)
    first = stage.backward(7, g)
    once = layer.weight.grad.clone()
    stage.forward(7, x)
    again = stage.backward(7, g)
    assert torch.equal(first, again) and torch.equal(layer.weight.grad, once) and stage.counted == {7}
    stage.forward(8, x)
    assert torch.equal(stage.backward(8, g, count=False), first)
    assert torch.equal(layer.weight.grad, once) and stage.counted == {7}
    stage.forward(9, x)
    stage.forward(9, 2 * x)  # tried again before the gradient came
    assert stage.holds == 1
    stage.backward(9, g)
    torch.testing.assert_close(layer.weight.grad, 3 * once, rtol=1e-12, atol=0)
    stage.clear()
    stage.forward(7, x)
    stage.backward(7, g)
    torch.testing.assert_close(layer.weight.grad, 4 * once, rtol=1e-12, atol=0)
    with pytest.raises(KeyError):
        stage.backward(7, g)
    stage.forward(5, x)
    stage.forget(5)
    assert stage.holds == 0


@pytest.mark.parametrize("confined", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_section_alone_equals_part_of_the_whole_model(confined, tied):
    manifest = parse(
        f"[run]\nseed = 4\n[model]\nlayers = 5\nwidth = 16\nheads = 2\ncontext = 12\ntied = {str(tied).lower()}\n"
        "[outer]\nmethod = 'streaming'\nsync_every = 32\n[pipeline]\nstages = 4\n"
    )
    whole, staged = Transformer(ModelConfig(29, 5, 16, 2, 12, tied=tied), 4), StagedModel(manifest, 29)
    own = [staged.section(staged.first_values(stage), stage) for stage in range(4)]
    if confined:
        for module in (whole, *(one.module for one in own)):
            confine(module, K, SEED)
    together = {name: held for one in own for name, held in one.module.named_parameters()}
    expected = dict(whole.named_parameters())
    assert together.keys() == expected.keys()
    assert sum(len(list(one.module.parameters())) for one in own) == len(expected)
    assert all(torch.equal(together[name], value) for name, value in expected.items())


def test_section_has_only_its_own_parameters():
    own = ModelSection(Transformer(CONFIG, 4), range(2, 3), ends=False)
    assert {name.split(".")[1] for name, _ in own.module.named_parameters()} == {"2"}
    with pytest.raises(ValueError, match="context"):
        own(torch.zeros(1, 13, 16))


@pytest.mark.parametrize("shares", [(), (5, 0), (1, 5), (-1, 6), (2, 2)])
def test_cut_covers_every_layer_and_fills_every_stage(shares):
    with pytest.raises(ValueError):
        cut(5, shares)
    assert cut(5, (0, 3, 2)) == (range(0), range(3), range(3, 5))
