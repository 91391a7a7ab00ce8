"""The optimizer wrapper, with a swarm that only counts calls."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from thinwire.node.api.exchange import RoundReport
from thinwire.node.api.optimizer import SwarmOptimizer
from torch import nn


class Counting:
    """Stub of a Swarm that counts calls of a SwarmOptimizer."""

    def __init__(self, steps, adopted=True):
        self.steps, self.adopted, self.done, self.overtaken, self.calls = steps, adopted, False, False, []
        self.overlap, self.under_way, self.gathers = 0, False, False

    def refresh(self):
        pass

    def exchange(self, *, steps, weight, loss):
        self.calls.append((steps, weight, loss))
        self.overtaken = False
        return RoundReport(len(self.calls), self.adopted, self.adopted, 1, 0.0)

    def gather(self):
        self.gathers = False
        return self.exchange(steps=0, weight=1, loss=None)


def make(steps=3, batch=1, adopted=True, optimizer=torch.optim.AdamW):
    torch.manual_seed(0)
    model, swarm = nn.Linear(4, 2), Counting(steps, adopted)
    inner = optimizer(model.parameters(), lr=0.1)
    return model, swarm, inner, SwarmOptimizer(swarm, inner, batch)


def backward(model):
    model(torch.ones(3, 4)).square().sum().backward()


def test_optimizer_exchanges_every_h_steps_with_their_weight():
    model, swarm, _, optimizer = make(steps=3, batch=8)
    for weight in (None, None, 5, None, 0, 1, None):
        optimizer.zero_grad()
        backward(model)
        optimizer.step(weight=weight)
    assert swarm.calls == [(3, 21, None), (3, 9, None)]


def test_optimizer_makes_gathering_round_before_first_step():
    model, swarm, _, optimizer = make(steps=2, batch=8)
    swarm.gathers, first, seen = True, model.weight.detach().clone(), []
    gather = swarm.gather
    swarm.gather = lambda: (seen.append(torch.equal(model.weight, first)), gather())[1]
    for _ in range(2):
        backward(model)
        optimizer.step()
    assert swarm.calls == [(0, 1, None), (2, 16, None)] and seen == [True]


def test_optimizer_carries_weight_over_without_commit():
    _, swarm, _, optimizer = make(steps=2, adopted=False)
    for _ in range(6):
        optimizer.step()
    assert swarm.calls == [(2, 2, None), (2, 4, None), (2, 6, None)]


def test_optimizer_counts_steps_after_late_commit_in_next_round():
    _, swarm, _, optimizer = make(steps=2)
    kept = iter([2, 0])
    exchange = swarm.exchange
    swarm.exchange = lambda **given: replace(exchange(**given), kept=next(kept))
    for _ in range(4):
        optimizer.step()
    assert swarm.calls == [(2, 2, None), (2, 4, None)]


def test_optimizer_adopts_swarm_state_when_overtaken():
    _, swarm, _, optimizer = make(steps=100)
    optimizer.step()
    swarm.overtaken = True
    optimizer.step()
    optimizer.step()
    assert swarm.calls == [(2, 2, None)]


def test_optimizer_keeps_parameters_after_the_last_round():
    model, swarm, _, optimizer = make(steps=2)
    swarm.done = True
    backward(model)
    before = model.weight.detach().clone()
    assert optimizer.step() is None and optimizer.step(lambda: 3.5) == 3.5
    assert torch.equal(before, model.weight) and not swarm.calls


def test_optimizer_supports_closures():
    model, swarm, _, optimizer = make(steps=1, optimizer=torch.optim.LBFGS)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    optimizer.step(closure, loss=torch.tensor(2.5))
    with pytest.warns(RuntimeWarning, match="mean loss since the last round is nan"):
        optimizer.step(closure, loss=float("nan"))
    assert swarm.calls == [(1, 1, loss.item()), (1, 1, 2.5), (1, 1, None)]


def test_loss_of_a_round_is_the_mean_of_those_that_are_known():
    model, swarm, inner, optimizer = make(steps=3)
    for loss in (np.float32(1.0), torch.tensor([2.0], requires_grad=True), None):
        backward(model)
        optimizer.step(loss=loss)
    source = iter([torch.tensor(4.0), None, torch.tensor(8.0)]).__next__
    optimizer = SwarmOptimizer(swarm, inner, 1, loss_of_step=source)
    for _ in range(3):
        optimizer.step()
    assert [loss for _, _, loss in swarm.calls] == [1.5, 6.0]


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=10),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    ],
)
def test_scheduler_changes_the_inner_learning_rate(make_scheduler):
    _, _, inner, optimizer = make()
    _, _, alone, _ = make()
    ours, theirs = make_scheduler(optimizer), make_scheduler(alone)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns if lr_scheduler.step() comes first
        for _ in range(4):
            optimizer.step()
            alone.step()
            for scheduler in (ours, theirs):
                scheduler.step(*([1.0] if "Plateau" in type(scheduler).__name__ else []))
            assert inner.param_groups[0]["lr"] == alone.param_groups[0]["lr"]
            rates.append(inner.param_groups[0]["lr"])
    assert len(set(rates)) > 1
    assert optimizer.param_groups is inner.param_groups


def test_optimizer_counts_accumulated_gradients_as_one_step():
    model, swarm, _, optimizer = make(steps=2)
    for _ in range(2):
        for _ in range(4):
            backward(model)
        optimizer.step()
        optimizer.zero_grad()
        assert model.weight.grad is None
    assert swarm.calls == [(2, 2, None)]


def test_optimizer_state_dict_is_the_inner_one():
    model, _, inner, optimizer = make()
    backward(model)
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["state"][0]["exp_avg"].shape == (2, 4)
    _, _, fresh, other = make()
    other.load_state_dict(saved)
    assert other.state is fresh.state and len(fresh.state) == 2
    frozen = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [frozen], "lr": 0.5})
    assert [group["lr"] for group in inner.param_groups] == [0.1, 0.5]
    assert "AdamW" not in repr(optimizer) and "lr: 0.5" in repr(optimizer)


def test_optimizer_hooks_run_once_per_step():
    _, _, _, optimizer = make()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    optimizer.step()
    assert seen == ["pre", "post"]


def test_gradient_scaler_unscales_and_skips_steps():
    """A fused optimizer would unscale by itself, with an attribute that the scaler sets on the wrong object."""
    torch.manual_seed(0)
    model, swarm = nn.Linear(4, 2), Counting(1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    optimizer = SwarmOptimizer(swarm, inner, 1)
    reference = nn.Linear(4, 2)
    reference.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for spoil in (False, True):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 4)).square().sum()).backward()
        if spoil:
            model.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    backward(reference)
    plain.step()
    torch.testing.assert_close(model.weight, reference.weight)
    assert len(swarm.calls) == 1, "a skipped step is not a step"


def test_optimizer_calls_on_round_after_all_exchanges_of_a_step():
    model, swarm, inner, _ = make(steps=1)
    swarm.overlap, calls = 1, []
    report = RoundReport(1, True, True, 1, 0.0)
    swarm.begin = lambda **given: calls.append("begin")
    swarm.finish = lambda: (calls.append("finish"), setattr(swarm, "under_way", False), report)[2]

    def tell(told):
        calls.append("told")
        raise OSError("the logger is down")

    optimizer = SwarmOptimizer(swarm, inner, 1, tell)
    optimizer.step()
    swarm.under_way = True
    backward(model)
    with pytest.raises(OSError, match="the logger is down"):
        optimizer.step()
    assert calls == ["begin", "finish", "begin", "told"], "otherwise other ranks of the group would wait"


@pytest.mark.parametrize("weight", [-1, 2.5, math.nan, math.inf, "8", [8], torch.ones(2)])
def test_optimizer_refuses_weight_that_is_no_whole_number_from_0(weight):
    model, _, _, optimizer = make(steps=1)
    before = model.weight.detach().clone()
    backward(model)
    with pytest.raises(ValueError, match="weight must be a whole number of samples, not"):
        optimizer.step(weight=weight)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("loss", ["1", {"loss": 1.0}, torch.ones(2)])
def test_optimizer_refuses_loss_that_is_no_number(loss):
    """Passing the output of a model of transformers instead of its loss would show no loss, and no reason."""
    model, _, _, optimizer = make(steps=1)
    before = model.weight.detach().clone()
    backward(model)
    with pytest.raises(TypeError, match="loss must be a number or a tensor of one element, not"):
        optimizer.step(loss=loss)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("weight", [8.0, np.int64(8), torch.tensor(8), torch.tensor([8.0])])
def test_peer_gets_weights_of_other_types_as_int(weight):
    model, swarm, _, optimizer = make(steps=1)
    backward(model)
    optimizer.step(weight=weight)
    assert swarm.calls == [(1, 8, None)] and type(swarm.calls[0][1]) is int


def test_optimizer_warns_once_of_parameters_that_become_trainable_after_wrap():
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2).requires_grad_(False))
    swarm, inner = Counting(1), torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = SwarmOptimizer(swarm, inner, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            model[1].requires_grad_(step > 0)
            backward(model)
            optimizer.step()
    (warning,) = caught
    assert "not averaged (2, the first of shape (2, 2))" in str(warning.message) and warning.filename == __file__
