"""Element types of all-reduce operations outside training.

Arithmetic is exact in the type itself, or goes through a codec.

All contributions to a chunk are present at once, in peer-id order, at the chunk's owner, so the result is the same
wherever it is recomputed. NaN and infinity are processed as in any arithmetic: they are the caller's responsibility.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from thinwire.collectives.aggregation.means import mean
from thinwire.collectives.deterministic_rounding import encode
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.compression.core.codec import Codec, CodecError
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.dense.floats import Fp32

EXACT = "exact"
"""Name of the codec that changes nothing."""

Op: TypeAlias = Literal["mean", "sum", "min", "max"]
OPS: tuple[Op, ...] = get_args(Op)

Element: TypeAlias = Literal[
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"
]
"""Type of an element; bfloat16, which numpy lacks, is stored as its 16 bits."""

TYPES: tuple[Element, ...] = get_args(Element)
INTEGERS: tuple[Element, ...] = ("int64", "int32", "int16", "int8", "uint8")
NARROW: tuple[Element, ...] = ("float32", "float16", "bfloat16")
"""Types that float32 codecs can carry."""

Array = NDArray[Any]


class ElementError(ValueError):
    """Operation or codec that an element type does not support; the message names the supported ones."""


class Elements(Protocol):
    """Encoding and reduction of elements."""

    def nbytes(self, n: int) -> int:
        """Return the bytes of n elements."""
        ...

    def check(self, payload: Buffer, n: int) -> float:
        """Raise CodecError for a payload that no honest peer sends. Returns 0 in place of a norm."""
        ...

    def encode(self, values: Array) -> Buffer:
        """Return the payload of some elements. Raises CodecError for values that the codec cannot represent."""
        ...

    def decode(self, payload: Buffer, out: Array) -> None:
        """Decode into `out`, which has the element type."""
        ...

    def result(self, payloads: Sequence[Buffer], weights: Sequence[float], size: int) -> Buffer:
        """Return the payload of the reduced `size` elements of several peers."""
        ...


def elements(element: str, op: str, codec: str, dense: Callable[[str], Codec]) -> Elements:
    """Return the Elements of an operation. `dense` returns a codec by name.

    Raises ElementError for unsupported combinations; `dense` may raise ValueError.
    """
    if element not in TYPES:
        raise ElementError(f"elements of type {element} cannot be averaged; supported types: {', '.join(TYPES)}")
    if op not in OPS:
        raise ElementError(f"unknown op {op!r}; supported: {', '.join(OPS)}")
    if element in INTEGERS and op == "mean":
        raise ElementError(
            f"op='mean' is not supported for {element}: use op='sum' and divide, or convert to float64 first"
        )
    if element == "bool" and op in ("mean", "sum"):
        raise ElementError(
            f"op={op!r} is not supported for bool: use op='max' (any) or op='min' (all), or convert to an integer type first"
        )
    if codec == EXACT:
        return Exact(element, op)
    if element not in NARROW:
        raise ElementError(f"the codec {codec!r} is for {', '.join(NARROW)}; {element} only supports codec='{EXACT}'")
    return Coded(dense(codec), element, op, BufferPool())


def numpy_type(element: str) -> str:
    """Return the numpy type that stores an element type; bfloat16, which numpy lacks, as its 16 bits."""
    return "uint16" if element == "bfloat16" else element


def widened(values: Array, element: Element) -> Array:
    """Return elements in a type that numpy computes with: bfloat16 as float32, others unchanged."""
    if element != "bfloat16":
        return values
    wide: Floats = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


def narrowed(values: Array, element: Element) -> Array:
    """Round to the nearest value of the element type; integers wrap around at their limits."""
    if element != "bfloat16":
        return values.astype(element, copy=False)
    single = _odd(values)
    bits = single.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # A NaN whose last bits carry over would become infinity or a number.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(single), quiet, rounded).astype(np.uint16)


def _odd(values: Array) -> Floats:
    """Return values as float32 for one more rounding.

    Inexact values are rounded towards zero with an odd last bit.

    So no value lies on a rounding boundary (round to odd, Boldo and Melquiond 2008).
    """
    if values.dtype != np.float64:
        return values.astype(np.float32, copy=False)
    with np.errstate(over="ignore"):
        single: Floats = values.astype(np.float32)
    bits = single.view(np.uint32)
    bits -= np.abs(single) > np.abs(values)
    bits |= (single != values) & ~np.isnan(single)
    return single


def reduce(op: Op, arrays: Sequence[Array], weights: Sequence[float], element: Element) -> Array:
    """Return the reduction of all arrays, in order.

    Floats are summed in float64, integers in int64, and rounded once.
    """
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

    element: Element
    op: Op

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
        # Little-endian on the wire and in memory: torch does not support other machines either.
        return np.frombuffer(payload, numpy_type(self.element))


@dataclass(slots=True)
class Coded:
    """Elements converted to float32 and encoded by a codec, contributions and results alike."""

    codec: Codec
    element: Element
    op: Op
    pool: BufferPool

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
