"""How fast a peer's bulk may leave, where its owner has said so: a token bucket of one record, and no bursts within it.

Records leave one after the other, each when the one before has had its time at the rate. Within a record the kernel keeps to
the rate (Linux, BBR or fq), so that a call or a game on the same line hardly notices. Control is not held back: it is small.
"""

from __future__ import annotations

import asyncio
import socket
import sys

MAX_PACING_RATE = 47
"""SO_MAX_PACING_RATE of Linux, which Python has no name for."""


class Pacer:
    """`rate`: bytes/s; 0: as much as the link takes."""

    def __init__(self, rate: int = 0) -> None:
        self.rate = rate
        self._free = 0.0

    def reserve(self, nbytes: int, now: float) -> float:
        """Seconds to wait, from `now`, before so many bytes may leave; their place in the order is taken."""
        if not self.rate:
            return 0.0
        start = max(now, self._free)
        self._free = start + nbytes / self.rate
        return start - now

    async def wait(self, nbytes: int) -> None:
        """Wait until so many bytes may leave."""
        seconds = self.reserve(nbytes, asyncio.get_running_loop().time())
        if seconds:
            await asyncio.sleep(seconds)

    def tune(self, sock: socket.socket) -> None:
        """Let the kernel send no faster on this connection; where it cannot, whole records are paced."""
        if self.rate and sys.platform == "linux":
            try:
                sock.setsockopt(socket.SOL_SOCKET, MAX_PACING_RATE, min(self.rate, 2**32 - 1))
            except OSError:
                pass
