"""How long a peer may take for its next micro-batch: by what it took before, as the origin saw it."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.swarm.protocol import PeerId

TICK = 1e-3
"""Seconds that are none: clocks of event loops go in steps."""

Leg = tuple[PeerId, bool]
"""What is waited for: that a peer passes something on, or (True) that what it has passed on arrives at the origin."""

FACTOR = 4.0
"""So many times the longest recent interval is a stall."""

FADING = 0.9
"""How much of the longest interval is left after each next one."""


class Patience:
    """Intervals between two things that a peer has passed on while there was more to do.

    `first`: seconds for a peer that is not known yet; `least`: seconds that are never too long.
    """

    def __init__(self, now: Callable[[], float], *, first: float, least: float) -> None:
        self._now, self._first, self._least = now, first, least
        self._longest: dict[Leg, float] = {}
        self._moved: dict[Leg, float] = {}

    def moved(self, leg: Leg, since: float) -> float:
        """Something has come about for which the peer had the time from `since` on at the earliest; the seconds it took."""
        now = self._now()
        interval = now - max(since, self._moved.get(leg, 0.0))
        self._moved[leg] = now
        self._longest[leg] = max(interval, FADING * self._longest.get(leg, 0.0))
        return interval

    def until(self, leg: Leg, since: float) -> float:
        """When a peer that has the time from `since` on will have stalled."""
        known = self._longest.get(leg)
        bound = self._first if known is None else max(self._least, FACTOR * known)
        return max(since, self._moved.get(leg, 0.0)) + bound

    def left(self, leg: Leg, since: float) -> float:
        """Seconds until then; 0 when a peer has stalled."""
        left = self.until(leg, since) - self._now()
        return left if left > TICK else 0.0
