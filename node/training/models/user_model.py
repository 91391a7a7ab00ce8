"""Models of the user: the result of a Python function, or a causal language model of transformers.

A manifest comes from a stranger. Therefore this peer makes the model that its owner names (setting `model`), and never
imports, reads or fetches what only the manifest names. The manifest's hash of config.json, and the digest of the layout
that peers compare, show whether it is the run's model.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any, ClassVar, cast

import blake3
import torch
from thinwire.node.runtime.disk import present
from thinwire.node.runtime.settings import HF
from thinwire.node.state.layout import layout_of
from thinwire.node.state.model_buffers import buffers_of
from thinwire.node.training.models.causal_model import logits_of
from thinwire.node.training.models.initial_weights import WeightsError
from thinwire.node.training.models.missing_hashes import MissingHashError
from thinwire.swarm.identity.errors import HintedError, NotInstalled
from thinwire.swarm.identity.regular_file import content_of
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.manifest.validation import MODULE_FUNCTION
from torch import nn

PROBE = 8
"""Tokens of the sequence that shows whether a model can be called."""

CODE = ("auto_map", "attn_implementation", "_attn_implementation", "quantization_config", "use_kernels")
"""Keys of config.json that could make the library load other code, which is never done."""


class ModelError(HintedError):
    """The owner of this peer has not named the run's model, or it cannot be used."""

    exit_code: ClassVar[int] = 2


def check_named(manifest: Manifest, named: str) -> None:
    """Check that the setting `model` names a model of the kind of the run. Raises ModelError."""
    kind, run = manifest.model.kind, manifest.run.name
    if kind not in ("module", "hf"):
        return
    asked = f"{HF}FOLDER" if kind == "hf" else manifest.model.name
    if not named:
        raise ModelError(
            f"run {run} trains {manifest.model.name}, not the built-in model, and its name is not in the settings here",
            f"if you trust the run's author and have the model, name it: --model {asked}",
        )
    if named.startswith(HF) is not (kind == "hf"):
        raise ModelError(f"the setting model is {named!r}, but run {run} needs {asked}", f"give --model {asked}")


def make_model(manifest: Manifest, named: str, vocab: int, here: Path) -> nn.Module:
    """Return the model that the setting `model` names, with first parameters drawn from run.seed.

    vocab: token ids of the data. here: directory where modules are found that are not installed. Raises ModelError, and
    MissingHashError for a manifest without model.config_hash.
    """
    check_named(manifest, named)
    model = new_model(manifest, named, vocab, here)
    _check(model, named, vocab, manifest.model.context)
    if shared := buffers_of(model, manifest.model.buffers).pieces:
        raise ModelError(
            f"{named} has persistent buffers ({shared[0].name}, …), which daemons do not share",
            'register them with persistent=False, set model.buffers = "local", or train with thinwire.join',
        )
    return model


def new_model(manifest: Manifest, named: str, vocab: int, here: Path) -> nn.Module:
    """Return the model like make_model, but do not call it. Raises ModelError."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(manifest.run.seed)
        return _of_transformers(manifest, named) if named.startswith(HF) else _of_function(manifest, named, vocab, here)


def _of_function(manifest: Manifest, named: str, vocab: int, here: Path) -> nn.Module:
    hint = "write MODULE:FUNCTION; the module is installed, or a file in the directory of run.toml or in this one"
    if not MODULE_FUNCTION.fullmatch(named):
        raise ModelError(f"the setting model is {named!r}", hint)
    module, _, function = named.partition(":")
    if str(here.absolute()) not in sys.path:
        sys.path.append(str(here.absolute()))  # at the end: no file there can replace an installed module
    try:
        make = getattr(importlib.import_module(module), function)
    except Exception as error:  # the user's code may raise any kind
        raise ModelError(f"{named}: {_first_line(error)}", hint) from error
    try:
        made = make(vocab=vocab, context=manifest.model.context)
    except Exception as error:
        hint = (
            f"it is called as {function}(vocab={vocab}, context={manifest.model.context}); --debug shows where it fails"
        )
        raise ModelError(f"{named}: {_first_line(error)}", hint) from error
    if not isinstance(made, nn.Module):
        raise ModelError(f"{named} returned {type(made).__name__}", "it must return a torch.nn.Module")
    return made


def config_file(named: str) -> Path:
    """Return the path of config.json of "hf:FOLDER", "hf:FILE" or "hf:NAME".

    The files of a name must be in the library's cache: nothing is fetched. Raises ModelError.
    """
    name = named.removeprefix(HF)
    path = Path(name).expanduser()
    if present(path):
        return path / "config.json" if path.is_dir() else path
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except ImportError:
        raise _no_library() from None
    except ValueError:  # not a name of the Hub
        found = None
    if not isinstance(found, str):
        raise ModelError(
            f"there is no folder {name}, and no model of this name in the cache of Hugging Face",
            f"give a folder with config.json, or fetch it first: hf download {name} config.json",
        )
    return Path(found)


def _no_library() -> NotInstalled:
    return NotInstalled("a model of Hugging Face needs the package transformers", "pip install 'thinwire[models]'")


def _of_transformers(manifest: Manifest, named: str) -> nn.Module:
    config = _config(manifest, named)
    try:
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # the library raises many kinds
        raise ModelError(
            f"{named}: {_first_line(error)}", "config.json must be that of a causal language model"
        ) from error
    return model


def config_content(named: str) -> bytes:
    """Return the content of config.json of "hf:…". Raises ModelError."""
    file = config_file(named)
    try:
        return content_of(file)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}", "give a folder with config.json") from None


def _config(manifest: Manifest, named: str) -> Any:
    """Return the library's configuration object. Raises ModelError."""
    file, content = config_file(named), config_content(named)
    try:
        values = json.loads(content)
        kind = values.pop("model_type")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ModelError(f"{file} is no configuration of a model", "it must be JSON with the key model_type") from None
    found, wanted = blake3.blake3(content).hexdigest(), manifest.model.config_hash
    if not wanted:
        raise MissingHashError("config_hash", found, file)
    if found != wanted:
        raise ModelError(
            f"{file} is not the configuration of run {manifest.run.name} (its hash is {found[:8]}…, not {wanted[:8]}…)",
            "get the file from the run's author",
        )
    try:
        from transformers import AutoConfig
        from transformers.utils import logging
    except ImportError:
        raise _no_library() from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        config = AutoConfig.for_model(kind, **{key: value for key, value in values.items() if key not in CODE})
    except Exception as error:  # the library raises many kinds
        raise ModelError(f"{file}: {_first_line(error)}", "is this version of transformers too old?") from error
    config.use_cache = False  # Training needs no cache of keys and values.
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and longest < manifest.model.context:
        raise ModelError(
            f"model.context is {manifest.model.context}, but the model has {longest} positions", "lower model.context"
        )
    return config


def read_pretrained(folder: Path, model: nn.Module) -> nn.Module:
    """Return the model in a folder of transformers, like `model`.

    Only safetensors are read. Raises WeightsError.
    """
    kind: Any = type(model)
    hint = "give a folder with config.json and model.safetensors of the run's model"
    try:
        loaded, found = kind.from_pretrained(
            folder,
            config=model.config,
            use_safetensors=True,
            local_files_only=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except Exception as error:  # the library raises many kinds
        raise WeightsError(f"{folder}: {_first_line(error)}", hint) from error
    if wrong := sorted(map(str, found["missing_keys"])):
        raise WeightsError(f"{folder}: {wrong[0]} is missing", hint)
    return cast(nn.Module, loaded)


def checkpoint_activations(model: nn.Module) -> None:
    """Compute activations twice instead of storing them, by the method that a model has for it.

    Raises ModelError for a model without one.
    """
    enable = getattr(model, "activation_checkpointing_enable", getattr(model, "gradient_checkpointing_enable", None))
    try:
        if enable is None:
            raise ValueError(f"{type(model).__name__} has no method activation_checkpointing_enable")
        enable()
    except ValueError as error:
        raise ModelError(f"no gradient checkpointing: {error}", "remove the setting gradient_checkpointing") from error


def _check(model: nn.Module, named: str, vocab: int, context: int) -> None:
    """Check parameters and logits of a model. Raises ModelError."""
    try:
        if not layout_of(model).total:
            raise ModelError(f"{named} has no trainable parameters", "set requires_grad")
        with torch.no_grad():
            logits = logits_of(model.eval(), torch.zeros(1, min(PROBE, context), dtype=torch.long))
        model.train()
        shape = tuple(logits.shape)
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        hint = "it must map token ids [B, T] to logits [B, T, vocab]; docs/guides/models-and-data.md has an example"
        raise ModelError(f"{named}: {_first_line(error)}", hint) from error
    if len(shape) != 3 or shape[0] != 1 or shape[2] < vocab:
        raise ModelError(
            f"{named} returns logits of shape {list(shape)}, and the tokenizer has {vocab} token ids",
            "the last size must be at least that",
        )


def _first_line(error: Exception) -> str:
    return (type(error).__name__ + (f": {text}" if (text := str(error).strip()) else "")).splitlines()[0]
