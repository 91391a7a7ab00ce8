"""Learning rates, weight decay groups, and optimizer state as arrays."""

from __future__ import annotations

import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from thinwire.node.training.inner_optimizer import (
    InnerConfig,
    OptimizerArrays,
    learning_rate,
    load_optimizer,
    make_optimizer,
    optimizer_arrays,
)
from torch import nn


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=generator)).square().mean().backward()
        optimizer.step()


def test_learning_rate_rises_and_falls() -> None:
    config = InnerConfig(lr=1.0, warmup=10, schedule="cosine", steps=110)
    assert [learning_rate(config, step) for step in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert learning_rate(config, 60) == pytest.approx(0.55)
    assert learning_rate(config, 110) == learning_rate(config, 10**6) == pytest.approx(0.1)
    falling = [learning_rate(config, step) for step in range(10, 111)]
    assert falling == sorted(falling, reverse=True)
    assert learning_rate(InnerConfig(lr=1.0, warmup=0), 0) == learning_rate(InnerConfig(lr=1.0, warmup=5), 999) == 1.0
    assert math.isfinite(learning_rate(InnerConfig(schedule="cosine", warmup=50, steps=50), 70))


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_weight_decay_applies_to_matrices_only(kind: str) -> None:
    model = net()
    model[0].requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, InnerConfig(optimizer=kind, lr=0.5, weight_decay=0.2))  # type: ignore[arg-type]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.2
    after = dict(model.named_parameters())
    assert torch.allclose(after["2.weight"], before["2.weight"] * 0.9)
    for name in ("0.weight", "0.bias", "1.weight", "1.bias", "2.bias"):
        assert torch.equal(after[name], before[name])


def test_sgd_momentum_excludes_weight_decay() -> None:
    model = net()
    optimizer = make_optimizer(model, InnerConfig(optimizer="sgd", lr=0.1, betas=(0.9, 0.95), weight_decay=0.5))
    train(model, optimizer, 1)
    for parameter in model.parameters():
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], parameter.grad)


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.AdamW(p, lr=0.1),
    lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
])  # fmt: skip
def test_optimizer_state_round_trips(make: object) -> None:
    assert callable(make)
    model, other = net(), net()
    optimizer, fresh = make(model.parameters()), make(other.parameters())
    train(model, optimizer, 3)
    arrays = optimizer_arrays(model, optimizer)
    other.load_state_dict(model.state_dict())
    load_optimizer(other, fresh, arrays)
    train(model, optimizer, 3, seed=9)
    train(other, fresh, 3, seed=9)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_arrays_of_tensors_in_main_memory_are_not_copied() -> None:
    model = net()
    optimizer = make_optimizer(model, InnerConfig())
    train(model, optimizer, 1)
    arrays = optimizer_arrays(model, optimizer)
    assert len(arrays) == len(dict(arrays)) == 3 * 6
    for key, array in arrays.items():
        entry, _, name = key.partition("/")
        assert np.shares_memory(array, optimizer.state[model.get_parameter(name)][entry].numpy())


def test_arrays_of_other_devices_are_copied_one_at_a_time() -> None:
    class Remote:
        """Tensor on a device that counts its copies in main memory."""

        dtype, alive = torch.float32, 0

        def detach(self):
            return self

        def cpu(self):
            array = np.zeros(4, np.float32)
            Remote.alive += 1
            weakref.finalize(array, lambda: setattr(Remote, "alive", Remote.alive - 1))
            return SimpleNamespace(numpy=lambda: array)

    most = 0
    for _, array in OptimizerArrays({str(number): Remote() for number in range(3)}).items():
        most = max(most, Remote.alive)
        del array
    assert most == 1


def test_narrow_optimizer_state_round_trips() -> None:
    model = net().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    arrays = optimizer_arrays(model, optimizer)
    assert {array.dtype.name for array in arrays.values()} == {"float32"}
    load_optimizer(model, optimizer, arrays)
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.bfloat16


def test_optimizer_state_of_another_model_is_refused() -> None:
    model = net()
    optimizer = make_optimizer(model, InnerConfig())
    train(model, optimizer, 1)
    before = {name: array.copy() for name, array in optimizer_arrays(model, optimizer).items()}
    for bad in ({"exp_avg/9.weight": np.zeros(3)}, {**before, "exp_avg/0.weight": np.zeros((4, 4), np.float32)}):
        with pytest.raises(ValueError, match="does not fit"):
            load_optimizer(model, optimizer, bad)
    after = optimizer_arrays(model, optimizer)
    assert all(np.array_equal(before[key], after[key]) for key in before)
