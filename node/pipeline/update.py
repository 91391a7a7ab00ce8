"""From the gradient that a step's micro-batches have left in a section's parameters to the inner optimizer's step."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..inner import InnerConfig, learning_rate, make_optimizer


class Update:
    """The inner optimizer of one section. `accumulate` and `clip` of the configuration are the origin's business.

    tokens: how many the gradients were of that have been applied since `take_tokens`: what a fragment's outer step is
    weighted by. faster: what the learning rate is multiplied by.
    """

    def __init__(self, module: nn.Module, config: InnerConfig) -> None:
        self.tokens, self.faster = 0, 1.0
        self.optimizer = make_optimizer(module, config)
        self._module, self._config = module, config

    def squares(self) -> float:
        """The gradient's squared norm, in float64; not finite where the gradient is not."""
        total = 0.0
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                # The square of a norm: squares of single values would leave the range of float32 sooner.
                total += float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)) ** 2
        return total

    def apply(self, step: int, divisor: float, factor: float, tokens: int) -> None:
        """Make inner step `step` with gradient / divisor · factor, and forget the gradient. `tokens` went into it."""
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
        """Forget the gradient."""
        self.optimizer.zero_grad(set_to_none=True)

    def take_tokens(self) -> int:
        """Tokens since the last call."""
        tokens, self.tokens = self.tokens, 0
        return tokens


def clipping(squares: float, clip: float) -> float:
    """The factor that brings a gradient of that squared norm to a norm of `clip` at most; clip 0: 1.

    As torch.nn.utils.clip_grad_norm_ does.
    """
    return min(1.0, clip / (math.sqrt(squares) + 1e-6)) if clip > 0 else 1.0
