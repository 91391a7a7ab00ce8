"""Queue of received frames: control before bulk, each bounded in bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from thinwire.collectives.transport.interface import Arrival

_OVERHEAD = 1024
"""Bytes that an arrival takes besides its frame's, so that many small ones are bounded too."""


class BoundedQueue:
    """Queue that calls `pause(True)` at `limit` bytes, and `pause(False)` once half of that is taken."""

    def __init__(self, limit: int, pause: Callable[[bool], None]) -> None:
        self.held = 0
        """Bytes waiting."""
        self.full = False
        """True if senders are held back."""
        self._limit, self._pause = limit, pause
        self._entries: deque[tuple[Arrival, int]] = deque()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def put(self, arrival: Arrival, size: int) -> None:
        """Add an arrival without waiting: data read before the pause takes effect is still accepted."""
        size += _OVERHEAD
        self._entries.append((arrival, size))
        self.held += size
        if self.held >= self._limit and not self.full:
            self.full = True
            self._pause(True)

    def take(self) -> Arrival:
        """Remove and return the oldest arrival."""
        arrival, size = self._entries.popleft()
        self._took(size)
        return arrival

    def forget(self, peer: bytes) -> None:
        """Drop everything received from a peer."""
        gone = sum(size for arrival, size in self._entries if arrival.peer == peer)
        self._entries = deque(entry for entry in self._entries if entry[0].peer != peer)
        self._took(gone)

    def _took(self, size: int) -> None:
        self.held -= size
        if self.full and self.held <= self._limit // 2:
            self.full = False
            self._pause(False)


class ReceiveQueue:
    """Both queues; `pause_control` and `pause_bulk` hold back the senders of one kind."""

    def __init__(self, limit: int, pause_control: Callable[[bool], None], pause_bulk: Callable[[bool], None]) -> None:
        self.control = BoundedQueue(limit, pause_control)
        self.bulk = BoundedQueue(limit, pause_bulk)
        self._something = asyncio.Event()
        self._closed = False

    def put(self, arrival: Arrival, size: int, *, bulk: bool = False) -> None:
        """Add an arrival of `size` bytes."""
        (self.bulk if bulk else self.control).put(arrival, size)
        self._something.set()

    def forget(self, peer: bytes) -> None:
        """Drop everything received from a peer."""
        self.control.forget(peer)
        self.bulk.forget(peer)

    def close(self) -> None:
        """Close the queue: `get` raises RuntimeError for present and later callers."""
        self._closed = True
        self._something.set()

    async def get(self) -> Arrival:
        """Return the next arrival, control first. Raises RuntimeError when closed."""
        while not self._closed:
            if self.control or self.bulk:
                return (self.control or self.bulk).take()
            self._something.clear()
            await self._something.wait()
        raise RuntimeError("the transport is closed")
