"""Models whose residual stream stays in a fixed subspace: boundaries lose only the bits of bf16.

Every layer that writes into the residual stream does so through U (width × k, orthonormal columns, equal on all peers):
out = Z·Uᵀ with trained Z; the embedding is a row of a frozen table plus Z's row times Uᵀ. Source: arXiv 2506.01260; see
compression/activations/subspace.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from thinwire.compression.activations import subspace
from thinwire.node.training.models.transformer import Block, Transformer
from torch import Tensor, nn


class SubspaceLinear(nn.Module):
    """Linear map into the subspace: [..., columns] -> [..., width]. weight: [k, columns]."""

    u: Tensor

    def __init__(self, weight: Tensor, u: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_buffer("u", u, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight), self.u)


class SubspaceEmbedding(nn.Module):
    """Embedding: token ids -> frozen row + trained row in the subspace. weight: [vocab, k]."""

    u: Tensor
    fixed: Tensor

    def __init__(self, weight: Tensor, fixed: Tensor, u: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_buffer("fixed", fixed, persistent=False)
        self.register_buffer("u", u, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.fixed) + F.linear(F.embedding(tokens, self.weight), self.u)


class SubspaceHead(nn.Module):
    """Head that shares the weights of a subspace embedding: [..., width] -> [..., vocab]."""

    u: Tensor
    fixed: Tensor

    def __init__(self, embedding: SubspaceEmbedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.register_buffer("fixed", embedding.fixed, persistent=False)
        self.register_buffer("u", embedding.u, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.fixed) + F.linear(F.linear(x, self.u.mT), self.weight)


@torch.no_grad()
def confine(model: Transformer, k: int, seed: int) -> None:
    """Reparametrise a model, or the module of a section, in place, before training.

    `seed`: the run's seed.

    First values are projections of the original ones, so all stages and whole models still start alike. The model is in
    float32. Raises ValueError unless 1 ≤ k ≤ width.
    """
    u = torch.from_numpy(subspace.basis(model.config.width, k, seed))
    for block in model.modules():
        if isinstance(block, Block):
            block.attention.out = SubspaceLinear(u.mT @ block.attention.out.weight, u)  # type: ignore[assignment]
            block.feedforward.out = SubspaceLinear(u.mT @ block.feedforward.out.weight, u)  # type: ignore[assignment]
    if isinstance(model.embedding, nn.Embedding):
        fixed = torch.from_numpy(subspace.table(model.config.vocab, model.config.width, seed))
        embedding = SubspaceEmbedding(model.embedding.weight @ u, fixed, u)
        model.embedding = embedding
        if model.config.tied:
            model.head = SubspaceHead(embedding)  # type: ignore[assignment]
