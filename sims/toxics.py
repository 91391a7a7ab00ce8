"""What can be wrong with the way of bytes from one host to another: latency, jitter, loss, limits, relays that spoil.

The words are those of toxiproxy, a proxy for chaos tests. A stream stays a stream: what is lost is sent again, so loss is a
stall; bytes that a relay flips, repeats or swaps are for the ends to find out.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, field

SEGMENT = 1460
"""Bytes of one packet: the more of them a piece has, the sooner one of them is lost."""

LEAST_STALL = 0.2
"""Seconds after which a lost packet is sent again at the soonest (RFC 6298 as it is practised)."""

_LONGEST_STALL = 10.0


def _open() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(slots=True)
class Toxics:
    """One direction between two hosts; may be changed while bytes are under way.

    latency: one-way seconds. jitter: mean seconds more. loss: probability per packet. bandwidth: bytes/s of each connection.
    limit: bytes after which a connection ends (limit_data). slice, gap: pieces of so many bytes with so many seconds between
    (slicer). spoil: "", "corrupt", "duplicate" or "reorder".
    """

    latency: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    bandwidth: float | None = None
    limit: int | None = None
    slice: int = 0
    gap: float = 0.0
    spoil: str = ""
    _holds: int = 0
    _open: asyncio.Event = field(default_factory=_open)

    def hold(self) -> None:
        """Let nothing through until as many `release`: a partition, a clog, the silence before a time-out."""
        self._holds += 1
        self._open.clear()

    def release(self) -> None:
        """End one `hold`."""
        self._holds = max(0, self._holds - 1)
        if not self._holds:
            self._open.set()

    @property
    def held(self) -> bool:
        """Whether nothing gets through."""
        return self._holds > 0

    async def passable(self) -> None:
        """Wait while it is held."""
        await self._open.wait()

    def delay(self, size: int, rng: random.Random) -> float:
        """Seconds that a piece of `size` bytes is on its way."""
        seconds = self.latency
        if self.jitter:
            seconds += rng.expovariate(1 / self.jitter)
        if self.loss:
            lost = 1 - (1 - self.loss) ** math.ceil(size / SEGMENT)
            stall = max(LEAST_STALL, 3 * self.latency)
            while rng.random() < lost and stall < _LONGEST_STALL:
                seconds += stall
                stall *= 2
                lost = self.loss  # sent again, packet by packet
        return seconds

    def pieces(self, data: bytes, rng: random.Random) -> list[bytes]:
        """`data` as it arrives: cut by the slicer, and spoilt."""
        if self.spoil == "corrupt" and data:
            place = rng.randrange(len(data))
            data = data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
        elif self.spoil == "duplicate":
            data += data
        elif self.spoil == "reorder":
            data = data[len(data) // 2 :] + data[: len(data) // 2]
        if not self.slice:
            return [data]
        return [data[start : start + self.slice] for start in range(0, len(data), self.slice)]
