"""Faults of the path between two hosts: latency, jitter, loss, limits, and damage by relays.

The terms are those of toxiproxy, a proxy for chaos tests. A stream remains a stream: lost data is retransmitted, so
loss becomes a stall. The ends of a connection must detect bytes that a relay flips, repeats or swaps.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, field

SEGMENT = 1460
"""Bytes of one packet; a piece with more packets is more likely to lose one."""

LEAST_STALL = 0.2
"""Shortest time in seconds until a lost packet is retransmitted (RFC 6298 as implemented in practice)."""

_LONGEST_STALL = 10.0


def _open() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(slots=True)
class Toxics:
    """Faults of one direction between two hosts; may be changed while bytes are in flight.

    latency: one-way seconds. jitter: mean additional seconds. loss: probability per packet. bandwidth: bytes/s of each
    connection. limit: bytes after which a connection ends (limit_data). slice, gap: size of pieces in bytes, and
    seconds between them (slicer). spoil: "", "corrupt", "duplicate" or "reorder".
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
        """Block everything until an equal number of `release`s.

        Models a partition, a clog, or the silence before a time-out.
        """
        self._holds += 1
        self._open.clear()

    def release(self) -> None:
        """End one `hold`."""
        self._holds = max(0, self._holds - 1)
        if not self._holds:
            self._open.set()

    @property
    def held(self) -> bool:
        """True while everything is blocked."""
        return self._holds > 0

    async def passable(self) -> None:
        """Wait while the direction is held."""
        await self._open.wait()

    def delay(self, size: int, rng: random.Random) -> float:
        """Return the seconds that a piece of `size` bytes takes."""
        seconds = self.latency
        if self.jitter:
            seconds += rng.expovariate(1 / self.jitter)
        if self.loss:
            lost = 1 - (1 - self.loss) ** math.ceil(size / SEGMENT)
            stall = max(LEAST_STALL, 3 * self.latency)
            while rng.random() < lost and stall < _LONGEST_STALL:
                seconds += stall
                stall *= 2
                lost = self.loss  # retransmission, packet by packet
        return seconds

    def pieces(self, data: bytes, rng: random.Random) -> list[bytes]:
        """Return `data` as it arrives: damaged, and cut by the slicer."""
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
