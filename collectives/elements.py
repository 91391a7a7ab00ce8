"""Element types of averages that are no training rounds: exact arithmetic in the type itself, whatever codecs can do.

Of one chunk all contributions are there at once, in peer-id order, at the one peer that owns it; so the result is the same
wherever it is computed anew. NaN and infinity go through as in any arithmetic: they are the caller's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from thinwire.collectives.aggregate import mean
from thinwire.collectives.buffers import Pool
from thinwire.collectives.rounding import encode
from thinwire.compression.codec import Buffer, Codec, CodecError, Floats
from thinwire.compression.floats import Fp32

EXACT = "exact"
"""The codec that changes nothing."""

OPS = ("mean", "sum", "min", "max")

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
TYPES = (*FLOATS, *INTEGERS, "bool")
NARROW = ("float32", "float16", "bfloat16")
"""Types that codecs of float32 can carry."""

Array = NDArray[Any]


class ElementError(ValueError):
    """An operation that there is not for an element type; the message names both, and what there is."""


class Elements(Protocol):
    """How elements travel, and what becomes of several peers' ones."""

    def nbytes(self, n: int) -> int:
        """Bytes of n elements."""
        ...

    def check(self, payload: Buffer, n: int) -> float:
        """Raises CodecError for what no honest peer sends. What it gives says nothing about norms: it is 0."""
        ...

    def encode(self, values: Array) -> Buffer:
        """The payload of some elements. Raises CodecError for values that the codec cannot say."""
        ...

    def decode(self, payload: Buffer, out: Array) -> None:
        """Into `out`, of the element type."""
        ...

    def result(self, payloads: Sequence[Buffer], weights: Sequence[float], size: int) -> Buffer:
        """The payload of what the operation makes of several peers' `size` elements."""
        ...


def elements(element: str, op: str, codec: str, dense: Callable[[str], Codec]) -> Elements:
    """The parts of an operation. `dense` gives a codec by its name, and raises ValueError. Raises ElementError, and that."""
    if element not in TYPES:
        raise ElementError(f"elements of type {element} cannot be averaged; those that can: {', '.join(TYPES)}")
    if op not in OPS:
        raise ElementError(f"there is no op {op!r}; there are {', '.join(OPS)}")
    if element in INTEGERS and op == "mean":
        raise ElementError(f"the mean of {element} is no {element}: take op='sum' and divide, or make it float64 first")
    if element == "bool" and op in ("mean", "sum"):
        raise ElementError(f"there is no {op} of bool: op='max' is any, op='min' is all; or make it an int first")
    if codec == EXACT:
        return Exact(element, op)
    if element not in NARROW:
        raise ElementError(
            f"the codec {codec!r} is for {', '.join(NARROW)}; {element} travels with codec='{EXACT}' only"
        )
    return Coded(dense(codec), element, op, Pool())


def numpy_type(element: str) -> str:
    """How elements lie in a numpy array; bfloat16, which numpy does not know, as its 16 bits."""
    return "uint16" if element == "bfloat16" else element


def widened(values: Array, element: str) -> Array:
    """Elements as numpy can compute with them: bfloat16 as float32, all others as they are."""
    if element != "bfloat16":
        return values
    wide: Floats = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


def narrowed(values: Array, element: str) -> Array:
    """To the element type, to the nearest; integers wrap around at their limits."""
    if element != "bfloat16":
        return values.astype(element, copy=False)
    single = _odd(values)
    bits = single.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # A NaN whose last bits carry over would end as infinity, or as a number.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(single), quiet, rounded).astype(np.uint16)


def _odd(values: Array) -> Floats:
    """As float32, for one more rounding: what is not exact goes towards zero and gets an odd last bit, so that it is on no
    boundary (round to odd, Boldo and Melquiond 2008)."""
    if values.dtype != np.float64:
        return values.astype(np.float32, copy=False)
    with np.errstate(over="ignore"):
        single: Floats = values.astype(np.float32)
    bits = single.view(np.uint32)
    bits -= np.abs(single) > np.abs(values)
    bits |= (single != values) & ~np.isnan(single)
    return single


def reduce(op: str, arrays: Sequence[Array], weights: Sequence[float], element: str) -> Array:
    """One array of all, in their order: floats are added in float64, integers in int64, and rounded once."""
    if op in ("min", "max"):
        better = np.minimum if op == "min" else np.maximum
        best = arrays[0].copy()
        for array in arrays[1:]:
            better(best, array, out=best)
        return best
    wide = np.int64 if element in INTEGERS else np.float64
    total: Array = np.zeros(arrays[0].size, wide)
    for array, weight in zip(arrays, weights, strict=True):
        total += array.astype(wide) * weight if op == "mean" else array
    if op == "mean":
        total /= sum(weights)
    return total


@dataclass(frozen=True, slots=True)
class Exact:
    """Elements as they are, little-endian."""

    element: str
    op: str

    def nbytes(self, n: int) -> int:
        return n * np.dtype(numpy_type(self.element)).itemsize

    def check(self, payload: Buffer, n: int) -> float:
        view = memoryview(payload)
        if view.nbytes != self.nbytes(n):
            raise CodecError(f"{view.nbytes} bytes instead of {self.nbytes(n)}", "length")
        if self.element == "bool" and n and np.frombuffer(view, np.uint8).max() > 1:
            raise CodecError("a byte that is neither true nor false")
        return 0.0

    def encode(self, values: Array) -> Buffer:
        return values.view(np.uint8).data

    def decode(self, payload: Buffer, out: Array) -> None:
        out[:] = self._array(payload)

    def result(self, payloads: Sequence[Buffer], weights: Sequence[float], size: int) -> Buffer:
        if (self.element, self.op) == ("float32", "mean"):
            out = np.empty(size, np.float32)
            Fp32().mean(payloads, weights, out)  # what `reduce` computes, without its copies
            return out.view(np.uint8).data
        arrays = [widened(self._array(payload), self.element) for payload in payloads]
        with np.errstate(over="ignore", invalid="ignore"):
            made = narrowed(reduce(self.op, arrays, weights, self.element), self.element)
        return made.view(np.uint8).data

    def _array(self, payload: Buffer) -> Array:
        # Little-endian on the wire as in memory: other machines are not supported by torch either.
        return np.frombuffer(payload, numpy_type(self.element))


@dataclass(slots=True)
class Coded:
    """Elements made float32 and put through a codec, contributions and results alike."""

    codec: Codec
    element: str
    op: str
    pool: Pool

    def nbytes(self, n: int) -> int:
        return self.codec.nbytes(n)

    def check(self, payload: Buffer, n: int) -> float:
        self.codec.check(payload, n)
        return 0.0

    def encode(self, values: Array) -> Buffer:
        return self._encoded(np.ascontiguousarray(widened(values, self.element), np.float32))

    def decode(self, payload: Buffer, out: Array) -> None:
        values = np.empty(out.size, np.float32)
        self.codec.decode(payload, values)
        out[:] = narrowed(values, self.element)

    def result(self, payloads: Sequence[Buffer], weights: Sequence[float], size: int) -> Buffer:
        if self.op == "mean":
            made: Floats = np.empty(size, np.float32)
            mean(self.codec, payloads, weights, made)
            return self._encoded(made)
        arrays = [np.empty(size, np.float32) for _ in payloads]
        for payload, array in zip(payloads, arrays, strict=True):
            self.codec.decode(payload, array)
        return self._encoded(reduce(self.op, arrays, weights, "float32").astype(np.float32, copy=False))

    def _encoded(self, values: Floats) -> Buffer:
        payload = self.pool.lend(self.codec.nbytes(values.size))
        encode(self.codec, values, np.frombuffer(payload, np.uint8))
        return payload
