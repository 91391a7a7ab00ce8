"""Optional rate limit for outgoing bulk data.

It is a token bucket of one record, without bursts within a record.

Records are sent one after the other, each once the previous one has had its time at the rate. Within a record the
kernel paces the data (Linux, BBR or fq), so that a call or a game on the same line hardly notices. Control messages are
small and not limited.
"""

from __future__ import annotations

import asyncio


class RateLimit:
    """Rate limit. `rate`: bytes/s; 0 means unlimited."""

    def __init__(self, rate: int = 0) -> None:
        self.rate = rate
        self._free = 0.0

    def reserve(self, nbytes: int, now: float) -> float:
        """Reserve the time for `nbytes` bytes.

        Return the seconds to wait, from `now`, before they may be sent.
        """
        if not self.rate:
            return 0.0
        start = max(now, self._free)
        self._free = start + nbytes / self.rate
        return start - now

    async def wait(self, nbytes: int) -> None:
        """Wait until `nbytes` bytes may be sent."""
        seconds = self.reserve(nbytes, asyncio.get_running_loop().time())
        if seconds:
            await asyncio.sleep(seconds)
