"""Progress of the transfer of a state to this peer, and its reports."""

from __future__ import annotations

import math
from collections.abc import Callable

from thinwire.collectives.state_sync import SILENCE, PartialState, Transfer
from thinwire.node.runtime.event_log import Emit
from thinwire.swarm.identity.identity import short
from thinwire.swarm.messages.registry import PeerId

REPORT_SECONDS = 30.0
"""Seconds between two reports of a transfer, and without a chunk after which a report states this."""


class StateProgress:
    """Progress of the transfers of one state, one after the other.

    Reports a transfer when it begins and every REPORT_SECONDS, also if one try follows the other, and each source of wrong
    chunks once. `look` must be called often, because it notes the times.
    """

    def __init__(self, now: Callable[[], float], emit: Emit) -> None:
        self.transfer: Transfer | None = None
        """The transfer in progress."""
        self._now, self._emit, self._due = now, emit, -math.inf
        self._began = self._moved = 0.0
        self._here = 0
        self._wrong: set[PeerId] = set()

    @property
    def seconds(self) -> float:
        """Duration of the transfer so far."""
        return self._now() - self._began

    @property
    def silence(self) -> float:
        """Seconds since the last chunk."""
        return self._now() - self._moved

    @property
    def waits(self) -> str:
        """Duration of the silence and the end of the transfer, as text; empty if a chunk has come recently."""
        if self.silence < REPORT_SECONDS:
            return ""
        return f"no chunk for {self.silence:.0f} s; the transfer ends {SILENCE:.0f} s after the last chunk"

    def look(self, partial: PartialState) -> None:
        """Note the progress; report it if that is due."""
        for source in sorted(partial.liars - self._wrong):
            detail = "its chunk does not have the hash that it offered; other sources are asked first"
            self._emit("wrong chunk", {"source": short(source), "detail": detail})
        self._wrong |= partial.liars
        transfer, now = partial.transfer, self._now()
        if transfer is not self.transfer:
            self.transfer, self._began, self._here = transfer, now, -1
        if transfer is None:
            return
        if transfer.here != self._here:
            self._here, self._moved = transfer.here, now
        if now < self._due or transfer.here == transfer.nbytes:
            return
        self._due = now + REPORT_SECONDS
        self._emit(
            "fetching",
            {
                "round": transfer.round,
                "bytes": transfer.nbytes,
                "here": transfer.here,
                "sources": [short(source) for source in transfer.sources],
                "seconds": round(self.seconds, 1),
                "detail": self.waits,
            },
        )
