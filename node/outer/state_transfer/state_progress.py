"""Progress of the transfer of a state to this peer, and its reports."""

from __future__ import annotations

import math
from collections.abc import Callable

from thinwire.collectives.state_sync.chunk_transfer import SILENCE, PartialState, Transfer
from thinwire.collectives.state_sync.offer_search import Search
from thinwire.node.runtime.event_log import Emit
from thinwire.swarm.identity.identity import short
from thinwire.swarm.messages.registry import PeerId

REPORT_SECONDS = 30.0
"""Seconds between two reports of a transfer, and without a chunk after which a report states this."""

SEARCH_SECONDS = 5.0
"""Seconds of a wait for offers of a state after which it is reported, too."""

RETRY_SECONDS = 1.0
"""Seconds by which the next try may begin later than announced."""


class StateProgress:
    """Progress of the transfers of one state, one after the other.

    Reports a transfer when it begins and every REPORT_SECONDS, also if one try follows the other, and each source of wrong
    chunks once; before it, a wait for offers of SEARCH_SECONDS and more as often. `look` must be called often, because it
    notes the times.
    """

    def __init__(self, now: Callable[[], float], emit: Emit) -> None:
        self.transfer: Transfer | None = None
        """The transfer in progress."""
        self._now, self._emit, self._due = now, emit, -math.inf
        self._began = self._moved = 0.0
        self._here = 0
        self._wrong: set[PeerId] = set()
        self._search: Search | None = None
        self._searches_since = self._search_began = 0.0
        self._search_due = -math.inf

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

    @property
    def search(self) -> str:
        """Awaited offers, the duration of the wait and its end, as text; empty if no offers are awaited."""
        one, now = self._search, self._now()
        if one is None or now > self._search_began + one.limit + RETRY_SECONDS:
            return ""
        answers = f"{one.answered} of {one.asked} peers have answered" if one.asked else "no peer is linked"
        useless = ", no offer counts" if one.over and one.asked else ""
        left = f"{max(0.0, self._search_began + one.limit - now):.0f} s"
        end = f"next try in {left}" if one.over else f"at most {left} more"
        return f"for offers of a state: {answers}{useless}, {now - self._searches_since:.0f} s so far, {end}"

    def _look_for_search(self, search: Search | None, now: float) -> None:
        """Note the wait for offers; report it if it lasts long."""
        if search is not self._search:
            if not self.search:
                self._searches_since = now
            self._search, self._search_began = search, now
        text = self.search
        if text and now >= max(self._searches_since + SEARCH_SECONDS, self._search_due):
            self._search_due = now + REPORT_SECONDS
            self._emit("waiting", {"detail": text})

    def look(self, partial: PartialState) -> None:
        """Note the progress; report it if that is due."""
        for source in sorted(partial.liars - self._wrong):
            detail = "its chunk does not have the hash that it offered; other sources are asked first"
            self._emit("wrong_chunk", {"source": short(source), "detail": detail})
        self._wrong |= partial.liars
        transfer, now = partial.transfer, self._now()
        self._look_for_search(partial.search, now)
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
