"""Pending timers of a simulated loop.

A thousand peers have tens of thousands of timers, most of them for later or cancelled by then. Only those of the present
slot of time are sorted; the others are just collected by slot.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from heapq import heappop, heappush

from thinwire.sims.engine.loop_handles import Timer

SLOTS = 128.0
"""Slots in a second; a power of two, so that the product with a time is exact."""

Entry = tuple[float, int, Timer]
"""Time of a timer, its place in the order of `add`, and the timer."""


class Timers:
    """Timers in order of time; equal times are in the order of `add`.

    near: the timers of the present slot and of those before, in order, some of them cancelled.
    """

    def __init__(self) -> None:
        self.near = deque[Entry]()
        self._later: dict[float, list[Entry]] = {}
        """Timers of later slots."""
        self._slots: list[float] = []
        """Heap of the slots in `_later`."""
        self._slot = -1.0
        """The present slot: that of the last timers in `near`."""
        self._added = 0

    def add(self, timer: Timer) -> None:
        """Add a timer."""
        self._added += 1
        due = timer.due
        entry = (due, self._added, timer)
        slot = due * SLOTS // 1.0 if due < math.inf else math.inf
        if slot <= self._slot:
            insort(self.near, entry)
        elif (later := self._later.get(slot)) is not None:
            later.append(entry)
        else:
            self._later[slot] = [entry]
            heappush(self._slots, slot)

    def next(self) -> float | None:
        """Return the time of the next timer, then the first one of `near`; None without one that still counts."""
        near = self.near
        while near or self._slots:
            if not near:
                self._slot = heappop(self._slots)
                near += sorted([entry for entry in self._later.pop(self._slot) if not entry[2].ended])
            elif near[0][2].ended:
                near.popleft()
            else:
                return near[0][0]
        return None

    def clear(self) -> None:
        """Remove all timers."""
        self.near.clear()
        self._later.clear()
        self._slots.clear()
