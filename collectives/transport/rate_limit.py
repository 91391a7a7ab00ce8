"""Optional rate limit for outgoing bulk data.

It is a token bucket of one record, without bursts within a record.

Records are sent one after the other, each once the previous one has had its time at the rate. Within a record the
kernel paces the data (Linux, BBR or fq), so that a call or a game on the same line hardly notices. Control messages are
small and not limited.

Bytes that this peer relays for others wait behind its own, but get at least about a ninth of the rate, so that the links
of others do not end while this peer has much to send.
"""

from __future__ import annotations

import asyncio

AHEAD = 0.02
"""Seconds by which relayed bytes may be early: they hide late timers of the event loop."""

BEHIND = 8
"""Relayed bytes wait at most this many times as long as they take."""


class RateLimit:
    """Rate limit. `rate`: bytes/s; 0 means unlimited."""

    def __init__(self, rate: int = 0) -> None:
        self.rate = rate
        self._free = 0.0
        self._turn = asyncio.Lock()

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

    async def wait_behind(self, nbytes: int) -> None:
        """Wait until `nbytes` bytes of others may be sent: behind our own data, in the order of the calls."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            latest = loop.time() + BEHIND * nbytes / self.rate
            while (ahead := self._free - (now := loop.time())) > AHEAD and now < latest:
                await asyncio.sleep(min(ahead - AHEAD / 2, latest - now))
            self.reserve(nbytes, now)
