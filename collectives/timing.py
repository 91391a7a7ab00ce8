"""Time constants that rounds, gossip and their callers share."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

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


LONGEST_NAP = 3
"""Most pauses between two ticks: a process notices by a late tick that it was stopped."""


class Ticks:
    """Times at which a peer looks at its deadlines: of the multiples of a `pause`, the planned ones.

    `now` is the clock of the deadlines, in seconds. It may be a little faster or slower than that of the event loop, which
    the pauses follow.
    """

    def __init__(self, pause: float, now: Callable[[], float]) -> None:
        self._loop = asyncio.get_running_loop()
        self._pause, self._now, self._last = pause, now, self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        """Timer of the planned tick; None: none is planned."""
        self._at = self._planned = 0.0
        """Times of the planned tick, on the clock of the event loop and on that of the deadlines."""
        self._due = asyncio.Event()

    def by(self, deadline: float) -> None:
        """Plan the first tick at or after a deadline, which may be past, unless an earlier one is planned.

        It comes at most LONGEST_NAP pauses after the last one.
        """
        planned = self._timer is not None
        if planned and (deadline >= self._planned or self._loop.time() >= self._at):
            return  # A tick that is late stays planned, because its lateness counts.
        time, now, at = self._loop.time(), self._now(), self._last
        for _ in range(LONGEST_NAP):
            at += self._pause
            if at - time >= max(0.0, deadline - now):
                break
        if not planned or at < self._at:
            if self._timer is not None:
                self._timer.cancel()
            self._at, self._planned = at, now + at - time
            self._timer = self._loop.call_at(at, self._due.set)

    async def next(self) -> float:
        """Wait for the next planned tick. Returns the seconds by which it is late."""
        await self._due.wait()
        self._due.clear()
        late, self._last, self._timer = self._now() - self._planned, self._loop.time(), None
        return late
