"""Tensors in a safetensors file, written as a stream of pieces and validated when read.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, raw little-endian tensors).
The library reads what we write and parses what we read; but it accepts duplicate keys (the last one wins) and
non-finite values, which are refused here, and it can only write a file at once, which would need a copy of the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

Array: TypeAlias = NDArray[Any]
Tensors: TypeAlias = Mapping[str, Array]

DTYPES: dict[str, str] = {
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Element types that a checkpoint may contain: numpy's name -> safetensors' name."""

PICKLES = (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of files of torch.save: a ZIP archive, or a pickle of protocol 2 to 5."""

_WIDTH = {"F32": 4, "F64": 8, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
_HEADER_LIMIT = 100 << 20  # same as the library's


class TensorFileError(ValueError):
    """Tensors that may not be written, or bytes that may not be read. The message names which and why."""


def _checked(name: str, tensor: Array) -> Array:
    if tensor.dtype.name not in DTYPES:
        raise TensorFileError(f"{name}: element type {tensor.dtype} is not one of {', '.join(DTYPES)}")
    if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
        raise TensorFileError(f"{name}: not all values are finite")
    return tensor


def _little(tensor: Array) -> Array:
    # Not ascontiguousarray: it turns a scalar into a vector.
    return np.asarray(tensor, dtype=tensor.dtype.newbyteorder("<"), order="C")


def pieces(tensors: Tensors, size: int, metadata: Mapping[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """Yield the file's content in pieces of at most `size` bytes (the header is a separate piece).

    Tensors are not copied if they are C-contiguous and little-endian. All are checked before the first piece. Each is read
    twice from `tensors`, and only one at a time: the mapping may fetch them from a GPU. Raises TensorFileError for an
    element type outside DTYPES and for a value that is not finite.
    """
    checked = ((name, _checked(name, tensors[name])) for name in sorted(tensors))
    ready = {name: (tensor.dtype, tensor.shape, tensor.nbytes) for name, tensor in checked}
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    # Wider elements first, in the library's order: every tensor starts at a multiple of its element size.
    order = sorted(ready, key=lambda name: (-ready[name][0].itemsize, name))
    for name in order:
        dtype, shape, nbytes = ready[name]
        start, end = end, end + nbytes
        header[name] = {"dtype": DTYPES[dtype.name], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        if ready[name][2]:
            view = _little(tensors[name]).reshape(-1).view(np.uint8).data
            for start in range(0, len(view), size):
                yield view[start : start + size]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise TensorFileError(f"the header has the key {key!r} twice")
        result[key] = value
    return result


def _header(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(_HEADER_LIMIT, len(data) - 8):
        # Checked last: a valid header can have a length whose bytes look like the beginning of a pickle.
        if data[:2] in PICKLES:
            raise TensorFileError("this is a pickle (a torch.save file), which can run code: refused")
        raise TensorFileError("not a safetensors file, or cut short")
    try:
        header = json.loads(data[8 : 8 + length], object_pairs_hook=_unique)
    except TensorFileError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: no JSON or UTF-8, or an integer of over 4,300 digits
        raise TensorFileError(f"the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise TensorFileError("the header is not an object")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        kind = entry.get("dtype") if isinstance(entry, dict) else None
        if not isinstance(kind, str) or kind not in _WIDTH:
            raise TensorFileError(f"{name}: the element type is not one of {', '.join(_WIDTH)}")
    return header


def parse(data: bytes) -> dict[str, Array]:
    """Read a whole file: return name -> array (copied).

    Raises TensorFileError for a pickle, a truncated or padded file, a duplicate key, an element type outside DTYPES, a
    layout that the library refuses, and a value that is not finite.
    """
    _header(data)
    try:
        tensors = load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise TensorFileError(f"not a valid safetensors file: {error}") from None
    for name, tensor in tensors.items():
        _checked(name, tensor)
    return dict(tensors)
