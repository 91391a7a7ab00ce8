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
"""Seconds without a frame of a round sent after which state waits no longer."""


class Precedence:
    """All bulk lanes of one peer. `urgent` counts the frames of rounds that wait or are being sent; `handed` is told of each
    frame that was.
    """

    def __init__(self, handed: Callable[[], None] = lambda: None) -> None:
        self.urgent = 0
        self._handed = handed
        self._gone = 0
        self._change = asyncio.Event()

    def add(self, count: int = 1) -> None:
        """More frames of rounds wait."""
        self.urgent += count

    def sent(self, urgent: bool) -> None:
        """A frame has been handed over."""
        if urgent:
            self.urgent -= 1
            self._gone += 1
            self._change.set()
        self._handed()

    def drop(self, count: int) -> None:
        """So many will not be sent."""
        self.urgent -= count
        self._change.set()

    async def turn(self) -> None:
        """Wait until a frame of state may go."""
        first = self._gone
        while self.urgent and self._gone < first + SHARE:
            self._change.clear()
            try:
                async with asyncio.timeout(STUCK):
                    await self._change.wait()
            except TimeoutError:
                return
