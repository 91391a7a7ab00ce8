"""Size of a manifest's model, counted without memory for its weights: on torch's meta device."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import torch
from blake3 import blake3
from thinwire.collectives.costs.cost_question import ModelSize
from thinwire.node.runtime.console import bytes_text
from thinwire.node.runtime.device import DeviceError
from thinwire.node.runtime.settings import HF, model_setting
from thinwire.node.training.models.lora import add_adapter
from thinwire.node.training.models.tokenizer import load_tokenizer
from thinwire.node.training.models.user_model import ModelError, config_content, new_model
from thinwire.swarm.manifest.manifest import Manifest
from torch import nn


def size_of(manifest: Manifest, here: Path) -> ModelSize:
    """Return the size of a manifest's model. No weights are read, downloaded or allocated.

    here: directory of the manifest, with its tokenizer, its folder of transformers or its Python module, whose function is
    called. A missing model.config_hash is no error. Raises DataError, ModelError.
    """
    shape, data = manifest.model, manifest.data
    if shape.kind == "custom":
        raise ModelError("only the training loop of the user has it", "count its trainable parameters")
    vocab = 0 if shape.kind == "hf" else load_tokenizer(data.tokenizer, here, data.tokenizer_hash).vocab
    return _size(manifest, model_setting(shape.kind, shape.name, here), vocab, here)


def check_memory(manifest: Manifest, named: str, vocab: int, here: Path, memory: int) -> None:
    """Raise DeviceError for a model whose weights alone need more than the `memory` (bytes) here.

    named, vocab, here: see make_model. A function of the user is not called: only it knows what it allocates.
    """
    if manifest.model.kind != "transformer" and not named.startswith(HF):
        return
    size = _size(manifest, named, vocab, here)
    count = size.parameters + size.frozen
    if 4 * count > memory:
        raise DeviceError(
            f"the model has {count:,} parameters, whose fp32 values need {bytes_text(4 * count)}; this machine has "
            f"{bytes_text(memory)} of memory",
            "train a smaller model, or let several peers hold it together (docs/guides/pipelines.md)",
        )


def _size(manifest: Manifest, named: str, vocab: int, here: Path) -> ModelSize:
    shape = manifest.model
    if shape.kind == "transformer":
        hidden = 8 * math.ceil(shape.mlp * shape.width / 8)
        layer = 4 * shape.width**2 + 3 * shape.width * hidden + 2 * shape.width
        ends = shape.width + (1 if shape.tied else 2) * vocab * shape.width
        return ModelSize(shape.layers * layer + ends, 0, shape.layers, shape.width)
    if named.startswith(HF) and not shape.config_hash:
        known = msgspec.structs.replace(shape, config_hash=blake3(config_content(named)).hexdigest())
        manifest = msgspec.structs.replace(manifest, model=known)
    with torch.device("meta"):
        model = new_model(manifest, named, vocab, here)
        layers, width = (
            getattr(getattr(model, "config", None), key, 0) for key in ("num_hidden_layers", "hidden_size")
        )
        if manifest.lora.rank:
            model = add_adapter(manifest, model, named)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in model.parameters()) - trained
    return ModelSize(trained, frozen, layers or _longest(model), width or 0)


def _longest(model: nn.Module) -> int:
    """Return the length of the longest list of layers in a module; 1 without a list."""
    return max((len(part) for part in model.modules() if isinstance(part, nn.ModuleList | nn.Sequential)), default=1)
