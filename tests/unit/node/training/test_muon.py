"""Muon beside AdamW: near-orthogonal updates, which parameters each trains, exact resumption."""

from __future__ import annotations

import copy
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from thinwire.compression.registry import dense
from thinwire.node.training.batches import Batches, split
from thinwire.node.training.corpus import Corpus
from thinwire.node.training.inner_loop import Trainer
from thinwire.node.training.inner_optimizer import InnerConfig, load_optimizer, make_optimizer, optimizer_arrays
from thinwire.node.training.models.transformer import ModelConfig, Transformer
from thinwire.node.training.muon import matrices
from thinwire.swarm.identity.errors import NotInstalled
from torch import nn

CONFIG = InnerConfig(optimizer="muon", lr=0.02, warmup=0)


def model(seed: int = 0, tied: bool = True) -> Transformer:
    return Transformer(ModelConfig(vocab=20, layers=1, width=16, heads=2, context=12, tied=tied), seed)


def trainer(seed: int = 0) -> Trainer:
    steps = np.random.default_rng(0).integers(1, 3, 4000)
    text = split(Corpus(((np.cumsum(steps) % 20).astype(np.uint8),), 20, ""), 12, 0, 8, 0.05)
    return Trainer(model(seed), CONFIG, Batches(text, 8, range(8)), clock=lambda: 0.0)


@pytest.mark.parametrize("shape", [(64, 64), (96, 32), (32, 96)])
def test_muon_update_is_nearly_orthogonal(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    layer = nn.Linear(shape[1], shape[0], bias=False)
    optimizer = make_optimizer(layer, InnerConfig(optimizer="muon", lr=1.0, weight_decay=0.0))
    # Singular values from 1 down to 1/50: of the gradient nothing but its directions may be left.
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    layer.weight.grad = u @ torch.diag(torch.logspace(0, -1.7, min(shape))) @ v
    before = layer.weight.detach().clone()
    optimizer.step()
    moved = (before - layer.weight.detach()) / max(1, shape[0] / shape[1]) ** 0.5
    values = torch.linalg.svdvals(moved)
    assert 0.4 < values.min() and values.max() < 1.4
    along = torch.diagonal(u.T @ moved @ v.T)  # the update follows the gradient in every direction
    assert along.min() > 0.3


def test_muon_update_ignores_gradient_length() -> None:
    results = []
    for scale in (1.0, 1024.0):
        one = model()
        optimizer = make_optimizer(one, CONFIG)
        for index, parameter in enumerate(one.parameters()):
            generator = torch.Generator().manual_seed(index)
            parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        results.append(one.blocks[0].attention.qkv.weight.detach().clone())
    assert torch.allclose(results[0], results[1], atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_adamw_trains_embeddings_head_and_vectors(tied: bool) -> None:
    subject = model(tied=tied)
    hidden, others = matrices(subject)
    names = {id(parameter): name for name, parameter in subject.named_parameters()}
    assert {names[id(p)].split(".")[-2] for p in hidden} == {"qkv", "out", "gate"}
    rest = {names[id(p)] for p in others}
    assert {"embedding.weight", "norm.weight"} <= rest and ("head.weight" in rest) is not tied
    optimizer = make_optimizer(subject, CONFIG)
    subject(torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.long))[1].backward()
    optimizer.step()
    assert all(set(optimizer.state[p]) == {"momentum_buffer"} for p in hidden)
    assert all(set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"} for p in others)


@pytest.mark.parametrize("tied", [True, False])
def test_muon_trains_hidden_matrix_as_large_as_embedding(tied: bool) -> None:
    subject = Transformer(ModelConfig(vocab=48, layers=2, width=16, heads=2, context=12, tied=tied), 0)
    assert subject.blocks[0].attention.qkv.weight.shape == subject.embedding.weight.shape
    hidden = {id(parameter) for parameter in matrices(subject)[0]}
    assert all(id(block.attention.qkv.weight) in hidden for block in subject.blocks)
    assert id(subject.head.weight) not in hidden


def test_muon_and_adamw_have_separate_rates() -> None:
    subject = trainer()
    subject.config = InnerConfig(optimizer="muon", lr=0.02, adam_lr=1e-3, warmup=10)
    subject.step = 4
    subject.run_steps(1)
    rates = {round(group["lr"], 9) for group in subject.optimizer.param_groups}
    assert rates == {0.01, 0.0005}


def test_muon_handles_frozen_parameters_and_models_of_vectors() -> None:
    subject = model()
    subject.blocks.requires_grad_(False)
    assert not matrices(subject)[0]
    optimizer = make_optimizer(subject, CONFIG)
    subject(torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.long))[1].backward()
    optimizer.step()
    assert optimizer.state.keys() == {p for p in subject.parameters() if p.requires_grad}


def test_muon_learns_and_resumes_exactly() -> None:
    first, second = trainer(), trainer(seed=5)
    begun = first.run_steps(3).loss
    arrays, numbers = first.save()
    assert sum(key.startswith("momentum_buffer/") for key in arrays) == 4
    second.model.load_state_dict(first.model.state_dict())
    second.load(arrays, numbers)
    assert second.run_steps(3) == first.run_steps(3)
    for one, two in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert first.run_steps(40).last < begun - 0.3


def test_torch_loads_muon_state() -> None:
    one, two = trainer(), trainer()
    one.run_steps(2)
    two.model.load_state_dict(one.model.state_dict())
    two.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
    two.step, two.batches.cursor = one.step, one.batches.cursor
    assert one.run_steps(2) == two.run_steps(2)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
    again = make_optimizer(two.model, CONFIG)
    load_optimizer(two.model, again, optimizer_arrays(two.model, two.optimizer))
    assert again.state.keys() == two.optimizer.state.keys()


def test_muon_pseudo_gradient_survives_int4() -> None:
    """The pseudo-gradient of MuLoCo keeps its direction through the codec."""
    subject = trainer()
    before = torch.cat([p.detach().flatten().clone() for p in subject.model.parameters()])
    subject.run_steps(10)
    delta = (before - torch.cat([p.detach().flatten() for p in subject.model.parameters()])).numpy()
    codec = dense("int4(block=256)")
    payload, back = np.empty(codec.nbytes(delta.size), np.uint8), np.empty_like(delta)
    codec.encode(delta, payload)
    codec.decode(payload, back)
    assert np.dot(delta, back) / np.linalg.norm(delta) / np.linalg.norm(back) > 0.98


def test_muon_with_a_torch_that_lacks_it_names_the_version(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    config = InnerConfig(optimizer="muon")
    with pytest.raises(NotInstalled, match=rf"torch {re.escape(torch.__version__)} has no Muon") as error:
        make_optimizer(nn.Linear(3, 2), config)
    assert error.value.exit_code == 2 and "2.9" in error.value.hint
    make_optimizer(nn.Linear(3, 2), InnerConfig())  # no other optimizer needs it


@pytest.mark.trial
def test_training_without_muon_loads_with_a_torch_that_lacks_it():
    """A torch below 2.9, as pyproject.toml allows it: the modules must load, though Muon is missing."""
    code = "import torch; del torch.optim.Muon; import thinwire.node.training.local_learner"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
