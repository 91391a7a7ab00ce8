"""What a codec is: tensor -> bytes -> tensor, with an exact size known before encoding.

A codec knows no network and no peer. On the CPU it works on flat, C-contiguous float32 arrays; a chunk of n elements
always takes `nbytes(n)` bytes, so a receiver knows the only acceptable length before it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from thinwire.compression.chunks import Chunks

Floats: TypeAlias = NDArray[np.float32]
"""Flat, C-contiguous float32."""

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Anything with the buffer protocol, one dimension of bytes."""


class CodecError(ValueError):
    """A payload that no honest encoder writes. The message names what is wrong, `reason` its kind for a round's record.

    Reasons: "length", "not finite", "encoding", "bound".
    """

    def __init__(self, message: str, reason: str = "encoding") -> None:
        super().__init__(message)
        self.reason = reason


class Codec(Protocol):
    """One way to put floats on the wire."""

    @property
    def spec(self) -> str:
        """The name in a manifest, with every parameter spelled out, e.g. "int8(block=256)"."""
        ...

    @property
    def plain(self) -> bool:
        """Whether the payload is the float32 values themselves, in memory as on the wire: then nobody needs to copy them."""
        ...

    @property
    def stochastic(self) -> bool:
        """Whether `encode` needs its seed."""
        ...

    def nbytes(self, n: int) -> int:
        """Exact size in bytes of the payload of n elements."""
        ...

    def encode(self, x: Floats, out: NDArray[np.uint8], seed: int = 0) -> None:
        """Encode x (n elements) into out (exactly nbytes(n) bytes). `seed`, 64 bits, decides what a codec leaves to chance.

        Raises ValueError for arrays that do not fit, CodecError("not finite") where the payload cannot say NaN or infinity.
        """
        ...

    def decode(self, payload: Buffer, out: Floats) -> None:
        """Decode into out (n elements). Raises CodecError when the payload is not a valid encoding of n elements."""
        ...

    def check(self, payload: Buffer, n: int) -> float:
        """Screen a payload without decoding it to memory: returns the squared L2 norm of its decoded values.

        Raises CodecError for a wrong length or anything non-finite.
        """
        ...

    def mean(self, payloads: Sequence[Buffer], weights: Sequence[float], out: Floats) -> None:
        """Weighted mean of checked payloads, Σ (w / Σ w)·x, accumulated in float64 in the given order.

        Raises CodecError for a wrong length, ValueError unless the weights are finite, ≥ 0 and not all zero.
        """
        ...


class Choice(Protocol):
    """What one payload of a tensor codec says."""

    def scatter(self, out: Floats, scale: float = 1.0) -> None:
        """out += scale times the decoded values, in float32. out: the model's flat vector."""
        ...


C = TypeVar("C", bound=Choice)


class TensorCodec(Protocol[C]):
    """A codec of whole models, its payload of varying length: sender and receivers decode the same values."""

    @property
    def spec(self) -> str:
        """The name in a manifest, with every parameter and stage spelled out, e.g. "topk(k=64,chunk=4096)|2bit|rice"."""
        ...

    def bound(self, chunks: Chunks) -> int:
        """Bytes of the largest payload of this layout."""
        ...

    def select(self, a: Floats, chunks: Chunks) -> C:
        """All that is decided by the data. a: the model's flat vector. Raises CodecError when a value is not finite."""
        ...

    def nbytes(self, selected: C) -> int:
        """Exact size of the payload."""
        ...

    def encode(self, selected: C) -> bytes:
        """The payload."""
        ...

    def decode(self, payload: Buffer, chunks: Chunks) -> C:
        """What a payload says. Raises CodecError for anything that `encode` does not write for this layout."""
        ...
