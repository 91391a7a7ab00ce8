"""Time-outs of a peer's next micro-batch, from its recent intervals as the origin saw them."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.swarm.messages.registry import PeerId

CLOCK_STEP = 1e-3
"""Resolution of the clock of an event loop in seconds: a shorter time counts as none."""

Leg = tuple[PeerId, bool]
"""Awaited event: a peer passes something on, or (True) what it has passed on arrives at the origin."""

FACTOR = 4.0
"""Multiple of the longest recent interval that counts as a stall."""

FADING = 0.9
"""Decay of the longest interval with each new one."""


class Timeouts:
    """Intervals between two events of a peer while there was more to do.

    `first`: time-out in seconds of an unknown peer; `least`: least time-out in seconds.
    """

    def __init__(self, now: Callable[[], float], *, first: float, least: float) -> None:
        self._now, self._first, self._least = now, first, least
        self._longest: dict[Leg, float] = {}
        self._last: dict[Leg, float] = {}

    def record(self, leg: Leg, since: float) -> float:
        """Record an event for which the peer had the time from `since` on; return the seconds it took."""
        now = self._now()
        interval = now - max(since, self._last.get(leg, 0.0))
        self._last[leg] = now
        self._longest[leg] = max(interval, FADING * self._longest.get(leg, 0.0))
        return interval

    def until(self, leg: Leg, since: float) -> float:
        """Return the time at which a peer that started at `since` has stalled."""
        known = self._longest.get(leg)
        bound = self._first if known is None else max(self._least, FACTOR * known)
        return max(since, self._last.get(leg, 0.0)) + bound

    def left(self, leg: Leg, since: float) -> float:
        """Return the seconds until a peer that started at `since` has stalled; 0 if it has stalled."""
        left = self.until(leg, since) - self._now()
        return left if left > CLOCK_STEP else 0.0
