"""Wait of one peer for a quorum of the members of its replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from thinwire.collectives.rounds.round import Round
from thinwire.swarm.identity.identity import short

PATIENCES = 3
"""Least number of patiences without a quorum before a lineage is founded."""


class QuorumWait:
    """Wait for a quorum of the round in progress, which `current` returns.

    `orphan`: seconds without a quorum before this peer founds a lineage; 0: never.
    """

    def __init__(self, orphan: float, *, now: Callable[[], float], current: Callable[[], Round]) -> None:
        self._orphan, self._now, self._current = orphan, now, current
        self.since: float | None = None
        """Time since which the round in progress has had no quorum; None if it has one."""
        self.begun = asyncio.Event()
        """Set while `since` is not None."""
        self._ended_by_hand: float | None = None
        """Time of a call of `recover`."""

    def begin(self, since: float) -> None:
        """Note that no quorum is here, unless this is known already."""
        if self.since is None:
            self.since = since
            self.begun.set()

    def end(self) -> None:
        """Note that a quorum is here, or is not known to be missing."""
        self.since = self._ended_by_hand = None
        self.begun.clear()

    def recover(self) -> None:
        """Wait no longer for a quorum, unless one is here."""
        if self.since is not None and self._ended_by_hand is None:
            self._ended_by_hand = self._now()

    @property
    def until(self) -> float | None:
        """Time at which this peer begins to found a lineage; None if it will not, as things stand."""
        if self.since is not None and self._ended_by_hand is None:
            longest = max(self._orphan, PATIENCES * self._current().agreement.terms.patience)
            return self.since + longest if self._orphan else None
        return self._ended_by_hand

    @property
    def text(self) -> str:
        """Reason why no round can commit, awaited peers, and until when; empty if a quorum is here."""
        since, until = self.since, self.until
        if since is None:
            return ""
        agreement = self._current().agreement
        absent = ", ".join(map(short, agreement.electorate.absent)) or "the results of the round"
        if agreement.blocked:
            absent = "members that have not reported their votes"
        text = f"no quorum for {self._now() - since:.0f} s: waiting for {absent}"
        if until is None:
            return f"{text}; `thinwire recover` continues without them"
        return f"{text}; a lineage continues in {max(0.0, until - self._now()):.0f} s"
