"""Codec interfaces: tensor -> bytes -> tensor, with an exact payload size known before encoding.

A codec knows nothing about networks or peers. On the CPU it works on flat, C-contiguous float32 arrays. A chunk of n
elements always takes `nbytes(n)` bytes, so a receiver knows the only acceptable length before it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.core.parameter_chunks import Chunks, Gather
from thinwire.compression.core.types import Buffer, Floats

SMALLEST = 2.0**-24
"""Smallest step of an fp16 scale: error of a value in a block of tiny values."""


class CodecError(ValueError):
    """Error for a payload that no honest encoder writes.

    The message describes the fault. `reason` is its kind, for the record of the round: "length", "not finite",
    "encoding" or "bound".
    """

    def __init__(self, message: str, reason: str = "encoding") -> None:
        super().__init__(message)
        self.reason = reason


class Codec(Protocol):
    """Encoding of float32 vectors as bytes."""

    @property
    def spec(self) -> str:
        """Name in a manifest, with every parameter spelled out, e.g. "int8(block=256)"."""
        ...

    @property
    def plain(self) -> bool:
        """True if the payload is the float32 values as they are in memory, so that no copy is needed."""
        ...

    @property
    def stochastic(self) -> bool:
        """True if `encode` uses its seed."""
        ...

    @property
    def growth(self) -> float:
        """Largest ratio of the norm of decoded values to that of the encoded ones, apart from SMALLEST each."""
        ...

    def nbytes(self, n: int) -> int:
        """Exact size in bytes of the payload of n elements."""
        ...

    def encode(self, x: Floats, out: NDArray[np.uint8], seed: int = 0) -> None:
        """Encode x (n elements) into out (exactly nbytes(n) bytes).

        seed: 64 bits that determine the random choices of a stochastic codec. Raises ValueError for arrays that do not
        fit, and CodecError("not finite") for NaN or infinity that the payload cannot represent.
        """
        ...

    def decode(self, payload: Buffer, out: Floats) -> None:
        """Decode into out (n elements).

        Raises CodecError if the payload is not a valid encoding of n elements.
        """
        ...

    def check(self, payload: Buffer, n: int) -> float:
        """Check a payload without decoding it to memory, and return the squared L2 norm of its values.

        Raises CodecError for a wrong length or a non-finite value.
        """
        ...

    def mean(self, payloads: Sequence[Buffer], weights: Sequence[float], out: Floats, *, total: float = 0.0) -> None:
        """Write the weighted mean of checked payloads, Σ (w / Σ w)·x, to out.

        total: if positive, the divisor in place of Σ w. The sum is accumulated in float64 in the given order. Raises
        CodecError for a wrong length, and ValueError unless the weights are finite, ≥ 0 and not all zero.
        """
        ...


class Choice(Protocol):
    """Decoded content of one payload of a tensor codec."""

    def scatter(self, out: Floats, scale: float = 1.0) -> None:
        """Add scale times the decoded values to out, the model's flat vector, in float32."""
        ...


C = TypeVar("C", bound=Choice)


class TensorCodec(Protocol[C]):
    """Codec for whole models, with payloads of varying length.

    Sender and receivers decode the same values.
    """

    @property
    def spec(self) -> str:
        """Name in a manifest, with every parameter and stage, e.g. "topk(k=64,chunk=4096)|2bit|rice"."""
        ...

    def bound(self, chunks: Chunks) -> int:
        """Size in bytes of the largest possible payload of this layout."""
        ...

    def select_from(self, gather: Gather, chunks: Chunks) -> C:
        """Select the entries to send from the model's vector, which `gather` gives strip by strip.

        This makes all choices that depend on the data. Raises CodecError if a value is not finite.
        """
        ...

    def nbytes(self, selected: C) -> int:
        """Exact size of the payload in bytes."""
        ...

    def encode(self, selected: C) -> bytes:
        """Return the payload."""
        ...

    def decode(self, payload: Buffer, chunks: Chunks) -> C:
        """Decode a payload. Raises CodecError for anything that `encode` does not write for this layout."""
        ...
