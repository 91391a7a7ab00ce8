"""Mapping of a module's parameters to one flat float32 vector, and copies between the two.

All methods work on a range of the vector, so that a chunk can be read and written without a copy of the whole model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import blake3
import numpy as np
import torch
from numpy.typing import NDArray
from thinwire.compression.core.types import Floats
from thinwire.compression.device import Vector
from thinwire.node.state.model_buffers import ModelBuffers, buffers_of
from thinwire.swarm.choices import BufferRule
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Piece:
    """One parameter: elements [start, stop) of the vector, in row-major order of its shape."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The trainable parameters of a module in order of their names, a tied one counted once.

    See `layout_of`.

    total: elements of the vector. digest: 32 bytes over names, shapes and element types; peers with different digests
    cannot average. buffers: persistent buffers that are state of the swarm; `read` and `write` have them behind the vector,
    all or none.
    """

    pieces: tuple[Piece, ...]
    total: int
    digest: bytes
    buffers: ModelBuffers = ModelBuffers()

    def read(self, module: nn.Module, out: Vector, start: int = 0) -> None:
        """Copy elements [start, start + size of out) of the module's vector as float32 to `out`.

        Like all methods, raises ValueError if the range exceeds the vector or the module has another layout.
        """
        if self._is_buffers(start, out):
            out[:] = self.buffers.read(module)  # type: ignore[assignment]
            return
        for parameter, inner, outer in self._parts(module, start, out):
            place = out[outer]
            target = place if isinstance(place, Tensor) else torch.from_numpy(place)
            target.copy_(parameter.reshape(-1)[inner])

    def write(self, module: nn.Module, flat: Floats, start: int = 0, keep: float = 0.0) -> None:
        """Set elements [start, start + flat.size) of the module's parameters, in place.

        Narrow types round to nearest.

        `keep`: fraction of the present values that stays: keep · θ + (1 − keep) · flat.
        """
        if self._is_buffers(start, flat):
            self.buffers.write(module, flat)
            return
        for parameter, inner, outer in self._parts(module, start, flat):
            # torch shares memory with writable arrays only.
            values = torch.from_numpy(flat[outer] if flat.flags.writeable else flat[outer].copy())
            if keep:
                values = torch.lerp(values.to(parameter.device), parameter.reshape(-1)[inner].float(), keep)
            if parameter.is_contiguous():
                parameter.view(-1)[inner].copy_(values)
            else:
                whole = parameter.reshape(-1)
                whole[inner].copy_(values)
                parameter.copy_(whole.view(parameter.shape))

    def delta(self, module: nn.Module, reference: Floats, out: Floats, start: int = 0) -> None:
        """Compute out = reference − parameters over [start, start + out.size), both of that size.

        This is DiLoCo's pseudo-gradient.

        It has the sign of a descent direction (arXiv 2311.08105). `out` must not overlap `reference`.
        """
        if reference.shape != out.shape:
            raise ValueError(f"a reference of {reference.size} elements for a range of {out.size}")
        self.read(module, out, start)
        np.subtract(reference, out, out=out)

    def split(self, flat: Floats) -> dict[str, Floats]:
        """Return views of a whole vector by parameter name, each in its parameter's shape."""
        if flat.shape != (self.total,):
            raise ValueError(f"a vector of shape {flat.shape}, expected {self.total} elements")
        return {piece.name: flat[piece.start : piece.stop].reshape(piece.shape) for piece in self.pieces}

    def flat(self, tensors: Mapping[str, NDArray[Any]]) -> Floats:
        """Return one vector of tensors by parameter name, the inverse of `split`.

        Raises KeyError if one is missing.
        """
        return np.concatenate([np.asarray(tensors[piece.name], np.float32).reshape(-1) for piece in self.pieces])

    def touched(self, start: int, stop: int) -> Iterator[tuple[Piece, slice, slice]]:
        """Yield the parameters that elements [start, stop) touch.

        Each comes with its touched elements, and their place in the range.

        Raises ValueError if the range exceeds the vector.
        """
        if not 0 <= start <= stop <= self.total:
            raise ValueError(f"elements {start}…{stop} of a vector of {self.total}")
        first = bisect_right(self.pieces, start, key=lambda piece: piece.stop)
        for piece in self.pieces[first:]:
            if piece.start >= stop:
                return
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                yield piece, slice(low - piece.start, high - piece.start), slice(low - start, high - start)

    def _is_buffers(self, start: int, vector: Vector) -> bool:
        return start == self.total and 0 < self.buffers.size == len(vector)

    def first(self, module: nn.Module) -> Floats:
        """Return the vector of a module and its buffers behind it."""
        values = np.empty(self.total + self.buffers.size, np.float32)
        for start, stop in ((0, self.total), (self.total, values.size)):
            self.read(module, values[start:stop], start)
        return values

    def _parts(self, module: nn.Module, start: int, vector: Vector) -> Iterator[tuple[Tensor, slice, slice]]:
        """Yield each parameter that the range touches.

        It comes with the range within it and the range within `vector`.
        """
        flat = vector.is_contiguous() if isinstance(vector, Tensor) else vector.flags.c_contiguous
        if vector.dtype not in (np.float32, torch.float32) or vector.ndim != 1 or not flat:
            raise ValueError(f"expected flat float32, not {vector.dtype} {tuple(vector.shape)}")
        for piece, inner, outer in self.touched(start, start + len(vector)):
            try:
                parameter = module.get_parameter(piece.name).detach()
            except AttributeError:
                raise ValueError(f"the model has no parameter {piece.name} any more") from None
            check_unchanged(piece, parameter)
            yield parameter, inner, outer


def check_unchanged(piece: Piece, parameter: Tensor) -> None:
    """Raise ValueError if a parameter has another shape or element type than when its layout was made."""
    shape, dtype = tuple(parameter.shape), _name_of(parameter.dtype)
    if (shape, dtype) != (piece.shape, piece.dtype):
        raise ValueError(f"{piece.name} is {dtype} {shape} now, it was {piece.dtype} {piece.shape}")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def layout_of(module: nn.Module, buffers: BufferRule = "local", *, outline: bool = False) -> Layout:
    """Return the layout of a module's trainable parameters; frozen ones are skipped.

    `buffers`: which persistent buffers are state, see `buffers_of`. `outline`: parameters may be without
    values, on the meta device.

    Raises ValueError for parameters that are not real floating-point numbers, have no values yet (lazy, meta device) or
    cannot be written in place. Pass the module itself, not the result of torch.compile, which has other names.
    """
    pieces: list[Piece] = []
    position = 0
    digest = blake3.blake3(b"thinwire/layout/1\0")
    trainable = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    for name, parameter in sorted(trainable, key=lambda pair: pair[0]):
        if nn.parameter.is_lazy(parameter):
            raise ValueError(f"{name} has no values yet: run one forward pass first")
        if parameter.is_meta and not outline:
            raise ValueError(f"{name} has no values yet (meta device): call to_empty(device=…) and set them first")
        if not parameter.is_floating_point():
            raise ValueError(f"{name} is {parameter.dtype}: only real floating-point parameters can be averaged")
        if parameter.is_inference():
            raise ValueError(
                f"{name} was made in torch.inference_mode: such tensors cannot be trained, so copy it first"
            )
        if any(stride == 0 and size > 1 for stride, size in zip(parameter.stride(), parameter.shape, strict=True)):
            raise ValueError(f"{name} is an expanded view, whose elements share memory: make it contiguous first")
        shape, dtype = tuple(parameter.shape), _name_of(parameter.dtype)
        pieces.append(Piece(name, shape, dtype, position, position + parameter.numel()))
        position += parameter.numel()
        digest.update(f"{len(name.encode())} {name} {dtype} {shape}\n".encode())
    shared = buffers_of(module, buffers)
    for buffer in shared.pieces:
        digest.update(f"buffer {len(buffer.name.encode())} {buffer.name} {buffer.dtype} {buffer.shape}\n".encode())
    return Layout(tuple(pieces), position, digest.digest(), shared)
