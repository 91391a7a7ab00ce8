"""Weights for others: one safetensors file, or for the built-in model a folder that Hugging Face transformers loads.

The built-in model is a Llama in all but names, so the folder says model_type "llama".
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from thinwire.swarm.errors import HintedError
from thinwire.swarm.identity import Identity
from thinwire.swarm.manifest import Manifest, parse

from .chains import joined
from .checkpoint import CheckpointStore
from .config import Config
from .directories import RunDirectory
from .disk import RealDisk
from .snapshot import Snapshot
from .tensorfile import Array, Tensors, pieces

FORMATS = ("safetensors", "transformers")
_PIECE = 4 << 20
_NORM_EPSILON = 1e-5


class ExportError(HintedError):
    """Nothing here that could be exported this way, or nowhere to write it."""

    exit_code: ClassVar[int] = 2


def export(config: Config, out: Path, run: str, format: str) -> None:
    """Write the newest good checkpoint to `out` and print what it is to stdout. Raises ExportError.

    `run` is the start of a run's id, "" where there is but one. An existing file is replaced in one step.
    """
    if format not in FORMATS:
        raise ExportError(f"unknown format {format!r}", f"formats: {', '.join(FORMATS)}")
    directory = find_run(config.directories.runs, run)
    store = CheckpointStore(directory.checkpoints, RealDisk(), Identity.load(config.directories.key))
    loaded = store.load()
    if loaded.snapshot is None:
        reasons = "; ".join(loaded.remarks) or "there are no checkpoints yet"
        raise ExportError(f"no good checkpoint in {directory.checkpoints}", reasons)
    weights = all_weights(loaded.snapshot)
    try:
        if format == "transformers":
            manifest = read_manifest(directory)
            weights, description = llama(weights, manifest)
            out.mkdir(parents=True, exist_ok=True)
            write_tensors(out / "model.safetensors", weights)
            (out / "config.json").write_text(json.dumps(description, indent=2) + "\n")
        else:
            out.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(out, weights)
    except OSError as error:
        raise ExportError(f"cannot write {out}: {error.strerror}", "name a place that you may write to") from None
    count = sum(tensor.size for tensor in weights.values())
    print(f"{out}: {len(weights)} tensors, {count} parameters, round {loaded.snapshot.round}, {loaded.path}")


def find_run(runs: Path, start: str) -> RunDirectory:
    """The only run, or the only one whose id begins with `start`. Raises ExportError."""
    names = sorted(path.name for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []
    if not names:
        raise ExportError(f"there are no runs in {runs}", "train first, or name the daemon's directory with --home")
    found = [name for name in names if name.startswith(start[:16])]
    if len(found) != 1:
        problem = f"{len(found)} runs begin with {start!r}" if start else f"there are {len(found)} runs here"
        raise ExportError(problem, f"choose with --run: {', '.join(names)}")
    return RunDirectory(runs / found[0])


def read_manifest(directory: RunDirectory) -> Manifest:
    """The run's manifest as the daemon kept it. Raises ExportError, or ManifestError when it was changed since."""
    try:
        return parse(directory.manifest.read_bytes(), str(directory.manifest))
    except OSError as error:
        hint = "--format safetensors needs no manifest"
        raise ExportError(f"cannot read {directory.manifest}: {error.strerror}", hint) from None


def all_weights(snapshot: Snapshot) -> dict[str, Array]:
    """The slow weights of all fragments by parameter name. Raises ExportError when two fragments hold one name, or a part of a
    parameter is in none: the checkpoint is of a peer that holds a part of the model.
    """
    weights: dict[str, Array] = {}
    for index, fragment in sorted(snapshot.fragments.items()):
        if twice := weights.keys() & fragment.weights.keys():
            raise ExportError(f"fragment {index} holds {min(twice)} again", "the checkpoint is not of one model")
        weights |= fragment.weights
    try:
        return joined(weights)
    except ValueError as error:
        raise ExportError(f"{error} in this checkpoint", "export on a peer that holds the whole model") from None


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file whole or not at all. Raises OSError."""
    disk = RealDisk()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    file = disk.create(draft)
    try:
        # transformers refuses a file that does not say where it comes from
        for piece in pieces(tensors, _PIECE, {"format": "pt"}):
            file.write(piece)
        file.sync()
        disk.rename(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    finally:
        file.close()


def llama(weights: Mapping[str, Array], manifest: Manifest) -> tuple[dict[str, Array], dict[str, object]]:
    """The built-in model's weights under Llama's names, and config.json's content. Raises ExportError.

    Ours keeps query, key and value in one matrix, and the two halves of SwiGLU's entry in another; both are split.
    """
    if manifest.model.kind != "transformer":
        raise ExportError("the run trains a module of its author's own", "--format safetensors works for any")
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
            f"the checkpoint has {min(left)}, which the built-in model has not", "use --format safetensors"
        )
    from .model import THETA

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
