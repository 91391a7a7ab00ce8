"""Division of a model into sections: the part that one stage holds.

The layers follow each other in the order of the data. The ends are the parameters of no layer: embedding, last norm and
head. Stage 0, the origin, holds the ends. A section's parameters have the same names as in the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NoReturn

from thinwire.node.state.fragments import layer_of
from thinwire.node.training.models.layered_model import LayeredModel, layered
from thinwire.node.training.models.transformer import cross_entropy
from torch import Tensor, nn


def cut(layers: int, shares: Sequence[int]) -> tuple[range, ...]:
    """Return consecutive runs of layers of these lengths. Only stage 0, with the ends, may be empty.

    Raises ValueError unless they cover all layers.
    """
    if sum(shares) != layers or not shares or shares[0] < 0 or any(share < 1 for share in shares[1:]):
        raise ValueError(f"stages of {', '.join(map(str, shares))} layers are not a model of {layers}")
    starts = [sum(shares[:stage]) for stage in range(len(shares) + 1)]
    return tuple(range(start, stop) for start, stop in zip(starts, starts[1:], strict=False))


class ModelSection:
    """Layers `layers` of a model, and its ends if `ends`.

    Called with x [B, T, width], returns the output of the layers, of the same shape. Raises ModelError for a model that
    cannot be cut.

    module: a copy of the model's structure with the held modules of `model` itself; the others are `Absent`.
    """

    def __init__(self, model: nn.Module, layers: range, ends: bool) -> None:
        whole = layered(model)
        if not 0 <= layers.start <= layers.stop <= len(whole.layers):
            raise ValueError(f"layers {layers.start}…{layers.stop} of a model of {len(whole.layers)}")
        self.module = _reduced(whole, layers, ends)
        self._model, self._layers = layered(self.module), layers

    def __call__(self, x: Tensor) -> Tensor:
        """Return x after the layers. Raises ValueError for sequences longer than the model's context."""
        return self._model.through([self._model.layers[layer] for layer in self._layers], x)

    def front(self, tokens: Tensor) -> Tensor:
        """Return token ids [B, T] after the embedding and the layers of stage 0."""
        return self(self._model.embed(tokens))

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [B, T, vocab] of the output of the last stage, x [B, T, width]."""
        return self._model.logits(x)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per token of the output of the last stage, x [B, T, width]."""
        return cross_entropy(self.logits(x), targets)


class Absent(nn.Module):
    """Stands for a module that another stage holds."""

    def forward(self, *arguments: object, **named: object) -> NoReturn:
        raise RuntimeError("a stage calls a module that another stage holds")


def _reduced(model: LayeredModel, layers: range, ends: bool) -> nn.Module:
    """Return a copy of a model's modules: those that are held are shared, the others are `Absent`."""
    shared: dict[int, object] = {}  # what copy.deepcopy takes as copied already
    for name, module in model.module.named_modules(remove_duplicate=False):
        if not name or f"{model.prefix}.".startswith(f"{name}."):
            continue  # the list of layers, and the modules around it
        layer = layer_of(f"{name}.")
        held = ends if layer is None else layer[1] in layers
        absent = not held and any(True for _ in module.parameters())
        shared.setdefault(id(module), Absent() if absent else module)
    shared |= {id(buffer): buffer for buffer in model.module.buffers()}
    return copy.deepcopy(model.module, shared)
