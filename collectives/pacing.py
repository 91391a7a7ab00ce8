"""How fast a peer's bulk may leave, where its owner has said so: a token bucket of one record, and no bursts within it.

Records leave one after the other, each when the one before has had its time at the rate. Within a record the kernel keeps to
the rate (Linux, BBR or fq), so that a call or a game on the same line hardly notices. Control is not held back: it is small.
"""

from __future__ import annotations

import asyncio


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
