"""Transform of dominated tiles in torch, as the kernels do it, and a boundary in the subspace within one process."""

from __future__ import annotations

import torch
from thinwire.compression.activations.codecs import DOMINANT, TILE, TRANSFORMED
from thinwire.compression.activations.subspace import compress, restore
from torch import Tensor


def transform_torch(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Transform the tiles (n, 64) that one value dominates; return the tiles and their marks (n,)."""
    top = tiles.abs().max(dim=1, keepdim=True).values
    # Of equal maxima the first is taken, by position, because max may return any of them.
    places = torch.arange(TILE, device=tiles.device).expand_as(tiles)
    pivot = torch.where(tiles.abs() == top, places, TILE - 1).min(dim=1, keepdim=True).values
    second = tiles.abs().scatter(1, pivot, -1.0).max(dim=1, keepdim=True).values
    dominated = (top > 0) & (top >= float(DOMINANT) * second)
    swapped = tiles.scatter(1, pivot, tiles[:, :1])
    swapped[:, :1] = tiles.gather(1, pivot)
    marks = torch.where(dominated, TRANSFORMED | pivot, 0).to(torch.uint8).squeeze(1)
    return torch.where(dominated, hadamard_torch(swapped), tiles), marks


def transform_back_torch(tiles: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    """Inverse of `transform_torch`."""
    back, pivot = hadamard_torch(tiles), (marks & 0x3F).long().unsqueeze(1)
    swapped = back.scatter(1, pivot, back[:, :1])
    swapped[:, :1] = back.gather(1, pivot)
    return torch.where(marks.unsqueeze(1) >= TRANSFORMED, swapped, tiles)


def hadamard_torch(tiles: torch.Tensor) -> torch.Tensor:
    """Return H·x / 8 for each row of 64 values.

    H / 8 is symmetric, orthonormal and its own inverse. Butterflies are applied to neighbours first, then at distances
    2, 4 … 32.
    """
    x, distance = tiles, 1
    while distance < TILE:
        pairs = x.reshape(-1, TILE // (2 * distance), 2, distance)
        x = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), dim=2).reshape(-1, TILE)
        distance *= 2
    return x * 0.125


class Crossing(torch.autograd.Function):
    """Effect of a boundary on x and its gradient within one process."""

    @staticmethod
    def forward(context: torch.autograd.function.FunctionCtx, x: Tensor, x0: Tensor, u: Tensor) -> Tensor:
        context.save_for_backward(u)
        return restore(compress(x, x0, u), x0, u)

    @staticmethod
    def backward(context: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (u,) = context.saved_tensors  # type: ignore[attr-defined]
        return restore(compress(gradients[0], None, u), None, u), None, None
