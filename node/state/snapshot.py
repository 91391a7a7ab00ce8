"""Contents of a checkpoint, and the file of each part."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from thinwire.node.state.checkpoint_manifest import Value
from thinwire.node.state.tensor_file import Array, TensorFileError, Tensors
from thinwire.swarm.messages.registry import Chain, PeerId

Standing = tuple[int, tuple[PeerId, ...], bytes, Chain]
"""Last round of a replica, its members, their lives, and the chain that proves them."""

PRIVATE = "private.safetensors"
_FRAGMENT = re.compile(r"fragment-(\d{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class FragmentState:
    """State of one fragment, equal on all peers: float32 arrays by parameter name.

    Momentum may be empty at first.
    """

    weights: Tensors
    momentum: Tensors
    release: Callable[[], None] = lambda: None
    """Called when the tensors have been written and may change again."""


@dataclass(frozen=True, slots=True)
class PrivateState:
    """State that only this peer has.

    `tensors`: inner optimizer moments, residuals, RNG bytes; `values`: the data cursor.
    """

    tensors: Tensors
    values: Mapping[str, Value]
    release: Callable[[], object] | None = None
    """Called when the tensors have been written; with such a function they come before the fragments."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after `round`.

    - `digest`: state digest (32 bytes).
    - `members`: members of that round. `lives`: their lives, as in Proposal.
    - `chain`: proves round and members.
    - `standings`: by fragment, if fragments have separate rounds. Then each of them has a chain, and the snapshot has none.
    - `lost`: returns True if the arrays may have changed since the snapshot was made.
    """

    run_id: bytes
    round: int
    digest: bytes
    members: tuple[PeerId, ...]
    fragments: Mapping[int, FragmentState]
    private: PrivateState | None
    standings: Mapping[int, Standing] | None = None
    lives: bytes = b""
    chain: Chain = ()
    lost: Callable[[], bool] = lambda: False


def files(snapshot: Snapshot) -> Iterator[tuple[str, Tensors]]:
    """Yield file name and tensors; release a fragment when the next file is asked for.

    Raises TensorFileError if shared state is not float32.
    """
    private = snapshot.private
    if private is not None and private.release is not None:
        yield PRIVATE, private.tensors
        private.release()
    for index, fragment in sorted(snapshot.fragments.items()):
        tensors = {f"weights/{name}": tensor for name, tensor in fragment.weights.items()}
        tensors |= {f"momentum/{name}": tensor for name, tensor in fragment.momentum.items()}
        others = [f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if tensor.dtype.name != "float32"]
        if others:
            raise TensorFileError(f"fragment {index}: {others[0]}, not float32")
        yield f"fragment-{index:05d}.safetensors", tensors
        tensors.clear()
        fragment.release()
    if private is not None and private.release is None:
        yield PRIVATE, private.tensors


def fragment_index(file: str) -> int | None:
    """Return the number of the fragment in a file; None if it holds none."""
    match = _FRAGMENT.fullmatch(file)
    return int(match[1]) if match else None


def fragment_state(tensors: Tensors) -> FragmentState:
    """Return the fragment in a file, the inverse of `files`.

    Raises TensorFileError for a tensor that does not belong there.
    """
    parts: dict[str, dict[str, Array]] = {"weights": {}, "momentum": {}}
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        if part not in parts or tensor.dtype.name != "float32":
            raise TensorFileError(f"{key} ({tensor.dtype}) does not belong in a fragment")
        parts[part][name] = tensor
    return FragmentState(parts["weights"], parts["momentum"])
