"""A run's model and its division into the stages of the manifest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import torch
from thinwire.compression.boundary_codec import Boundary
from thinwire.node.pipeline.model.section import ModelSection, cut
from thinwire.node.state.fragments import fragments_of, layer_of, shares
from thinwire.node.state.layout import Layout, layout_of
from thinwire.node.training.models.causal_model import logits_of, loss_of
from thinwire.node.training.models.layered_model import LayeredModel, whole_model
from thinwire.node.training.models.transformer import ModelConfig, Transformer, cross_entropy, nothing
from thinwire.node.training.models.user_model import ModelError, make_model, new_model
from thinwire.swarm.manifest.manifest import Manifest
from torch import Tensor, nn

TOLERANCE = 1e-4
"""Relative difference of logits and losses that the order of sums can explain."""

TINY = 1e-6
"""Logits below it count as zero."""

STAGE_LIMITS = (
    "a stage may use its layers, x and positions only, and the loss is the cross-entropy (docs/guides/pipelines.md)"
)


class StagedModel:
    """Model of a manifest. `vocab`: token ids of the tokenizer; `named`, `here`: see make_model.

    Its sizes come from an outline: the model without values, and without memory for them. Attributes and methods raise
    ModelError if a model of the user cannot be made so, or cannot be cut.
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
            if not isinstance(error.__cause__, RuntimeError):
                raise
            hint = "the function must work on torch's meta device; --debug shows where it fails"
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
        if stage is None:
            return range(count)
        if count < stages:
            raise ModelError(f"the model has too few layers for {stages} stages: {count}", "lower pipeline.stages")
        return cut(count, shares(count, stages))[stage]

    def parameters(self, stage: int | None) -> int:
        """Return the number of parameters of a stage, or of the whole model (None)."""
        return self.layout.total if stage is None else fragments_of(self.manifest, self.layout)[stage].size

    def first_values(self, stage: int) -> nn.Module:
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

    def boundary(self) -> Boundary:
        """Return the encoding of x between stages.

        Raises ModelError if the codec does not suit the model's width.
        """
        codec = self.manifest.pipeline.codec
        try:
            made = Boundary(codec, self.width, self.vocab, self.manifest.run.seed)
            for backward in (False, True):
                made.nbytes(1, 1, backward=backward)
        except ValueError as error:
            text = f"pipeline.codec {codec!r} cannot encode x of width {self.width}: {error}"
            raise ModelError(text, "choose another codec, such as bf16") from error
        return made

    def section(self, module: nn.Module, stage: int) -> ModelSection:
        """Return the section of a stage, with the modules of the whole model `module`.

        Raises ModelError unless its trained parameters are those of the stage's fragment.
        """
        part, layout = fragments_of(self.manifest, self.layout)[stage], self.layout
        own = {piece.name for start, stop in part.spans for piece, _, _ in layout.touched(start, stop)}
        try:
            section = ModelSection(module, self.layers(stage), ends=not stage)
        except TypeError as error:  # of an attribute that cannot be copied, such as a lock
            raise ModelError(
                f"the modules of the model cannot be copied: {error}", "store such objects outside of its modules"
            ) from error
        held = {name for name, value in section.module.named_parameters() if value.requires_grad}
        if held != own:
            name = min(held ^ own)
            raise ModelError(f"stage {stage} {'has' if name in held else 'lacks'} the parameter {name}", STAGE_LIMITS)
        return section

    def check(self, module: nn.Module) -> None:
        """Check that the stages of a whole model train as it does, and that their boundary can carry x.

        They make one forward pass with the same random numbers as the model. Raises ModelError.
        """
        self.boundary()
        sections = [self.section(module, stage) for stage in range(self.manifest.pipeline.stages)]
        device = next(module.parameters()).device
        tokens = torch.arange(self.manifest.model.context, device=device)[None] % self.vocab
        training, buffers = module.training, [buffer.clone() for buffer in module.buffers()]
        try:
            module.train()
            whole = _drawn(device, lambda: logits_of(module, tokens))
            loss = _drawn(device, lambda: loss_of(module)(tokens, tokens))
            parts = _drawn(device, lambda: self._through(sections, tokens))
            if whole.shape != parts.shape:
                raise ValueError(f"forward gives logits of shape {list(whole.shape)}, the stages {list(parts.shape)}")
            largest = max(float(whole.abs().max()), TINY)  # logits of a head that starts at zero are zero
            off = float((whole - parts).abs().max()) / largest
            off = max(off, abs(float(cross_entropy(parts, tokens) / loss) - 1))
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
            raise ModelError(f"the model cannot be cut into stages: {error}", STAGE_LIMITS) from error
        finally:
            module.train(training)
            with torch.no_grad():
                for buffer, before in zip(module.buffers(), buffers, strict=True):
                    buffer.copy_(before)
        if not off <= TOLERANCE:
            raise ModelError(
                f"the model cannot be cut into stages: their logits or loss differ from its own by {off:.2g}",
                STAGE_LIMITS,
            )

    def _through(self, sections: Sequence[ModelSection], tokens: Tensor) -> Tensor:
        """Return the logits of token ids after all stages."""
        x = self._carried(sections[0].front(tokens), tokens)
        for section in sections[1:]:
            x = self._carried(section(x), tokens)
        return sections[0].logits(x)

    def _carried(self, x: object, tokens: Tensor) -> Tensor:
        """Return x as the next stage receives it. Raises ValueError for a form that boundaries cannot carry."""
        shape = (*tokens.shape, self.width)
        if not isinstance(x, Tensor) or x.shape != shape or x.dtype != torch.float32:
            raise ValueError(f"between two layers x must be float32 of shape {list(shape)}")
        return x.detach().requires_grad_()


def _drawn(device: torch.device, compute: Callable[[], Tensor]) -> Tensor:
    """Return a result with random numbers that are the same at each call."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        return compute().detach()
