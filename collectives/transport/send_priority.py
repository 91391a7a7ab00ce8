"""Order of frames that share the uplink: frames of rounds first, then state for joiners.

State waits while rounds have frames to send, to any peer. But one of every few frames is state, so that a joiner makes
progress in a swarm that always exchanges. And state does not wait for frames that do not move: a peer that takes no
data delays no other peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SHARE = 4
"""Frames of rounds that go before one frame of state."""

STUCK = 2.0
"""Seconds without a sent round frame after which state stops waiting; longer where frames take longer."""

SLOW, SLOWEST = 3, 15.0
"""Multiple of the last frame's duration that a frame may take, and the upper limit of that in seconds."""


class SendPriority:
    """Shared by all bulk queues of one peer. `urgent` counts round frames that wait or are being sent.

    `handed` is called after each sent frame.
    """

    def __init__(self, handed: Callable[[], None] = lambda: None) -> None:
        self.urgent = 0
        self._handed = handed
        self._gone = self._mark = 0  # round frames sent, and how many must have been sent before the next state frame
        self._took, self._last = 0.0, 0.0
        self._stuck = -1  # value of `_gone` when sending got stuck
        self._change = asyncio.Event()

    def add(self, count: int = 1) -> None:
        """Count more waiting frames of rounds."""
        if not self.urgent and count:
            self._mark, self._last = self._gone + SHARE, asyncio.get_running_loop().time()
        self.urgent += count
        self._change.set()

    def sent(self, urgent: bool) -> None:
        """Note that a frame was handed to the transport."""
        if urgent:
            self.urgent -= 1
            self._gone += 1
            now = asyncio.get_running_loop().time()
            self._took, self._last = now - self._last, now
            self._change.set()
        self._handed()

    def drop(self, count: int) -> None:
        """Count out frames of rounds that will not be sent."""
        self.urgent -= count
        self._change.set()

    async def turn(self, pressed: Callable[[], bool]) -> None:
        """Wait until this queue may send a frame of state, or until `pressed`.

        `pressed` tells that the queue has another frame to send.
        """
        while self.urgent and self._stuck != self._gone < self._mark and not pressed():
            self._change.clear()
            try:
                async with asyncio.timeout(max(STUCK, min(SLOWEST, SLOW * self._took))):
                    await self._change.wait()
            except TimeoutError:
                self._stuck = self._gone
        if not pressed():
            self._mark = self._gone + SHARE
