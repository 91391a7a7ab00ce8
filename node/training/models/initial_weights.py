"""Weights with which a run starts, from files: checked against the hash in its manifest.

A state is a set of named tensors in files, whatever the method, the fragments or the stages of the run that wrote it: a
name tells which part of which parameter a tensor is. So any complete set of files gives the parameters of any layout of the
same model, and each replica takes from them what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import blake3
import numpy as np
from thinwire.compression.core.types import Floats
from thinwire.node.state.checkpoint_manifest import files_of
from thinwire.node.state.checkpoint_store import MANIFEST
from thinwire.node.state.fragments import joined
from thinwire.node.state.layout import Layout
from thinwire.node.state.snapshot import fragment_index, fragment_state
from thinwire.node.state.tensor_file import Array, TensorFileError, Tensors, parse
from thinwire.node.training.models.missing_hashes import MissingHashError
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.identity.regular_file import content_of

KEY = "model.weights"


class WeightsError(HintedError):
    """File without usable weights, or with other weights than the manifest names."""

    exit_code: ClassVar[int] = 2


def digest_of(theta: Floats) -> str:
    """Return the blake3 of all parameters, in hexadecimal.

    They are in order of the layout, as little-endian float32.
    """
    return blake3.blake3(theta.astype("<f4", copy=False).data.cast("B")).hexdigest()


def load_weights(paths: Sequence[Path], layout: Layout) -> Floats:
    """Return the parameters in safetensors files and in fragments of checkpoints' directories.

    Raises WeightsError if one of the layout's parameters is missing, has another shape or two values, or is not finite.
    """
    try:
        return vector_of(read_weights(paths), layout, paths[0])
    except WeightsError as error:
        hint = f"{error.hint}; of peers that hold stages, give --from once for each stage"
        raise WeightsError(str(error), hint) from None


def read_weights(paths: Sequence[Path]) -> dict[str, Array]:
    """Return the parameters in safetensors files and in checkpoints' directories.

    Raises WeightsError if two sources have other values of one parameter.
    """
    tensors, path = dict[str, Array](), paths[0]
    try:
        for path in paths:
            found = _fragments(path) if path.is_dir() else parse(content_of(path, None))
            for name in tensors.keys() & found.keys():
                if not np.array_equal(tensors[name], found[name]):
                    raise ValueError(f"another source has other values of {name}")
            tensors |= found
        path = paths[0]
        return joined(tensors)
    except OSError as error:
        raise WeightsError(f"cannot read {error.filename}: {error.strerror}", _HINT) from None
    except (TensorFileError, ValueError) as error:
        raise WeightsError(f"{path}: {error}", _HINT) from None


def vector_of(tensors: Tensors, layout: Layout, path: Path) -> Floats:
    """Return tensors as one vector in the order of the layout; `path` is their origin, for messages.

    Raises WeightsError if one of the layout's parameters is missing or has another shape, or if there are more.
    """
    theta, found = np.empty(layout.total, np.float32), dict(tensors)
    for piece in layout.pieces:
        tensor = found.pop(piece.name, None)
        if tensor is None or tensor.shape != piece.shape or tensor.dtype.kind != "f":
            there = "no such tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise WeightsError(f"{path}: {there}, where {piece.name} {list(piece.shape)} is needed", _HINT)
        theta[piece.start : piece.stop] = tensor.reshape(-1)
    if found:
        raise WeightsError(f"{path}: the model has no parameter {min(found)}", _HINT)
    return theta


_HINT = "give a file of `thinwire export OUT`, or a checkpoint's directory, of a model with the same [model] table"


def _fragments(folder: Path) -> dict[str, Array]:
    """Return the weights in a checkpoint's directory.

    Raises ValueError if they differ from its manifest, if it has one. Any key may have signed the manifest, so this finds
    damage, but proves nothing about the origin.
    """
    weights: dict[str, Array] = {}
    manifest = folder / MANIFEST
    entries = {entry.name: entry for entry in files_of(content_of(manifest, None))} if manifest.is_file() else {}
    names = entries or {file.name for file in folder.iterdir()}
    for name in sorted(name for name in names if fragment_index(name) is not None):
        data = content_of(folder / name, None)
        if entries:
            entries[name].check(data)
        weights |= fragment_state(parse(data)).weights
    if not weights:
        raise ValueError("this directory has no fragments of a checkpoint")
    return weights


def missing_weights(named: str) -> WeightsError:
    """Return the error of a founder without the first parameters of this hash."""
    return WeightsError(f"this run starts with given weights ({KEY} = {named[:8]}…)", "give their file with --from")


def not_finite(theta: Floats, layout: Layout) -> str:
    """Return the name of the first parameter with NaN or infinity; empty if there is none."""
    pieces = (piece.name for piece in layout.pieces if not np.isfinite(theta[piece.start : piece.stop]).all())
    return next(pieces, "")


def weights_not_finite(name: str) -> WeightsError:
    """Return the error of a founder whose model begins with NaN or infinity in this parameter."""
    return WeightsError(f"the first weights of {name} are not finite", "initialize it with finite values")


def check_weights(theta: Floats, named: str, source: Path) -> None:
    """Check first parameters, from the file `source`, against the hash `named` in the manifest.

    Raises MissingHashError, WeightsError.
    """
    check_digest(digest_of(theta), named, source)


def check_digest(found: str, named: str, source: Path | str) -> None:
    """Check the hash of the weights in `source` against the hash `named` in the manifest.

    Raises MissingHashError, WeightsError.
    """
    if named == found:
        return
    if not named:
        raise MissingHashError("weights", found, source)
    raise WeightsError(
        f"{source} has other weights ({found[:8]}…) than the manifest names ({KEY} = {named[:8]}…)",
        "give the weights that the manifest names, or start another run by changing the key",
    )
