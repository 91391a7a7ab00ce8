"""Division of a model into sections: the fragments of the model, and the part that one stage holds.

Fragments of a Transformer, in the order of the data: "blocks.0", "blocks.1", …, and "ends", the parameters of no block:
embedding, last norm and head. Stage 0, the origin, holds the ends. A section's parameters have the same names as in the
whole model, so a fragment's Layout and its digest are equal on all holders.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from thinwire.node.state.layout import Layout, layout_of
from thinwire.node.training.models.transformer import ModelConfig, Transformer, cross_entropy
from torch import Tensor, nn

ENDS = "ends"
_BLOCK = re.compile(r"blocks\.[0-9]+(?=\.)")


def fragment_of(name: str) -> str:
    """Return the fragment of a parameter, by the parameter's name."""
    found = _BLOCK.match(name)
    return found[0] if found else ENDS


def fragments(module: nn.Module) -> dict[str, Layout]:
    """Return the layout of each fragment, in a model or a section: blocks in order, the ends last."""
    names = {fragment_of(name) for name, parameter in module.named_parameters() if parameter.requires_grad}

    def layout(fragment: str) -> Layout:
        return layout_of(module, lambda name: fragment_of(name) == fragment)

    return {fragment: layout(fragment) for fragment in sorted(names, key=_place)}


def _place(fragment: str) -> tuple[bool, int]:
    return fragment == ENDS, 0 if fragment == ENDS else int(fragment.partition(".")[2])


def cut(layers: int, shares: Sequence[int]) -> tuple[range, ...]:
    """Return consecutive runs of layers of these lengths. Only stage 0, with the ends, may be empty.

    Raises ValueError unless they cover all layers.
    """
    if sum(shares) != layers or not shares or shares[0] < 0 or any(share < 1 for share in shares[1:]):
        raise ValueError(f"stages of {', '.join(map(str, shares))} layers are not a model of {layers}")
    starts = [sum(shares[:stage]) for stage in range(len(shares) + 1)]
    return tuple(range(start, stop) for start, stop in zip(starts, starts[1:], strict=False))


class ModelSection(nn.Module):
    """Blocks `layers` of a model, and its ends if `ends`: the modules of `model` itself, not copies.

    Called with x [B, T, width], returns the output of the blocks, of the same shape.
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
        """Return x after the blocks. Raises ValueError for sequences longer than the model's context."""
        length = x.shape[1]
        if length > self.config.context:
            raise ValueError(f"{length} tokens do not fit a context of {self.config.context}")
        cos, sin = self.cos[:length], self.sin[:length]
        for block in self.blocks.values():
            x = block(x, cos, sin)
        return x

    def front(self, tokens: Tensor) -> Tensor:
        """Return token ids [B, T] after the embedding and the blocks of stage 0."""
        out: Tensor = self(self.embedding(tokens))
        return out

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per token of the output of the last stage, x [B, T, width]."""
        return cross_entropy(self.head(self.norm(x)), targets)


def section(config: ModelConfig, seed: int, layers: range, ends: bool) -> ModelSection:
    """Create a section, in its own memory, with the values that it has in the whole model of that seed."""
    held = {f"blocks.{layer}" for layer in layers} | ({ENDS} if ends else set())
    return ModelSection(Transformer(config, seed, lambda name: fragment_of(name) in held), layers, ends)
