"""Export of weights: a safetensors file, or a folder for transformers, except for models of functions.

The built-in model is a Llama with other parameter names, so the folder's model_type is "llama".
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from thinwire.node.runtime.config import Config
from thinwire.node.runtime.console import warn
from thinwire.node.runtime.directories import Directories, RunDirectory, directories
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.state.checkpoint_store import CheckpointStore
from thinwire.node.state.fragments import joined
from thinwire.node.state.snapshot import FragmentState, Snapshot
from thinwire.node.state.tensor_file import Array, Tensors, pieces
from thinwire.node.training.tokenizer import byte_tokenizer_file
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.manifest.parser import parse

FORMATS = ("safetensors", "transformers", "peft")
_PIECE = 4 << 20
_NORM_EPSILON = 1e-5


class ExportError(HintedError):
    """Nothing to export in this format, or no place to write it."""

    exit_code: ClassVar[int] = 2


def export(config: Config, out: Path, run: str, format: str, homes: Sequence[Path] = ()) -> None:
    """Write the newest valid checkpoint to `out` and print a description to stdout. Raises ExportError.

    run: start of a run's id, "" if there is only one. homes: directories of daemons that hold other stages of the model.
    An existing file is replaced in one step.
    """
    if format not in FORMATS:
        raise ExportError(f"unknown format {format!r}", f"choose one of: {', '.join(FORMATS)}")
    directory = find_run(config.directories.runs, run)
    snapshot, path = _newest(config.directories, directory)
    rounds = _rounds(snapshot)
    fragments = dict(snapshot.fragments)
    for home in homes:
        others = directories(home)
        other, _ = _newest(others, find_run(others.runs, snapshot.run_id.hex()))
        added = other.fragments.keys() - fragments.keys()
        fragments |= {stage: other.fragments[stage] for stage in added}
        rounds |= {stage: _rounds(other)[stage] for stage in added}
    weights = all_weights(fragments)
    if directory.manifest.exists() or format != "safetensors":
        manifest = read_manifest(directory)
        if missing := [str(stage) for stage in range(manifest.pipeline.stages) if stage not in fragments]:
            raise ExportError(
                f"the checkpoint lacks {', '.join(missing)} of the model's {manifest.pipeline.stages} stages",
                "add the directories of daemons that hold them: --with DIRECTORY",
            )
    try:
        if format == "transformers":
            weights, description = for_transformers(weights, manifest, directory)
            out.mkdir(parents=True, exist_ok=True)
            write_tensors(out / "model.safetensors", weights)
            (out / "config.json").write_bytes(description)
            _write_tokenizer(out, manifest, directory)
        elif format == "peft":
            weights, description = for_peft(weights, manifest, directory)
            out.mkdir(parents=True, exist_ok=True)
            write_tensors(out / "adapter_model.safetensors", weights)
            (out / directory.adapter_config.name).write_bytes(description)
        else:
            out.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(out, weights)
    except OSError as error:
        raise ExportError(f"cannot write {out}: {error.strerror}", "choose a writable path") from None
    count = sum(tensor.size for tensor in weights.values())
    at = sorted({rounds[stage] for stage in fragments})
    text = f"round {at[0]}" if len(at) == 1 else f"rounds {at[0]} to {at[-1]}, since stages are not equally far"
    print(f"{out}: {len(weights)} tensors, {count} parameters, {text}, {path}")


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


def _newest(home: Directories, run: RunDirectory) -> tuple[Snapshot, Path | None]:
    loaded = CheckpointStore(run.checkpoints, RealDisk(), Identity.load(home.key)).load()
    if loaded.snapshot is None:
        reasons = "; ".join(loaded.remarks) or "there are no checkpoints yet"
        raise ExportError(f"no good checkpoint in {run.checkpoints}", reasons)
    return loaded.snapshot, loaded.path


def _rounds(snapshot: Snapshot) -> dict[int, int]:
    """Return the last round by fragment."""
    separate = {stage: standing[0] for stage, standing in (snapshot.standings or {}).items()}
    return dict.fromkeys(snapshot.fragments, snapshot.round) | separate


def find_run(runs: Path, start: str) -> RunDirectory:
    """Return the only run, or the only one whose id begins with `start`. Raises ExportError."""
    names = sorted(path.name for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []
    if not names:
        raise ExportError(f"there are no runs in {runs}", "train first, or give the daemon's directory with --home")
    found = [name for name in names if name.startswith(start[:16])]
    if len(found) != 1:
        problem = f"{len(found)} runs begin with {start!r}" if start else f"there are {len(found)} runs"
        raise ExportError(problem, f"choose with --run: {', '.join(names)}")
    return RunDirectory(runs / found[0])


def read_manifest(directory: RunDirectory) -> Manifest:
    """Return the run's manifest as stored by the daemon.

    Raises ExportError, or ManifestError if it was changed since.
    """
    try:
        return parse(directory.manifest.read_bytes(), str(directory.manifest))
    except OSError as error:
        hint = "--format safetensors needs no manifest"
        raise ExportError(f"cannot read {directory.manifest}: {error.strerror}", hint) from None


def all_weights(fragments: Mapping[int, FragmentState]) -> dict[str, Array]:
    """Return the slow weights of all fragments by parameter name.

    Raises ExportError if two fragments have the same name, or if part of a parameter is missing: the checkpoint belongs to a
    peer that holds a part of the model.
    """
    weights: dict[str, Array] = {}
    for index, fragment in sorted(fragments.items()):
        if twice := weights.keys() & fragment.weights.keys():
            raise ExportError(f"fragment {index} holds {min(twice)} again", "the checkpoint is not of one model")
        weights |= fragment.weights
    try:
        return joined(weights)
    except ValueError as error:
        raise ExportError(
            f"{error} in this checkpoint", "add the directories of daemons that hold the rest: --with"
        ) from None


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file completely or not at all. Raises OSError."""
    disk = RealDisk()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    file = disk.create(draft)
    try:
        # transformers refuses a file without this metadata
        for piece in pieces(tensors, _PIECE, {"format": "pt"}):
            file.write(piece)
        file.sync()
        disk.rename(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    finally:
        file.close()


def for_transformers(
    weights: Mapping[str, Array], manifest: Manifest, directory: RunDirectory
) -> tuple[dict[str, Array], bytes]:
    """Return weights under the names of transformers, and the content of config.json. Raises ExportError."""
    if manifest.lora.rank:
        raise ExportError(
            "the run trains an adapter, not the whole model",
            "use --format peft; peft.PeftModel.from_pretrained(base, OUT).merge_and_unload() makes one model of both",
        )
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
        raise ExportError("the run trains a whole model, not an adapter", "use --format transformers or safetensors")
    try:
        from thinwire.node.training.lora import in_peft

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
    from thinwire.node.training.transformer import THETA

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
