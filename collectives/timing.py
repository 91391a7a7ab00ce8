"""Time constants that rounds, gossip and their callers share."""

from __future__ import annotations

import math

TICK = 0.1
"""Seconds between two looks at the clock: well below the patience of any round."""

GIVE_UP = 10
"""Patiences beyond the grace after which a peer leaves an undecided round; its delta stays."""

STALL = 5
"""Patiences for which a transfer that has begun may rest before it is given up.

Also the time that slow senders get after the first half of all, in units of what that half took.
"""

MAX_MOVING = 3600.0
"""Most seconds that a peer waits for a round because its frames move."""

MAX_PATIENCE = 120.0
"""Most seconds without progress before a peer acts, however slow rounds have been."""


class Halfway:
    """Time at which half of some senders have sent everything, and at which the others are late.

    So senders that let their data drip do not change what counts as late, unless they are more than half. began: time at
    which all may begin.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self.seconds: float | None = None
        """Seconds until half of them had sent everything; None before that."""

    def note(self, done: int, senders: int, now: float) -> None:
        """Note that this number of the senders have sent everything."""
        if self.seconds is None and 0 < senders <= 2 * done:
            self.seconds = now - self._began

    def late_at(self, since: float, wait: float) -> float:
        """Return the time at which the others are late; infinite before half of them are done.

        From then on, or from `since` if that is later, they get `wait` seconds, or STALL times what that half took.
        """
        if self.seconds is None:
            return math.inf
        return max(since, self._began + self.seconds) + max(wait, STALL * self.seconds)


class Patience:
    """Seconds without progress before a peer acts: three times the mean duration of exchanges.

    It is at least `floor`. The mean is a moving average.
    """

    def __init__(self, floor: float) -> None:
        self.seconds = self._floor = floor

    def observe(self, took: float) -> None:
        """Count an exchange that took this number of seconds."""
        self.seconds = max(self._floor, min(MAX_PATIENCE, 0.7 * self.seconds + 0.3 * 3.0 * took))
