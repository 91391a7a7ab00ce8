"""DiLoCo on a quadratic with a closed form, with the real trainer and the real rounds."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from thinwire.node.state.layout import layout_of
from thinwire.node.training.inner_loop import Trainer
from thinwire.node.training.inner_optimizer import InnerConfig
from thinwire.swarm.manifest.parser import parse
from torch import nn

from benchmarks.training.round_table import RoundTable

EIGENVALUES = np.array([0.05, 0.3, 1.0, 4.0, 12.0])
BASIS = np.linalg.qr(np.random.default_rng(1).standard_normal((5, 5)))[0]
RATE, STEPS, LR, MOMENTUM = 0.1, 7, 0.7, 0.9
TOKENS = (100, 100, 300)
"""Tokens of one inner step of each peer: the weight of its pseudo-gradient."""

START = np.array([2.0, -1.0, 0.5, 3.0, -2.0])
OPTIMA = np.random.default_rng(2).standard_normal((len(TOKENS), 5))


class Quadratic(nn.Module):
    """½ (θ − c)ᵀ A (θ − c), for any batch."""

    def __init__(self, optimum: np.ndarray) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(START, dtype=torch.float32))
        self.optimum = torch.tensor(optimum, dtype=torch.float32)
        self.curvature = torch.tensor(BASIS @ np.diag(EIGENVALUES) @ BASIS.T, dtype=torch.float32)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        away = self.theta - self.optimum
        return away, 0.5 * away @ self.curvature @ away


def trainers(rate: float) -> list[Trainer]:
    inner = InnerConfig(optimizer="sgd", lr=rate, betas=(0.0, 0.0), weight_decay=0.0, warmup=0, clip=0.0)
    made = []
    for optimum, tokens in zip(OPTIMA, TOKENS, strict=True):
        rows = torch.zeros(1, tokens, dtype=torch.int64)
        batches = SimpleNamespace(batch=1, next=lambda size, rows=rows: (rows, rows))
        made.append(Trainer(Quadratic(optimum), inner, batches, clock=lambda: 0.0))  # type: ignore[arg-type]
    return made


def shrunk(steps: int) -> np.ndarray:
    """Return the remaining distance to the optimum after H steps of SGD: (1 − ωA)^H."""
    return BASIS @ np.diag((1 - RATE * EIGENVALUES) ** steps) @ BASIS.T


def theta_of(trainer: Trainer) -> np.ndarray:
    return trainer.model.theta.detach().numpy()


def after(rounds: int) -> np.ndarray:
    """Return θ̄ after some rounds.

    With κ = 1 − (1 − ωλ)^H and e the distance to the weighted mean of the optima, along each eigenvector: b' = μb + κe,
    e' = e − η(κe + μb'), which is a matrix to the power of the rounds.
    """
    mean = np.average(OPTIMA, axis=0, weights=TOKENS)
    away = BASIS.T @ (START - mean)
    for at, eigenvalue in enumerate(EIGENVALUES):
        k = 1 - (1 - RATE * eigenvalue) ** STEPS
        once = np.array([[1 - LR * k * (1 + MOMENTUM), -LR * MOMENTUM**2], [k, MOMENTUM]])
        away[at] = (np.linalg.matrix_power(once, rounds) @ [away[at], 0.0])[0]
    return mean + BASIS @ away


def test_sgd_inner_steps_match_closed_form() -> None:
    for optimum, trainer in zip(OPTIMA, trainers(RATE), strict=True):
        trainer.run_steps(STEPS)
        np.testing.assert_allclose(theta_of(trainer), optimum + shrunk(STEPS) @ (START - optimum), rtol=0, atol=1e-5)


def play(rounds: int, rate: float = RATE) -> list[np.ndarray]:
    """θ̄ of every replica after some rounds of DiLoCo."""
    inner = trainers(rate)
    layout = layout_of(inner[0].model)

    def learner(trainer: Trainer) -> tuple[object, ...]:
        return (
            START.astype(np.float32),
            lambda start, stop, out: layout.read(trainer.model, out, start),
            lambda theta, start=0, keep=0.0: layout.write(trainer.model, theta, start, keep),
        )

    usual = 'codec = "fp32"\naggregation = "mean"\nmax_weight = 1000000'
    toml = f"[exchange]\n{usual}\n[outer]\nsync_every = {STEPS}\nlr = {LR}\nmomentum = {MOMENTUM}"
    table = RoundTable(parse(toml), layout, [learner(trainer) for trainer in inner])  # type: ignore[misc]
    asyncio.run(table.play(rounds, lambda index, steps: inner[index].run_steps(steps).tokens))
    assert table.weights == [[STEPS * tokens for tokens in TOKENS]] * rounds
    assert all(
        np.array_equal(theta_of(trainer), slot.replica.theta) for trainer, slot in zip(inner, table.slots, strict=True)
    )
    return [slot.replica.theta for slot in table.slots]


@pytest.mark.parametrize("rounds", [1, 2, 6])
def test_diloco_rounds_match_closed_form(rounds: int) -> None:
    for theta in play(rounds):
        np.testing.assert_allclose(theta, after(rounds), rtol=0, atol=3e-5)


def test_diloco_rounds_with_other_learning_rate_differ() -> None:
    """One per cent is a hundred times the rounding error."""
    assert np.abs(play(1, 1.01 * RATE)[0] - after(1)).max() > 3e-3
