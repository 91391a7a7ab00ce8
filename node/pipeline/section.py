"""A model cut into sections: which fragments there are, and the part of the model that one stage holds.

Fragments of a Transformer, in the order of the data: "blocks.0", "blocks.1", …, and "ends", which is all that belongs to no
block: embedding, last norm and head. Stage 0, the origin, holds the ends. A section's parameters have the names that they
have in the whole model, so that a fragment's Layout, and its digest, are equal wherever the fragment is held.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor, nn

from ..fragments import Layout, layout_of
from ..model import ModelConfig, Transformer, cross_entropy

ENDS = "ends"
_BLOCK = re.compile(r"blocks\.[0-9]+(?=\.)")


def fragment_of(name: str) -> str:
    """The fragment that a parameter belongs to, by the parameter's name."""
    found = _BLOCK.match(name)
    return found[0] if found else ENDS


def fragments(module: nn.Module) -> dict[str, Layout]:
    """The layout of every fragment that a whole model, or a section of one, holds; blocks in order, the ends last."""
    names = {fragment_of(name) for name, parameter in module.named_parameters() if parameter.requires_grad}

    def layout(fragment: str) -> Layout:
        return layout_of(module, lambda name: fragment_of(name) == fragment)

    return {fragment: layout(fragment) for fragment in sorted(names, key=_place)}


def _place(fragment: str) -> tuple[bool, int]:
    return fragment == ENDS, 0 if fragment == ENDS else int(fragment.partition(".")[2])


def cut(layers: int, shares: Sequence[int]) -> tuple[range, ...]:
    """Consecutive runs of so many layers each. Raises ValueError unless they are all the layers; a stage may not be empty,
    but stage 0, which has the ends.
    """
    if sum(shares) != layers or not shares or shares[0] < 0 or any(share < 1 for share in shares[1:]):
        raise ValueError(f"stages of {', '.join(map(str, shares))} layers are not a model of {layers}")
    starts = [sum(shares[:stage]) for stage in range(len(shares) + 1)]
    return tuple(range(start, stop) for start, stop in zip(starts, starts[1:], strict=False))


class Section(nn.Module):
    """The blocks `layers` of a model, and its ends when `ends`: those of `model` itself, not copies.

    Called with x [B, T, width] it gives the blocks' output of that shape.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, model: Transformer, layers: range, ends: bool) -> None:
        super().__init__()
        if not 0 <= layers.start <= layers.stop <= model.config.layers:
            raise ValueError(f"layers {layers.start}…{layers.stop} of a model of {model.config.layers}")
        self.config = model.config
        self.layers = layers
        self.blocks = nn.ModuleDict({str(layer): model.blocks[layer] for layer in layers})
        if ends:
            self.embedding, self.norm, self.head = model.embedding, model.norm, model.head
        self.register_buffer("cos", model.cos, persistent=False)
        self.register_buffer("sin", model.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x behind the blocks. Raises ValueError for sequences longer than the model's context."""
        length = x.shape[1]
        if length > self.config.context:
            raise ValueError(f"{length} tokens do not fit a context of {self.config.context}")
        cos, sin = self.cos[:length], self.sin[:length]
        for block in self.blocks.values():
            x = block(x, cos, sin)
        return x

    def front(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] behind the embedding and the blocks of stage 0."""
        out: Tensor = self(self.embedding(tokens))
        return out

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token of what has come through all stages, x [B, T, width]."""
        return cross_entropy(self.head(self.norm(x)), targets)


def section(config: ModelConfig, seed: int, layers: range, ends: bool) -> Section:
    """A section with the same first values as in the whole model of that seed, in memory for itself only."""
    held = {f"blocks.{layer}" for layer in layers} | ({ENDS} if ends else set())
    return Section(Transformer(config, seed, lambda name: fragment_of(name) in held), layers, ends)
