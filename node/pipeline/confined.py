"""Models whose residual stream stays in a fixed subspace, so that a boundary between stages loses nothing but bf16's bits.

Whatever writes into the stream does so through U (width × k, orthonormal columns, the same everywhere): out = Z·Uᵀ with Z
trained; the embedding is a frozen table's row plus Z's row times Uᵀ. arXiv 2506.01260; compression/subspace.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from thinwire.compression import subspace
from torch import Tensor, nn

from ..model import Block, Transformer
from .section import Section


class Confined(nn.Module):
    """A linear map into the subspace: [..., columns] -> [..., width]. weight: [k, columns]."""

    u: Tensor

    def __init__(self, weight: Tensor, u: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_buffer("u", u, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight), self.u)


class ConfinedEmbedding(nn.Module):
    """Token ids -> frozen row + trained row in the subspace. weight: [vocab, k]."""

    u: Tensor
    fixed: Tensor

    def __init__(self, weight: Tensor, fixed: Tensor, u: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_buffer("fixed", fixed, persistent=False)
        self.register_buffer("u", u, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.fixed) + F.linear(F.embedding(tokens, self.weight), self.u)


class ConfinedHead(nn.Module):
    """The head that shares the weights of a confined embedding: [..., width] -> [..., vocab]."""

    u: Tensor
    fixed: Tensor

    def __init__(self, embedding: ConfinedEmbedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.register_buffer("fixed", embedding.fixed, persistent=False)
        self.register_buffer("u", embedding.u, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.fixed) + F.linear(F.linear(x, self.u.mT), self.weight)


@torch.no_grad()
def confine(model: Transformer | Section, k: int, seed: int) -> None:
    """Reparametrise a model, or a section of one, in place, before it is trained. `seed`: of the run.

    First values are the projections of what they were; with them all stages, and whole models, still start alike. The model
    is in float32. Raises ValueError unless 1 ≤ k ≤ width.
    """
    u = torch.from_numpy(subspace.basis(model.config.width, k, seed))
    for block in model.modules():
        if isinstance(block, Block):
            block.attention.out = Confined(u.mT @ block.attention.out.weight, u)  # type: ignore[assignment]
            block.feedforward.out = Confined(u.mT @ block.feedforward.out.weight, u)  # type: ignore[assignment]
    if hasattr(model, "embedding"):
        fixed = torch.from_numpy(subspace.table(model.config.vocab, model.config.width, seed))
        embedding = ConfinedEmbedding(model.embedding.weight @ u, fixed, u)
        model.embedding = embedding
        if model.config.tied:
            model.head = ConfinedHead(embedding)  # type: ignore[assignment]
