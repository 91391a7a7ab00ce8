"""Export of weights: a safetensors file, or a folder for transformers or peft.

The built-in model is a Llama with other parameter names, so the folder's model_type is "llama". Models of functions have no
folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from thinwire.node.runtime.console import warn
from thinwire.node.runtime.directories import RunDirectory
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.runtime.load_settings import Config
from thinwire.node.state.tensor_file import Array, Tensors, pieces
from thinwire.node.training.models.tokenizer import byte_tokenizer_file
from thinwire.node.training.stored_model import MANIFEST_KEY, NoModelError, StoredModel
from thinwire.swarm.manifest.manifest import Manifest

FORMATS = ("safetensors", "transformers", "peft")
_PIECE = 4 << 20
_NORM_EPSILON = 1e-5


class ExportError(NoModelError):
    """Nothing to export in this format, or no place to write it."""


def export(model: StoredModel, out: Path, format: str, config: Config, *, force: bool = False) -> None:
    """Write the weights of a model to `out` and print a description to stdout. Raises ExportError.

    An earlier export is replaced in one step. Other files, and files in a folder, are replaced only with `force`.

    - `config`: names the base into which an adapter is merged; merging raises the errors of `StoredModel.model`.
    """
    if format not in FORMATS:
        raise ExportError(f"unknown format {format!r}", f"choose one of: {', '.join(FORMATS)}")
    weights = model.weights
    try:
        if out.exists() and not (out.is_file() or out.is_dir()):  # a rename would replace a device, too
            raise ExportError(f"{out} is neither a file nor a folder", "name the file to write")
        if format == "safetensors" and out.is_dir():  # also ".", which has no name to write under
            raise ExportError(f"{out} is a folder", "name the file to write")
        if out.is_file() and not force and not _is_export(out):
            raise ExportError(f"{out} is no earlier export", "name another file, or replace it with --force")
        if format != "safetensors" and not force and out.is_dir() and any(out.iterdir()):
            raise ExportError(f"{out} has files already", "name another folder, or replace its files with --force")
        if format == "transformers":
            manifest = model.described()
            if manifest.lora.rank:
                weights = with_base(model, config)
            weights, description = for_transformers(weights, manifest, model.directory)
            out.mkdir(parents=True, exist_ok=True)
            write_tensors(out / "model.safetensors", weights)
            (out / "config.json").write_bytes(description)
            _write_tokenizer(out, manifest, model.directory)
        elif format == "peft":
            weights, description = for_peft(weights, model.described(), model.directory)
            out.mkdir(parents=True, exist_ok=True)
            write_tensors(out / "adapter_model.safetensors", weights)
            (out / model.directory.adapter_config.name).write_bytes(description)
        else:
            out.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(out, weights, {MANIFEST_KEY: model.toml} if model.toml is not None else {})
    except OSError as error:
        raise ExportError(f"cannot write {out}: {error.strerror}", "choose a writable path") from None
    count = sum(tensor.size for tensor in weights.values())
    print(f"{out}: {len(weights)} tensors, {count} parameters, {model.origin}")


def _is_export(path: Path) -> bool:
    try:
        with safe_open(path, "np") as file:
            return MANIFEST_KEY in (file.metadata() or {})
    except SafetensorError:
        return False


def _write_tokenizer(out: Path, manifest: Manifest, directory: RunDirectory) -> None:
    """Write the tokenizer's files into a folder for transformers; warn if they are not on this machine."""
    content = byte_tokenizer_file() if manifest.data.tokenizer == "bytes" else b""
    if not content:
        try:
            content = directory.tokenizer.read_bytes()
        except FileNotFoundError:
            warn(f"no tokenizer is written: the daemon has no copy yet of {manifest.data.tokenizer}, the run's file")
            return
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": manifest.model.context}
    (out / "tokenizer.json").write_bytes(content)
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def write_tensors(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file completely or not at all. Raises OSError.

    metadata: more entries of its header.
    """
    disk = RealDisk()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    file = disk.create(draft)
    try:
        # transformers refuses a file without this metadata
        for piece in pieces(tensors, _PIECE, {"format": "pt", **(metadata or {})}):
            file.write(piece)
        file.sync()
        disk.rename(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    finally:
        file.close()


def with_base(model: StoredModel, config: Config) -> dict[str, Array]:
    """Return the weights of an adapter's base with the adapter added.

    Raises ExportError, and what `StoredModel.model` does.
    """
    if model.described().model.kind != "hf":
        raise ExportError("the base of this adapter is no model of transformers", "use --format peft")
    from thinwire.node.training.models.lora import merged

    made, _ = model.model(config, Path())
    return merged(made)


def for_transformers(
    weights: Mapping[str, Array], manifest: Manifest, directory: RunDirectory
) -> tuple[dict[str, Array], bytes]:
    """Return weights under the names of transformers, and the content of config.json. Raises ExportError."""
    if manifest.model.kind != "hf":
        renamed, description = llama(weights, manifest)
        return renamed, json.dumps(description, indent=2).encode() + b"\n"
    try:
        return dict(weights), directory.model_config.read_bytes()
    except OSError as error:
        hint = "start the daemon once more, which stores the file, or use --format safetensors"
        raise ExportError(f"cannot read {directory.model_config}: {error.strerror}", hint) from None


def for_peft(
    weights: Mapping[str, Array], manifest: Manifest, directory: RunDirectory
) -> tuple[dict[str, Array], bytes]:
    """Return an adapter's weights under the names of peft, and the content of adapter_config.json.

    Raises ExportError.
    """
    if not manifest.lora.rank:
        others = "transformers or safetensors" if manifest.model.kind in ("transformer", "hf") else "safetensors"
        raise ExportError("the run trains a whole model, not an adapter", f"use --format {others}")
    try:
        from thinwire.node.training.models.lora import in_peft

        return in_peft(weights), directory.adapter_config.read_bytes()
    except OSError as error:
        hint = "start the daemon once more, which stores the file, or use --format safetensors"
        raise ExportError(f"cannot read {directory.adapter_config}: {error.strerror}", hint) from None


def llama(weights: Mapping[str, Array], manifest: Manifest) -> tuple[dict[str, Array], dict[str, object]]:
    """Return the built-in model's weights under Llama's names, and the content of config.json.

    Raises ExportError.

    The built-in model has query, key and value in one matrix, and the two halves of SwiGLU's input in another; both are
    split.
    """
    if manifest.model.kind != "transformer":
        raise ExportError("the run trains a custom module", "--format safetensors works for any module")
    left = dict(weights)

    def take(name: str) -> Array:
        try:
            return left.pop(name)
        except KeyError:
            raise ExportError(f"the checkpoint lacks {name}", "was it written by another version?") from None

    embedding = take("embedding.weight")
    width = embedding.shape[1]
    result = {"model.embed_tokens.weight": embedding}
    for index in range(manifest.model.layers):
        ours, theirs = f"blocks.{index}.", f"model.layers.{index}."
        qkv, gates = take(f"{ours}attention.qkv.weight"), take(f"{ours}feedforward.gate.weight")
        hidden = gates.shape[0] // 2
        for place, letter in enumerate("qkv"):
            result[f"{theirs}self_attn.{letter}_proj.weight"] = qkv[place * width : (place + 1) * width]
        result[f"{theirs}self_attn.o_proj.weight"] = take(f"{ours}attention.out.weight")
        result[f"{theirs}mlp.gate_proj.weight"] = gates[:hidden]
        result[f"{theirs}mlp.up_proj.weight"] = gates[hidden:]
        result[f"{theirs}mlp.down_proj.weight"] = take(f"{ours}feedforward.out.weight")
        result[f"{theirs}input_layernorm.weight"] = take(f"{ours}norm1.weight")
        result[f"{theirs}post_attention_layernorm.weight"] = take(f"{ours}norm2.weight")
    result["model.norm.weight"] = take("norm.weight")
    if not manifest.model.tied:
        result["lm_head.weight"] = take("head.weight")
    if left:
        raise ExportError(
            f"the checkpoint has {min(left)}, which the built-in model does not have", "use --format safetensors"
        )
    from thinwire.node.training.models.transformer import THETA

    description: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "intermediate_size": result["model.layers.0.mlp.gate_proj.weight"].shape[0],
        "num_hidden_layers": manifest.model.layers,
        "num_attention_heads": manifest.model.heads,
        "num_key_value_heads": manifest.model.heads,
        "max_position_embeddings": manifest.model.context,
        "hidden_act": "silu",
        "rms_norm_eps": _NORM_EPSILON,
        "rope_theta": THETA,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": manifest.model.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }
    return result, description
