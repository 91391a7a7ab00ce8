"""Persistent buffers of a module as float32 values, and copies between the two.

Buffers are tensors of a module that no optimizer trains, such as the running statistics of BatchNorm. Those that are
not persistent (masks, tables) can be computed again and are no state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from thinwire.compression.core.exact_block import ExactBlock
from thinwire.compression.core.types import Floats
from thinwire.swarm.choices import BufferRule
from torch import Tensor, nn

_BITS = 22
"""Bits of an integer in one float32 value, which is exact below 2^24."""


@dataclass(frozen=True, slots=True)
class BufferPiece:
    """One buffer: values [start, stop), `words` for each element; 0 words: a float of one value."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    words: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ModelBuffers:
    """Buffers of a module: averaged floats, then copied ones, each in the order of their names."""

    pieces: tuple[BufferPiece, ...] = ()
    block: ExactBlock = ExactBlock()

    @property
    def size(self) -> int:
        """Float32 values of all buffers."""
        return self.block.size

    def read(self, module: nn.Module) -> Floats:
        """Return the values of a module's buffers."""
        values = np.empty(self.size, np.float32)
        for piece in self.pieces:
            tensor = module.get_buffer(piece.name).detach()
            if tuple(tensor.shape) != piece.shape:
                raise ValueError(f"{piece.name} is {tuple(tensor.shape)} now, it was {piece.shape}")
            values[piece.start : piece.stop] = _values(tensor, piece.words)
        return values

    def write(self, module: nn.Module, values: Floats) -> None:
        """Set a module's buffers, in place."""
        for name, tensor in self.split(values).items():
            module.get_buffer(name).detach().copy_(tensor)

    def split(self, values: Floats) -> dict[str, Tensor]:
        """Return the buffers by name, in their types and shapes. Any finite values are valid."""
        if values.shape != (self.size,):
            raise ValueError(f"buffers of shape {values.shape}, expected {self.size} values")
        return {piece.name: _tensor(values[piece.start : piece.stop], piece) for piece in self.pieces}


def buffers_of(module: nn.Module, rule: BufferRule) -> ModelBuffers:
    """Return the persistent buffers of a module; none with the rule "local".

    Raises ValueError for a buffer that has no values yet, or values that are no finite real numbers.
    """
    if rule == "local":
        return ModelBuffers()
    # The names of state_dict() would not do, because hooks such as those of checkpoint_wrapper change them. Torch has no
    # other way to show which buffers are persistent.
    transient = {
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        for name in part._non_persistent_buffers_set
    }
    found = sorted((name, tensor) for name, tensor in module.named_buffers() if name not in transient)
    for name, tensor in found:
        advice = f"register it with persistent=False if it is no state, or set model.buffers = 'local' ({name})"
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            raise ValueError(f"the buffer {name} has no values yet: run one forward pass first")
        if tensor.is_complex():
            raise ValueError(f"the buffer {name} is {tensor.dtype}: only real buffers can be shared; {advice}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.detach().float()).all()):
            raise ValueError(f"the buffer {name} has values that are not finite; {advice}")
    averaged = [one for one in found if one[1].is_floating_point() and rule == "average"]
    copied = [one for one in found if not (one[1].is_floating_point() and rule == "average")]
    pieces, at, border = list[BufferPiece](), 0, 0
    for name, tensor in (*averaged, *copied):
        words = 0 if tensor.is_floating_point() else -(-8 * tensor.element_size() // _BITS)
        size = tensor.numel() * max(1, words)
        pieces.append(BufferPiece(name, tuple(tensor.shape), tensor.dtype, words, at, at + size))
        at += size
        border = at if len(pieces) <= len(averaged) else border
    return ModelBuffers(tuple(pieces), ExactBlock(border, at - border))


def _values(tensor: Tensor, words: int) -> Floats:
    if not words:
        return tensor.float().cpu().numpy().reshape(-1)
    numbers: NDArray[np.int64] = tensor.to(torch.int64).cpu().numpy().reshape(-1)
    low = [(numbers >> (_BITS * word)) & ((1 << _BITS) - 1) for word in range(words - 1)]
    return np.concatenate([*low, numbers >> (_BITS * (words - 1))]).astype(np.float32)


def _tensor(values: Floats, piece: BufferPiece) -> Tensor:
    if not piece.words:
        # A peer may send 1e30 for a float16 buffer: infinity would end the training of all.
        largest = min(torch.finfo(piece.dtype).max, torch.finfo(torch.float32).max)
        return torch.from_numpy(values.copy()).clamp(-largest, largest).reshape(piece.shape).to(piece.dtype)
    limit = 1 << _BITS
    parts = np.clip(np.rint(values), -limit, limit - 1).astype(np.int64).reshape(piece.words, -1)
    numbers = sum(part << (_BITS * word) for word, part in enumerate(parts))
    return torch.from_numpy(np.asarray(numbers, np.int64)).reshape(piece.shape).to(piece.dtype)
