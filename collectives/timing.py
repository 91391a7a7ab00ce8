"""Time constants that rounds, gossip and their callers share."""

from __future__ import annotations

import math

TICK = 0.1
"""Seconds between two looks at the clock: well below the patience of any round."""

GIVE_UP = 10
"""Patiences beyond the grace after which a peer leaves an undecided round; its delta stays."""

STALL = 5
"""Patiences for which a transfer that has begun may rest before it is given up."""

SLOW_FACTOR = 5
"""Time that slow peers get at least after the first half of all, in units of what that half took."""

MAX_MOVING = 3600.0
"""Most seconds that a peer waits for a round because its frames move."""

MAX_PATIENCE = 120.0
"""Most seconds without progress before a peer acts, however slow rounds have been."""


class Halfway:
    """Time at which more than half of some peers have sent everything, and at which the others are late.

    It concerns one ballot at a time. So peers that let their data drip do not change what counts as late, unless they are
    half of all; and if most are slow, none of them is late.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        """Seconds that more than half of them took, in the ballot in which they took the most."""
        self._began = 0.0
        self._reached: float | None = None
        self._all = False

    def begin(self, now: float) -> None:
        """Begin a ballot, which may ask for other data."""
        self._began, self._reached, self._all = now, None, False

    def note(self, done: int, peers: int, now: float) -> None:
        """Note that this number of the peers have sent everything."""
        self._all = done >= peers
        if self._reached is None and 2 * done > peers:
            self._reached, self.longest = now, max(self.longest, now - self._began)

    def late_at(self, wait: float) -> float:
        """Return the time from which the others are late; infinite until more than half of all are done.

        They get `wait` seconds more than the first half, or SLOW_FACTOR times what that half took.
        """
        if self._reached is None or self._all:
            return math.inf
        return self._reached + max(wait, SLOW_FACTOR * self.longest)


class Patience:
    """Seconds without progress before a peer acts: three times the mean duration of exchanges.

    It is at least `floor`. The mean is a moving average.
    """

    def __init__(self, floor: float) -> None:
        self.seconds = self._floor = floor

    def observe(self, took: float) -> None:
        """Count an exchange that took this number of seconds."""
        self.seconds = max(self._floor, min(MAX_PATIENCE, 0.7 * self.seconds + 0.3 * 3.0 * took))
