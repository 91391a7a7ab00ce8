"""Error feedback: the part that a codec leaves out of a round is sent in a later one.

Karimireddy et al., arXiv 1901.09847.

    a = β·e + Δ;  payload = encode(a);  e_new = a − decode(payload)         every operation rounded to float32

Each round is a transaction: `prepare` computes the payload and changes nothing; e changes when the round's outcome is
known. Exactly one of `commit`, `restore` and `rollback` follows each `prepare`. a is computed twice, strip by strip: it
would take as much memory as the model until the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, get_args

import numpy as np
from thinwire.compression.core.codec import Choice, TensorCodec
from thinwire.compression.core.parameter_chunks import Chunks, Gather, Section
from thinwire.compression.core.types import Floats, OnExclusion

ON_EXCLUSION: tuple[OnExclusion, ...] = get_args(OnExclusion)

Difference: TypeAlias = Callable[[int, int, Floats], None]
"""Function that writes elements [start, stop) of Δ to a vector.

It writes the same values until the outcome of the round is known.
"""


def stored(delta: Floats) -> Difference:
    """Return a reader of a vector that is in memory."""
    return lambda start, stop, out: np.copyto(out, delta[start:stop])


_PART = 1 << 16
"""Elements that are accumulated at a time; they stay in a cache."""


class ErrorFeedback:
    """Codec with a residual e, which starts at zero. See the module docstring.

    beta: decay factor of e, 0…1. on_exclusion: treatment of a payload that is not in the round's record: "drop" counts
    it as sent, "restore" leaves all of a in the residual. Raises ValueError for anything else.
    """

    def __init__(
        self, codec: TensorCodec[Any], chunks: Chunks, beta: float = 0.95, on_exclusion: OnExclusion = "drop"
    ) -> None:
        if not 0 <= beta <= 1:
            raise ValueError(f"error feedback: beta must be 0…1, not {beta}")
        if on_exclusion not in ON_EXCLUSION:
            raise ValueError(f"error feedback: on_exclusion is {' or '.join(ON_EXCLUSION)}, not {on_exclusion!r}")
        self.codec, self.chunks, self.beta, self.on_exclusion = codec, chunks, beta, on_exclusion
        self._select: Callable[[Gather, Chunks], Any] = codec.select_from
        self.memory = np.zeros(chunks.total, np.float32)
        """Array of e, which the outcome of a round changes in place.

        To leave it to a reader in another thread, replace it by a copy.
        """
        self._pending: tuple[Choice, Difference] | None = None

    def select_with(self, select: Callable[[Gather, Chunks], Any]) -> None:
        """Replace `codec.select_from`, which selects the entries to send, by a function with the same results."""
        self._select = select

    @property
    def pending(self) -> bool:
        """True while a payload waits for its round's outcome."""
        return self._pending is not None

    @property
    def choice(self) -> Choice | None:
        """Content of the pending payload for `commit`, or None if none is pending."""
        return None if self._pending is None else self._pending[0]

    @property
    def residual(self) -> Floats:
        """Read-only view of e as of the last decision."""
        view = self.memory.view()
        view.flags.writeable = False
        return view

    def load(self, residual: Floats) -> None:
        """Load e from a checkpoint.

        Raises ValueError if it does not fit or is not finite, or while a payload is pending.
        """
        self.chunks.check(residual)
        if self.pending or not np.isfinite(residual).all():
            raise ValueError("a residual is finite, and is not loaded while a payload waits for its outcome")
        self.memory = np.array(residual)

    def clear(self) -> None:
        """Set e to zero, and forget a pending payload."""
        self._pending, self.memory = None, np.zeros(self.chunks.total, np.float32)

    def prepare(self, difference: Difference) -> bytes:
        """Return this round's payload for the pseudo-gradient Δ, which `commit` and `restore` read again.

        Raises CodecError if an accumulated value is not finite; nothing is pending or changed then. Raises RuntimeError if a
        payload is already pending.
        """
        if self.pending:
            raise RuntimeError("a payload still waits for its outcome")
        room = np.empty(max((s.size for one in self.chunks.sections for s in one.strips()), default=0), np.float32)
        decayed = np.empty(_PART, np.float32)

        def accumulated(section: Section) -> Floats:
            values = room[: section.size] if section.size <= room.size else np.empty(section.size, np.float32)
            at = 0
            for start, stop in section.spans:
                difference(start, stop, values[at : at + stop - start])
                for low, high in _parts(start, stop):
                    part = decayed[: high - low]
                    np.multiply(self.memory[low:high], np.float32(self.beta), out=part)
                    values[at : at + high - low] += part
                    at += high - low
            return values

        choice = self._select(accumulated, self.chunks)
        payload = self.codec.encode(choice)
        self._pending = choice, difference
        return payload

    def commit(self, excluded: bool = False, sent: Choice | None = None) -> None:
        """Commit the round. excluded: its record does not name this peer.

        sent: the choice of an earlier payload, if that is the payload in the record. It is subtracted from a, which has
        grown since.
        """
        choice, difference = self._taken()
        self._accumulate(difference)
        if not excluded or self.on_exclusion == "drop":
            (sent or choice).scatter(self.memory, -1.0)

    def restore(self) -> None:
        """Abort the round and discard the training since its start: e = a, as if nothing had been sent."""
        _, difference = self._taken()
        self._accumulate(difference)

    def rollback(self) -> None:
        """Undo `prepare`. For a Δ that is still in the parameters and will be part of the next one."""
        self._taken()

    def _accumulate(self, difference: Difference) -> None:
        """Set e to a."""
        room = np.empty(_PART, np.float32)
        for start, stop in _parts(0, self.memory.size):
            delta, part = room[: stop - start], self.memory[start:stop]
            difference(start, stop, delta)
            part *= np.float32(self.beta)
            part += delta

    def _taken(self) -> tuple[Choice, Difference]:
        pending, self._pending = self._pending, None
        if pending is None:
            raise RuntimeError("no payload waits for an outcome")
        return pending


def _parts(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most _PART elements of [start, stop)."""
    for low in range(start, stop, _PART):
        yield low, min(stop, low + _PART)
