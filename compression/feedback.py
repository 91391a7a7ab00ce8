"""Error feedback: what a codec leaves out of one round is kept and sent in a later one. Karimireddy et al., arXiv 1901.09847.

    a = β·e + Δ;  payload = encode(a);  e_new = a − decode(payload)         every operation rounded to float32

A transaction: `prepare` computes the payload and changes nothing, and what becomes of e is decided when the round's outcome is
known. Of `commit`, `restore` and `rollback` exactly one follows each `prepare`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.chunks import Chunks
from thinwire.compression.codec import Buffer, Choice, Codec, CodecError, Floats, TensorCodec

ON_EXCLUSION = ("drop", "restore")


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """What a `Whole` says: a dense codec's payload of all n elements."""

    codec: Codec
    payload: NDArray[np.uint8]

    def scatter(self, out: Floats, scale: float = 1.0) -> None:
        """out += scale·decoded, in float32."""
        values = np.empty_like(out)
        self.codec.decode(self.payload.data, values)
        if scale != 1.0:
            np.multiply(values, np.float32(scale), out=values)
        np.add(out, values, out=out)


@dataclass(frozen=True, slots=True)
class Whole:
    """A dense codec as a tensor codec: one payload for the whole model."""

    codec: Codec

    @property
    def spec(self) -> str:
        return self.codec.spec

    def bound(self, chunks: Chunks) -> int:
        return self.codec.nbytes(chunks.total)

    def select(self, a: Floats, chunks: Chunks) -> Encoded:
        """Raises CodecError when a value is not finite."""
        chunks.check(a)
        if not np.isfinite(a).all():
            raise CodecError("a value is not finite", "not finite")
        payload = np.empty(self.codec.nbytes(a.size), np.uint8)
        self.codec.encode(a, payload)
        return Encoded(self.codec, payload)

    def nbytes(self, selected: Encoded) -> int:
        return selected.payload.size

    def encode(self, selected: Encoded) -> bytes:
        return selected.payload.tobytes()

    def decode(self, payload: Buffer, chunks: Chunks) -> Encoded:
        """Raises CodecError unless the payload is one of this layout."""
        self.codec.check(payload, chunks.total)
        return Encoded(self.codec, np.frombuffer(payload, np.uint8))


class ErrorFeedback:
    """A codec with a residual e, zero at first. See the module.

    beta: what part of e lives on, 0…1. on_exclusion: what becomes of a payload that the round's record does not name: "drop"
    takes it for sent, "restore" keeps all of a. Raises ValueError for anything else.
    """

    def __init__(self, codec: TensorCodec[Any], chunks: Chunks, beta: float = 0.95, on_exclusion: str = "drop") -> None:
        if not 0 <= beta <= 1:
            raise ValueError(f"error feedback: beta must be 0…1, not {beta}")
        if on_exclusion not in ON_EXCLUSION:
            raise ValueError(f"error feedback: on_exclusion is {' or '.join(ON_EXCLUSION)}, not {on_exclusion!r}")
        self.codec, self.chunks, self.beta, self.on_exclusion = codec, chunks, beta, on_exclusion
        self._residual = np.zeros(chunks.total, np.float32)
        self._accumulator = np.empty(chunks.total, np.float32)
        self._choice: Choice | None = None

    @property
    def pending(self) -> bool:
        """Whether a payload waits for its round's outcome."""
        return self._choice is not None

    @property
    def choice(self) -> Choice | None:
        """What the pending payload says, None when none is pending: for `commit`."""
        return self._choice

    @property
    def residual(self) -> Floats:
        """e as of the last decision, a view that cannot be written: what a checkpoint saves."""
        view = self._residual.view()
        view.flags.writeable = False
        return view

    def load(self, residual: Floats) -> None:
        """Take e from a checkpoint. Raises ValueError when it does not fit or is not finite, or while a payload is pending."""
        self.chunks.check(residual)
        if self.pending or not np.isfinite(residual).all():
            raise ValueError("a residual is finite, and is not loaded while a payload waits for its outcome")
        np.copyto(self._residual, residual)

    def prepare(self, delta: Floats) -> bytes:
        """The payload of this round for the pseudo-gradient delta, which is left as it is.

        Raises CodecError when an accumulated value is not finite: then nothing is pending and nothing has changed.
        """
        if self.pending:
            raise RuntimeError("a payload still waits for its outcome")
        self.chunks.check(delta)
        np.multiply(self._residual, np.float32(self.beta), out=self._accumulator)
        np.add(self._accumulator, delta, out=self._accumulator)
        choice = self.codec.select(self._accumulator, self.chunks)
        payload = self.codec.encode(choice)
        self._choice = choice
        return payload

    def commit(self, excluded: bool = False, sent: Choice | None = None) -> None:
        """The round committed. excluded: its record does not name this peer. `sent`: the choice of an earlier payload, when it
        is that one which the record names: of a, which has grown meanwhile, it is taken.
        """
        choice = self._taken()
        if not excluded or self.on_exclusion == "drop":
            (sent or choice).scatter(self._accumulator, -1.0)
        self._residual, self._accumulator = self._accumulator, self._residual

    def restore(self) -> None:
        """The round was aborted and what was trained since its start is given up: e = a, as though nothing had been sent."""
        self._taken()
        self._residual, self._accumulator = self._accumulator, self._residual

    def rollback(self) -> None:
        """As though there had been no `prepare`: for a Δ that is still in the parameters and comes again in the next one."""
        self._taken()

    def _taken(self) -> Choice:
        if self._choice is None:
            raise RuntimeError("no payload waits for an outcome")
        choice, self._choice = self._choice, None
        return choice
