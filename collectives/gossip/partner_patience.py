"""Time for which a peer waits for its partner in a pair."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.collectives.timing import GIVE_UP, STALL

RATE = 32 * 1024
"""Least average rate of a partner in bytes/s where a transfer takes longer than GIVE_UP patiences.

Otherwise many chunks, each in time, would occupy a pair for hours. Patience adapts to the duration of exchanges, so it
is inaccurate only for the first one.
"""

STALLED = "stalled"
"""Reason to give up a partner that is ready and sends no data any more."""


class PartnerPatience:
    """Presence and progress of the partner of a pair, and the time when it is given up.

    patience: seconds to wait for an answer, or for progress.
    """

    def __init__(self, now: Callable[[], float], patience: float) -> None:
        self._now, self._patience = now, patience
        self.progressed_at = 0.0
        """Time of the partner's last progress, or of our announcement if that is later."""
        self.deadline = 0.0
        """Seconds to wait for a partner that is present, but has not announced itself."""
        self.answered = self.linked = True
        self._time_behind = 0.0
        """Seconds to wait in addition, because the partner still has exchanges of earlier rounds."""
        self._announced_at = self._ready_at = 0.0
        """Time of our announcement, and of the partner's first one."""
        self._received = 0
        """Bytes received since the partner's last announcement."""

    def announce(self, deadline: float, *, answered: bool) -> None:
        """Begin to wait after our announcement. answered: True if the partner is known to be present."""
        self._announced_at = self.progressed_at = self._now()
        self.deadline, self.answered = deadline, answered

    def note_ready(self, *, first: bool) -> None:
        """Note an announcement of the partner; only the first one is progress."""
        if first:
            self.progressed_at = self._ready_at = self._now()
        self._received = 0

    def note_data(self, count: int) -> None:
        """Note received bytes."""
        self._received += count
        self.progressed_at = self._now()

    def note_behind(self, seconds: float) -> None:
        """Note the seconds of earlier exchanges of the partner. A later report never shortens the wait."""
        self._time_behind = max(self._time_behind, seconds)

    def note_link(self, linked: bool) -> None:
        """Note a new or broken link."""
        self.linked, self.progressed_at = linked, self._now()

    def exhausted(self, *, ready: bool, extra: float = 0.0) -> str:
        """Return the reason to give the partner up, or "".

        ready: whether it has announced itself. extra: seconds that a ready one gets in addition.
        """
        now = self._now()
        if not self.linked and now > self.progressed_at + self._patience:
            return "unreachable"
        if ready:
            return STALLED if now > self._due + extra else ""
        if not self.answered and now > self._announced_at + self._patience:
            return "silent"
        return "late" if now > self._announced_at + self.deadline + self._time_behind else ""

    @property
    def _due(self) -> float:
        """Time at which a ready partner is stalled: its next chunk is overdue, or the transfer too slow."""
        longest = max(GIVE_UP * self._patience, self._received / RATE)
        return min(self.progressed_at + STALL * self._patience, max(self._ready_at, self._announced_at) + longest)
