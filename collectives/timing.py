"""Time constants that rounds, gossip and their callers share."""

from __future__ import annotations

TICK = 0.1
"""Interval in seconds at which time-outs are checked: well below the patience of any round."""

GIVE_UP = 10
"""Patiences beyond the grace after which a peer gives an undecided round up; inner steps remain."""

STALL = 5
"""Patiences for which a transfer that has begun may rest before it is given up."""

SLOW_FACTOR = 5
"""Time that slow peers get at least after the first half of all, in units of what that half took."""

MAX_TRANSFER = 3600.0
"""Most seconds that a peer waits for a round whose frames still arrive or leave."""

MAX_PATIENCE = 120.0
"""Most seconds without progress before a peer acts, however slow rounds have been."""


class Patience:
    """Seconds without progress before a peer acts: three times the mean duration of exchanges.

    It is at least `floor`. The mean is a moving average. One exchange at most doubles it: it may have lasted long because
    this peer was cut off, and with a long patience a lost answer would then delay the next rounds here.
    """

    def __init__(self, floor: float) -> None:
        self.seconds = self._floor = floor

    def observe(self, took: float) -> None:
        """Count an exchange that took this number of seconds."""
        mean = 0.7 * self.seconds + 0.3 * 3.0 * took
        self.seconds = max(self._floor, min(MAX_PATIENCE, 2 * self.seconds, mean))
