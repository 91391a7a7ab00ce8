"""Rate limits: token buckets, and the optional limit for outgoing bulk data.

The latter is a token bucket of one record, without bursts within a record.

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


FEW = 64
"""Buckets that are stored although they may be full."""


class TokenBuckets:
    """Token buckets by key: each holds `burst` tokens and gains `rate` per second.

    Full buckets are forgotten, at the latest when there are twice as many as were kept the last time.
    """

    def __init__(self, burst: int, rate: float, capacity: int = 4096) -> None:
        self._burst, self._rate, self._capacity = float(burst), rate, capacity
        self._levels: dict[bytes | str, tuple[float, float]] = {}
        self._most = min(FEW, capacity)

    def take(self, key: bytes | str, now: float, leave: float = 0.0) -> bool:
        """Take one token at time `now` (seconds, monotonic) if at least `leave` tokens are left.

        False: there are fewer, or too many keys have buckets that are not full.
        """
        if (bucket := self._levels.get(key)) is not None:
            level = min(self._burst, bucket[0] + (now - bucket[1]) * self._rate)
        elif self._has_room(now):
            level = self._burst
        else:
            return False
        granted = level >= 1.0 + leave
        self._levels[key] = (level - 1.0 if granted else level, now)
        return granted

    def give(self, key: bytes | str, count: int) -> None:
        """Add tokens to a bucket, which holds `burst` of them at most."""
        if (bucket := self._levels.get(key)) is not None:
            self._levels[key] = min(self._burst, bucket[0] + count), bucket[1]

    def _has_room(self, now: float) -> bool:
        """Return True if there is room for another bucket, after full ones were forgotten if necessary."""
        if len(self._levels) >= self._most:
            self._forget(now)
            if len(self._levels) >= self._capacity:
                return False
            self._most = min(self._capacity, max(FEW, 2 * len(self._levels)))
        return True

    def _forget(self, now: float) -> None:
        full = [k for k, (level, since) in self._levels.items() if level + (now - since) * self._rate >= self._burst]
        for key in full:
            del self._levels[key]
