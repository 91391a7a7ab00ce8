"""Error feedback: the part that a codec leaves out of a round is sent in a later one.

Karimireddy et al., arXiv 1901.09847.

    a = β·e + Δ;  payload = encode(a);  e_new = a − decode(payload)         every operation rounded to float32

Each round is a transaction: `prepare` computes the payload and changes nothing; e changes when the round's outcome is
known. Exactly one of `commit`, `restore` and `rollback` follows each `prepare`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
from thinwire.compression.core.codec import Choice, TensorCodec
from thinwire.compression.core.parameter_chunks import Chunks
from thinwire.compression.core.types import Floats, OnExclusion

ON_EXCLUSION: tuple[OnExclusion, ...] = get_args(OnExclusion)

_PART = 1 << 16
"""Elements that are accumulated at a time; they stay in a cache."""


class ErrorFeedback:
    """Codec with a residual e, which starts at zero. See the module docstring.

    beta: decay factor of e, 0…1. on_exclusion: treatment of a payload that is not in the round's record: "drop" counts
    it as sent, "restore" keeps all of a. Raises ValueError for anything else.
    """

    def __init__(
        self, codec: TensorCodec[Any], chunks: Chunks, beta: float = 0.95, on_exclusion: OnExclusion = "drop"
    ) -> None:
        if not 0 <= beta <= 1:
            raise ValueError(f"error feedback: beta must be 0…1, not {beta}")
        if on_exclusion not in ON_EXCLUSION:
            raise ValueError(f"error feedback: on_exclusion is {' or '.join(ON_EXCLUSION)}, not {on_exclusion!r}")
        self.codec, self.chunks, self.beta, self.on_exclusion = codec, chunks, beta, on_exclusion
        self._select: Callable[[Floats, Chunks], Any] = codec.select
        self._residual = np.zeros(chunks.total, np.float32)
        self._accumulator: Floats | None = None
        """a of the pending payload.

        It becomes the residual, so arrays are replaced and never changed: a checkpoint may be written from them.
        """
        self._choice: Choice | None = None

    def select_with(self, select: Callable[[Floats, Chunks], Any]) -> None:
        """Select the entries to send with this function, which gives the results of `codec.select`."""
        self._select = select

    @property
    def pending(self) -> bool:
        """True while a payload waits for its round's outcome."""
        return self._choice is not None

    @property
    def choice(self) -> Choice | None:
        """Content of the pending payload for `commit`, or None if none is pending."""
        return self._choice

    @property
    def residual(self) -> Floats:
        """Read-only view of e as of the last decision, for a checkpoint."""
        view = self._residual.view()
        view.flags.writeable = False
        return view

    def load(self, residual: Floats) -> None:
        """Load e from a checkpoint.

        Raises ValueError if it does not fit or is not finite, or while a payload is pending.
        """
        self.chunks.check(residual)
        if self.pending or not np.isfinite(residual).all():
            raise ValueError("a residual is finite, and is not loaded while a payload waits for its outcome")
        self._residual = np.array(residual)

    def prepare(self, delta: Floats) -> bytes:
        """Return this round's payload for the pseudo-gradient delta, whose memory is taken over.

        Raises CodecError if an accumulated value is not finite; nothing is pending or changed then but delta. Raises
        RuntimeError if a payload is already pending.
        """
        if self.pending:
            raise RuntimeError("a payload still waits for its outcome")
        self.chunks.check(delta)
        for start in range(0, delta.size, _PART):
            part = slice(start, start + _PART)
            delta[part] += np.float32(self.beta) * self._residual[part]
        choice = self._select(delta, self.chunks)
        payload = self.codec.encode(choice)
        self._choice, self._accumulator = choice, delta
        return payload

    def commit(self, excluded: bool = False, sent: Choice | None = None) -> None:
        """Commit the round. excluded: its record does not name this peer.

        sent: the choice of an earlier payload, if that is the payload in the record. It is subtracted from a, which has
        grown since.
        """
        choice, accumulator = self._taken()
        if not excluded or self.on_exclusion == "drop":
            (sent or choice).scatter(accumulator, -1.0)
        self._residual = accumulator

    def restore(self) -> None:
        """Abort the round and discard the training since its start: e = a, as if nothing had been sent."""
        _, self._residual = self._taken()

    def rollback(self) -> None:
        """Undo `prepare`. For a Δ that is still in the parameters and will be part of the next one."""
        self._taken()

    def _taken(self) -> tuple[Choice, Floats]:
        choice, accumulator = self._choice, self._accumulator
        if choice is None or accumulator is None:
            raise RuntimeError("no payload waits for an outcome")
        self._choice = self._accumulator = None
        return choice, accumulator
