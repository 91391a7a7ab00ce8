"""Models that can be cut between two of their layers: embedding, layers that map x to x, and head.

A module of the user can be cut if it has `blocks`, an nn.ModuleList, and three methods that its `forward` is made of:
`embed(tokens)` maps token ids [B, T] to x [B, T, width], `through(blocks, x)` applies some of the blocks to x, and
`logits(x)` maps x to [B, T, vocab]. The built-in model has these, too. Models of transformers that are built like Llama or
GPT-2 can be cut without them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, cast

import torch
from thinwire.node.state.fragments import layer_of
from thinwire.node.training.models.user_model import ModelError
from torch import Tensor, nn


class LayeredModel:
    """Module with `blocks`, `embed`, `through` and `logits`. `prefix`: name of its list of layers."""

    prefix: ClassVar[str] = "blocks"
    needed: ClassVar[tuple[str, ...]] = ("blocks", "embed", "through", "logits")
    """Attributes by which a module of this kind is recognized."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._parts: Any = module  # torch gives attributes of modules no useful types

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """Return True if the module has what this kind needs."""
        return all(_attribute(module, path) is not None for path in cls.needed)

    @property
    def layers(self) -> nn.ModuleList:
        """Return the layers in the order of the data."""
        return cast(nn.ModuleList, self.module.get_submodule(self.prefix))

    @property
    def width(self) -> int:
        """Return the last size of x."""
        device = next(self.module.parameters()).device
        with torch.no_grad():
            return self.embed(torch.zeros(1, 1, dtype=torch.long, device=device)).shape[-1]

    def embed(self, tokens: Tensor) -> Tensor:
        """Return x [B, T, width] of token ids [B, T], as it enters the first layer."""
        return cast(Tensor, self._parts.embed(tokens))

    def through(self, layers: Iterable[nn.Module], x: Tensor) -> Tensor:
        """Return x after these layers."""
        return cast(Tensor, self._parts.through(layers, x))

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [B, T, vocab] of the last layer's output."""
        return cast(Tensor, self._parts.logits(x))


class LlamaLike(LayeredModel):
    """Decoder of transformers with rotary positions, such as Llama, Mistral, Qwen2 and Qwen3."""

    prefix = "model.layers"
    needed = ("model.embed_tokens", "model.rotary_emb", "model.layers", "model.norm", "lm_head")

    def embed(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self._parts.model.embed_tokens(tokens))

    def through(self, layers: Iterable[nn.Module], x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rotary = self._parts.model.rotary_emb(x, positions)
        for layer in layers:
            x = _output(layer(x, position_ids=positions, position_embeddings=rotary))
        return x

    def logits(self, x: Tensor) -> Tensor:
        return cast(Tensor, self._parts.lm_head(self._parts.model.norm(x)))


class Gpt2Like(LayeredModel):
    """Decoder of transformers with learned positions, such as GPT-2."""

    prefix = "transformer.h"
    needed = ("transformer.wte", "transformer.wpe", "transformer.drop", "transformer.h", "transformer.ln_f", "lm_head")

    def embed(self, tokens: Tensor) -> Tensor:
        base, positions = self._parts.transformer, torch.arange(tokens.shape[1], device=tokens.device)
        return cast(Tensor, base.drop(base.wte(tokens) + base.wpe(positions)))

    def through(self, layers: Iterable[nn.Module], x: Tensor) -> Tensor:
        for layer in layers:
            x = _output(layer(x))
        return x

    def logits(self, x: Tensor) -> Tensor:
        return cast(Tensor, self._parts.lm_head(self._parts.transformer.ln_f(x)))


def layered(module: nn.Module) -> LayeredModel:
    """Return a module as a model that can be cut.

    Raises ModelError for a module whose parts are unknown.
    """
    kind = next((kind for kind in (LayeredModel, LlamaLike, Gpt2Like) if kind.fits(module)), None)
    if kind is None:
        raise ModelError(
            f"{type(module).__name__} cannot be cut into stages",
            "it needs blocks, embed, through and logits (docs/guides/pipelines.md), or an architecture like Llama or GPT-2",
        )
    return kind(module)


def whole_model(module: nn.Module) -> LayeredModel:
    """Return a module as a model that can be cut, after a check of its parameters.

    Each belongs to one layer or to a module beside the layers, and its name shows which. Raises ModelError.
    """
    model, places = layered(module), dict[int, tuple[str, int] | None]()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        holder, layer = name.rpartition(".")[0], layer_of(name)
        if not holder or f"{model.prefix}.".startswith(f"{holder}."):
            raise ModelError(f"the parameter {name} is in no module beside the layers", "put it into a module")
        if layer is not None and layer[0] != f"{model.prefix}.":
            raise ModelError(
                f"the parameter {name} is in another list than {model.prefix}", "give the modules of that list names"
            )
        if places.setdefault(id(parameter), layer) != layer:
            raise ModelError(f"the parameter {name} is shared between layers", "give each layer separate parameters")
    return model


def _attribute(module: nn.Module, path: str) -> object:
    """Return an attribute of an attribute of …; None if there is none."""
    found: object = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _output(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out[0] if isinstance(out, tuple) else out
