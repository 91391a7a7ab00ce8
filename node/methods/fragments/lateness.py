"""Lateness of a peer in its turns, and the inner steps that it skips to make up for it."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

SLACK = 0.1
"""Part of a turn by which a peer may be late without skipping steps."""

TURNS = 5
"""Number of past turns from which the duration of a turn is estimated."""


class Lateness:
    """Lateness of one peer. `steps`: inner steps in a turn; `most`: those of them that may be skipped.

    A peer skips steps once for each delay, because all peers make the same number of steps per turn and it would stay late.
    """

    def __init__(self, *, steps: int, most: int) -> None:
        self._steps, self._most = steps, most
        self.turn_began = math.nan
        """Time at which the last turn began."""
        self._durations: deque[float] = deque(maxlen=TURNS)
        self._seconds = 0.0
        self._skipped_in = -1
        """Last turn in which steps were skipped."""

    def begin_turn(self, now: float) -> None:
        """Note that a turn begins."""
        if now > self.turn_began:
            self._durations.append(now - self.turn_began)
        self.turn_began = now

    def note(self, turn: int, seconds: float) -> None:
        """Note by how much this peer was late in a turn, unless steps have been skipped since."""
        if turn > self._skipped_in:
            self._seconds = seconds

    def skip(self, turn: int, seconds: float | None) -> int:
        """Return the inner steps to skip. `seconds`: lateness in this turn; None: in the last noted one."""
        usual = median(self._durations) if self._durations else math.inf
        late = self._seconds if seconds is None else seconds
        if late <= SLACK * usual:
            return 0
        self._seconds, self._skipped_in = 0.0, turn
        return min(self._most, math.ceil(self._steps * late / usual))
