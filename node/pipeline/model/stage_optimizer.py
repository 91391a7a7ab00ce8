"""Inner optimizer step of a section, with the gradients of a step's micro-batches."""

from __future__ import annotations

import math

import torch
from thinwire.node.training.inner_optimizer import InnerConfig, learning_rate, make_optimizer
from torch import nn


class StageOptimizer:
    """Inner optimizer of one section. The origin handles `accumulate` and `clip` of the configuration.

    tokens: tokens of the applied gradients since `take_tokens`, the weight of the fragment's contribution. faster:
    factor of the learning rate.
    """

    def __init__(self, module: nn.Module, config: InnerConfig) -> None:
        self.tokens, self.faster = 0, 1.0
        self.optimizer = make_optimizer(module, config)
        self._module, self._config = module, config

    def squares(self) -> float:
        """Return the squared norm of the gradient in float64; not finite if the gradient is not finite."""
        total = 0.0
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                # Square the norm: squares of single values would leave the range of float32 sooner.
                total += float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)) ** 2
        return total

    def apply(self, step: int, divisor: float, factor: float, tokens: int) -> None:
        """Make inner step `step` on `tokens` with gradient / divisor · factor, and clear the gradient."""
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
                if factor != 1.0:
                    parameter.grad.mul_(factor)
        rate = learning_rate(self._config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * self.faster * group.get("share", 1.0)
        self.optimizer.step()
        self.tokens += tokens
        self.drop()

    def drop(self) -> None:
        """Discard the gradient."""
        self.optimizer.zero_grad(set_to_none=True)

    def take_tokens(self) -> int:
        """Return the tokens since the last call."""
        tokens, self.tokens = self.tokens, 0
        return tokens


def clipping(squares: float, clip: float) -> float:
    """Return the factor that limits a gradient of that squared norm to the norm `clip`; 1 if `clip` is 0.

    Same formula as torch.nn.utils.clip_grad_norm_.
    """
    return min(1.0, clip / (math.sqrt(squares) + 1e-6)) if clip > 0 else 1.0
