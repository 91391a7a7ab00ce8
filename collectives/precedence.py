"""Who goes first when several want the same uplink: what a round waits for, then state for newcomers.

State waits while rounds have something to send, to whomever; but of the frames that leave it gets its share, so that a newcomer
gets on in a swarm that exchanges all the time. And it does not wait for frames that do not move: one peer that takes nothing
holds up nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SHARE = 4
"""Frames of rounds that go before one of state."""

STUCK = 2.0
"""Seconds without a frame of a round sent after which state waits no longer; more where frames take longer than that."""

SLOW, SLOWEST = 3, 15.0
"""How often what a frame took last it may take, and the most seconds that come of it."""


class Precedence:
    """All bulk lanes of one peer. `urgent` counts the frames of rounds that wait or are being sent; `handed` is told of each
    frame that was.
    """

    def __init__(self, handed: Callable[[], None] = lambda: None) -> None:
        self.urgent = 0
        self._handed = handed
        self._gone = self._mark = 0  # frames of rounds that went, and how many shall have before the next one of state
        self._took, self._last = 0.0, 0.0
        self._stuck = -1  # how many had gone when nothing moved any more
        self._change = asyncio.Event()

    def add(self, count: int = 1) -> None:
        """More frames of rounds wait."""
        if not self.urgent and count:
            self._mark, self._last = self._gone + SHARE, asyncio.get_running_loop().time()
        self.urgent += count
        self._change.set()

    def sent(self, urgent: bool) -> None:
        """A frame has been handed over."""
        if urgent:
            self.urgent -= 1
            self._gone += 1
            now = asyncio.get_running_loop().time()
            self._took, self._last = now - self._last, now
            self._change.set()
        self._handed()

    def drop(self, count: int) -> None:
        """So many will not be sent."""
        self.urgent -= count
        self._change.set()

    async def turn(self, pressed: Callable[[], bool]) -> None:
        """Wait until a frame of state may go, of one lane after the other, or until `pressed`: the lane has something else."""
        while self.urgent and self._stuck != self._gone < self._mark and not pressed():
            self._change.clear()
            try:
                async with asyncio.timeout(max(STUCK, min(SLOWEST, SLOW * self._took))):
                    await self._change.wait()
            except TimeoutError:
                self._stuck = self._gone
        if not pressed():
            self._mark = self._gone + SHARE
