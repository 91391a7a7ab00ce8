"""What a checkpoint holds, and which file each part of it goes to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from thinwire.swarm.protocol import PeerId

from .seal import Value
from .tensorfile import Array, TensorFileError, Tensors

PRIVATE = "private.safetensors"
_FRAGMENT = re.compile(r"fragment-(\d{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class FragmentState:
    """What all peers agree on for one fragment: float32 arrays by parameter name. Momentum may be empty at first."""

    weights: Tensors
    momentum: Tensors


@dataclass(frozen=True, slots=True)
class PrivateState:
    """What only this peer has: inner optimizer moments, residuals, RNG bytes (tensors); the data cursor (values)."""

    tensors: Tensors
    values: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after `round`. `digest` is the state digest (32 bytes), `members` the participants of that round.
    `chains`: of each fragment, where these have rounds of their own, the last one and its participants.
    """

    run_id: bytes
    round: int
    digest: bytes
    members: tuple[PeerId, ...]
    fragments: Mapping[int, FragmentState]
    private: PrivateState | None
    chains: Mapping[int, tuple[int, tuple[PeerId, ...]]] | None = None


def files(snapshot: Snapshot) -> Iterator[tuple[str, Tensors]]:
    """File name -> tensors. Raises TensorFileError when shared state is not float32."""
    for index, fragment in sorted(snapshot.fragments.items()):
        tensors = {f"weights/{name}": tensor for name, tensor in fragment.weights.items()}
        tensors |= {f"momentum/{name}": tensor for name, tensor in fragment.momentum.items()}
        for name, tensor in tensors.items():
            if tensor.dtype.name != "float32":
                raise TensorFileError(f"fragment {index}: {name} is {tensor.dtype}, not float32")
        yield f"fragment-{index:05d}.safetensors", tensors
    if snapshot.private is not None:
        yield PRIVATE, snapshot.private.tensors


def fragment_index(file: str) -> int | None:
    """Which fragment a file holds; None when it holds none."""
    match = _FRAGMENT.fullmatch(file)
    return int(match[1]) if match else None


def fragment_state(tensors: Tensors) -> FragmentState:
    """The inverse of `files` for one fragment. Raises TensorFileError for a tensor that does not belong there."""
    parts: dict[str, dict[str, Array]] = {"weights": {}, "momentum": {}}
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        if part not in parts or tensor.dtype.name != "float32":
            raise TensorFileError(f"{key} ({tensor.dtype}) does not belong in a fragment")
        parts[part][name] = tensor
    return FragmentState(parts["weights"], parts["momentum"])
