"""Low-rank adapters (LoRA, arXiv 2106.09685) beside frozen base weights, by the library peft.

Only the adapter is trained, exchanged and stored. Every peer reads the base weights from its own disk; their hash is
`model.weights` of the manifest.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import blake3
import numpy as np
import torch
from thinwire.node.runtime.settings import HF
from thinwire.node.state.tensor_file import Array
from thinwire.node.training.models.initial_weights import check_digest
from thinwire.node.training.models.user_model import ModelError, config_file, read_pretrained
from thinwire.swarm.identity.errors import NotInstalled
from thinwire.swarm.manifest.manifest import Manifest
from torch import nn

ADAPTER = "default"
"""Name of the adapter in the names of parameters."""

PREFIX = "base_model.model."
"""Start of the names of parameters in files of peft."""

ALL_LINEAR = "all-linear"
"""Target for all linear maps but the head."""


def with_adapter(manifest: Manifest, model: nn.Module, named: str) -> nn.Module:
    """Return the model that the setting `model` names, with the run's base weights and a new adapter.

    model: result of make_model. The base is frozen; the adapter's first values are drawn from run.seed, and change
    nothing yet. Raises ModelError, WeightsError for other base weights than the manifest names, and MissingHashError.
    """
    source = named
    if named.startswith(HF):
        folder = config_file(named).parent
        model, source = read_pretrained(folder, model), str(folder)
    check_digest(base_digest(model), manifest.model.weights, source)
    return add_adapter(manifest, model, named)


def add_adapter(manifest: Manifest, model: nn.Module, named: str) -> nn.Module:
    """Return the model with a new adapter, and all its other parameters frozen. Raises ModelError."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise NotInstalled(
            "the run trains an adapter, which needs the package peft", "pip install 'thinwire[lora]'"
        ) from None
    wanted = manifest.lora
    targets = ALL_LINEAR if wanted.targets == (ALL_LINEAR,) else list(wanted.targets) or None
    for target in wanted.targets if targets != ALL_LINEAR else ():
        # The library leaves out a name that fits no layer if another one fits.
        if not any(f".{name}".endswith(f".{target}") for name, _ in model.named_modules()):
            raise ModelError(
                f"no layer of {named} is named {target}", "name linear layers of the model in lora.targets"
            )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # The library corrects its default for transposed matrices by itself, and warns of it.
        warnings.filterwarnings("ignore", "fan_in_fan_out")
        torch.manual_seed(manifest.run.seed)
        try:
            config = LoraConfig(
                r=wanted.rank,
                lora_alpha=wanted.alpha,
                target_modules=targets,
                task_type="CAUSAL_LM" if named.startswith(HF) else None,
                base_model_name_or_path=manifest.model.name if named.startswith(HF) else None,
            )
            adapted: nn.Module = inject_adapter_in_model(config, model, ADAPTER)
        except (ValueError, TypeError, NotImplementedError) as error:  # what peft raises for targets that do not fit
            raise ModelError(
                f"no adapter fits {named}: {str(error).splitlines()[0]}",
                "name linear layers of the model in lora.targets",
            ) from error
    return adapted.train()


def merged(model: nn.Module) -> dict[str, Array]:
    """Return the parameters of the base with the adapter added to them, under the names of the base.

    model: result of `with_adapter`, on any device; it is changed. Raises ModelError if a sum is not finite, and for an
    adapter beside a parameter that other layers have, too, such as a tied head.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)]
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, layer in adapted:
        if any(uses[id(parameter)] > 1 for parameter in layer.get_base_layer().parameters()):
            raise ModelError(f"the adapter cannot be added to {name}, which is tied", "export it with --format peft")
        try:
            layer.merge(safe_merge=True)
        except ValueError as error:
            raise ModelError(
                f"the adapter cannot be added to {name}: {error}", "export it with --format peft"
            ) from error
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer.get_base_layer())
    return {name: parameter.detach().float().cpu().numpy() for name, parameter in model.named_parameters()}


def base_digest(model: nn.Module) -> str:
    """Return the blake3 of all parameters, in hexadecimal: little-endian float32 in order of their names.

    For a model without frozen parameters it is the hash of `digest_of`.
    """
    digest = blake3.blake3()
    for _, parameter in sorted(model.named_parameters(), key=lambda pair: pair[0]):
        values = parameter.detach().float().cpu().contiguous().numpy().astype("<f4", copy=False)
        digest.update(np.ascontiguousarray(values).reshape(-1).data.cast("B"))
    return digest.hexdigest()


def write_config(model: nn.Module, folder: Path) -> None:
    """Write adapter_config.json of a model with an adapter into an existing folder. Raises OSError."""
    configs = model.peft_config
    assert isinstance(configs, Mapping)
    replace(configs[ADAPTER], inference_mode=True).save_pretrained(str(folder))


def in_peft(weights: Mapping[str, Array]) -> dict[str, Array]:
    """Return an adapter's parameters under the names that files of peft have."""
    return {PREFIX + re.sub(rf"(\.lora_\w+)\.{ADAPTER}\b", r"\1", name): array for name, array in weights.items()}
