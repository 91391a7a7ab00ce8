"""A replica in stages in one process: activations and gradients are encoded and decoded as between peers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from thinwire.compression.boundary_codec import Boundary
from thinwire.node.training.models.transformer import Transformer, cross_entropy
from torch import Tensor, nn


class Crossing(torch.autograd.Function):
    """A boundary: payload and back."""

    @staticmethod
    def forward(context: Any, x: Tensor, tokens: Tensor, boundary: Boundary) -> Tensor:
        context.boundary = boundary
        payload = boundary.pack(x, tokens, backward=False)
        return boundary.unpack(payload, *x.shape[:2], backward=False)[0]

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        boundary, (gradient,) = context.boundary, gradients
        payload = boundary.pack(gradient, None, backward=True)
        return boundary.unpack(payload, *gradient.shape[:2], backward=True)[0], None, None


class Staged(nn.Module):
    """Whole model in stages of `shares` layers each.

    It is called like a Transformer with targets, and returns the input of the head in place of the logits. In evaluation
    nothing is encoded.
    """

    def __init__(self, model: Transformer, shares: Sequence[int], boundary: Boundary) -> None:
        super().__init__()
        self.model, self.boundary = model, boundary
        self._last = {layers - 1 for layers in accumulate(shares)}

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        model = self.model
        x = model.embed(tokens)
        for layer, block in enumerate(model.blocks):
            x = model.through([block], x)
            if layer in self._last and self.training:
                x = Crossing.apply(x, tokens, self.boundary)  # type: ignore[no-untyped-call]
        return x, cross_entropy(model.logits(x), targets)
