"""A section of a model that computes next to nothing, for simulations in which computing time is made up."""

from __future__ import annotations

import torch


class HollowSection(torch.nn.Module):
    """Has the shapes of a section of a model with this vocabulary and width."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randn(vocabulary, width, generator=generator) * 0.02
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def front(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.rows[tokens] * self.scale

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).square().mean()
