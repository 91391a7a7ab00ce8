"""A run's model and its division into the stages of the manifest."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch
from thinwire.node.pipeline.model.section import cut
from thinwire.node.state.fragments import fragments_of, layer_of, shares
from thinwire.node.state.layout import Layout, layout_of
from thinwire.node.training.models.layered_model import LayeredModel, whole_model
from thinwire.node.training.models.transformer import ModelConfig, Transformer, nothing
from thinwire.node.training.models.user_model import ModelError, make_model, new_model
from thinwire.swarm.manifest.manifest import Manifest
from torch import nn


class StagedModel:
    """Model of a manifest. `vocab`: token ids of the tokenizer; `named`, `here`: see make_model.

    All of its properties come from an outline: the model without values and without memory for them. Raise ModelError if a
    model of the user cannot be made so, or cannot be cut.
    """

    def __init__(self, manifest: Manifest, vocab: int, named: str = "", here: Path = Path()) -> None:
        self.manifest, self.vocab, self._named, self._here = manifest, vocab, named, here

    @cached_property
    def _outline(self) -> LayeredModel:
        if self._built_in is not None:
            return whole_model(Transformer(self._built_in, 0, nothing))
        try:
            with torch.device("meta"):
                made = new_model(self.manifest, self._named, self.vocab, self._here)
        except ModelError as error:
            hint = f"it must work on torch's meta device ({error.hint})"
            raise ModelError(f"the parameters cannot be counted without memory: {error}", hint) from error
        return whole_model(made)

    @property
    def _built_in(self) -> ModelConfig | None:
        """Sizes of the built-in model; None if the model is the user's."""
        shape = self.manifest.model
        if shape.kind != "transformer":
            return None
        return ModelConfig(self.vocab, shape.layers, shape.width, shape.heads, shape.context, shape.mlp, shape.tied)

    @cached_property
    def layout(self) -> Layout:
        """Return the layout of the whole model."""
        return layout_of(self._outline.module, outline=True)

    @cached_property
    def width(self) -> int:
        """Return the last size of the activations between stages."""
        return self._outline.width

    def layers(self, stage: int | None) -> range:
        """Return the layers of a stage, or all of them (None)."""
        count, stages = len(self._outline.layers), self.manifest.pipeline.stages
        return range(count) if stage is None else cut(count, shares(count, stages))[stage]

    def parameters(self, stage: int | None) -> int:
        """Return the number of parameters of a stage, or of the whole model (None)."""
        return self.layout.total if stage is None else fragments_of(self.manifest, self.layout)[stage].size

    def made(self, stage: int) -> nn.Module:
        """Return the model with the first values of a stage; others may have values, too.

        A model of the user takes memory for all of its weights while it exists.
        """
        if self._built_in is None:
            return make_model(self.manifest, self._named, self.vocab, self._here)
        layers = self.layers(stage)

        def held(name: str) -> bool:
            layer = layer_of(name)
            return layer[1] in layers if layer is not None else not stage

        return Transformer(self._built_in, self.manifest.run.seed, held)
