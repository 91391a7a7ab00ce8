"""Order of frames that share the uplink: frames of rounds first, then state for joiners.

State waits while rounds have frames to send, to any peer. But a tenth of the bytes is state, so that a joiner makes
progress in a swarm that always exchanges. And state does not wait for frames that do not move: a peer that takes no
data delays no other peer.

State has a tenth of the uplink, also between rounds: a round that begins finds at most one frame of state before its own.
Without the pauses, all frames that joiners have asked for would be there. On slow links the pauses are shorter than this
share requires, because the joiner gives up a source that sends nothing for too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SHARE = 9
"""Bytes of rounds before one byte of state; pause after a frame of state in its durations."""

PAUSE = 1.0
"""Longest pause after a frame of state in seconds, besides its own duration."""

STUCK = 2.0
"""Seconds without a sent round frame after which state stops waiting; longer where frames take longer."""

SLOW, SLOWEST = 3, 15.0
"""Multiple of the last frame's duration that a frame may take, and the upper limit of that in seconds."""


class SendPriority:
    """Shared by all bulk queues of one peer. `urgent` counts round frames that wait or are being sent.

    `handed` is called after each sent frame. `uplink`: returns the known rate of our uplink in bytes/s, 0 if unknown;
    then state has no pauses.
    """

    def __init__(self, handed: Callable[[], None] = lambda: None, uplink: Callable[[], int] = lambda: 0) -> None:
        self.urgent = 0
        self._handed, self._uplink = handed, uplink
        self._free = 0.0  # when the next frame of state may be sent
        self._gone = self._mark = 0  # bytes of rounds sent, and how many when state last had its turn
        self._took, self._last = 0.0, 0.0
        self._stuck = -1  # value of `_gone` when sending got stuck
        self._change = asyncio.Event()

    def add(self, count: int = 1) -> None:
        """Count more waiting frames of rounds."""
        if not self.urgent and count:
            self._mark, self._last = self._gone, asyncio.get_running_loop().time()
        self.urgent += count
        self._change.set()

    def sent(self, urgent: bool, nbytes: int) -> None:
        """Note that a frame with `nbytes` bytes of payload was handed to the transport."""
        if urgent:
            self.urgent -= 1
            self._gone += max(1, nbytes)
            now = asyncio.get_running_loop().time()
            self._took, self._last = now - self._last, now
            self._change.set()
        self._handed()

    def drop(self, count: int) -> None:
        """Count out frames of rounds that will not be sent."""
        self.urgent -= count
        self._change.set()

    @property
    def free(self) -> bool:
        """True if a frame of state may be sent at once."""
        return not self.urgent and self._free <= asyncio.get_running_loop().time()

    def pause(self, nbytes: int) -> None:
        """Begin the pause after a frame of state with `nbytes` bytes."""
        took = nbytes / rate if (rate := self._uplink()) else 0.0
        self._free = asyncio.get_running_loop().time() + took + min(PAUSE, SHARE * took)

    async def turn(self, pressed: Callable[[], bool], nbytes: int) -> None:
        """Wait until this queue may send a frame of state with `nbytes` bytes, or until `pressed`.

        `pressed` tells that the queue has another frame to send.
        """
        now = asyncio.get_running_loop().time
        while not pressed():
            waits = self.urgent and self._stuck != self._gone < self._mark + SHARE * nbytes
            seconds = max(STUCK, min(SLOWEST, SLOW * self._took)) if waits else self._free - now()
            if seconds <= 0:
                break
            self._change.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._change.wait()
            except TimeoutError:
                if waits:
                    self._stuck = self._gone
        if not pressed():
            self._mark = self._gone
            self.pause(nbytes)
