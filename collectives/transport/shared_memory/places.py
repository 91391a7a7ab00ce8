"""Places of payloads in the other side's region: taken, released in any thread, and then reported."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from thinwire.collectives.transport.shared_memory.region import whole_pages

MOST_OFFSETS = 64
"""Most offsets in a report."""

PROMPT = 2 << 20
"""Least number of released bytes that are reported at once."""

DELAY = 0.005
"""Seconds after which fewer released bytes are reported, too."""


class Places:
    """Offsets of all payloads that the other side may not overwrite.

    - `size`: bytes of the region of the other side.
    - `report`: sends the other side at most MOST_OFFSETS offsets that it may use again.
    """

    def __init__(self, size: int, report: Callable[[list[int]], None]) -> None:
        self._size, self._report = size, report
        self._loop = asyncio.get_running_loop()
        self._held: dict[int, int] = {}  # bytes of whole pages by offset
        self._occupied = 0
        """Bytes of all these pages."""
        self._released: deque[int] = deque()  # offsets that any thread has added
        self._free: list[int] = []  # offsets to report, in all `_bytes_free` bytes of whole pages
        self._bytes_free = 0
        self._scheduled = False
        """True if `_report_released` will be called as soon as the event loop can."""
        self._later: asyncio.TimerHandle | None = None
        self._closed = False

    def take(self, offset: int, size: int) -> None:
        """Note a payload that has arrived.

        Raises ValueError if it is not inside the region, begins where another one does, or the payloads together have more
        bytes than the region.
        """
        if size > self._size - offset:
            raise ValueError(f"{size} bytes at {offset} of {self._size} bytes of shared memory")
        if offset in self._held:
            raise ValueError(f"a payload at {offset} of the shared memory, where another one is")
        self._held[offset] = pages = whole_pages(size)
        self._occupied += pages
        if self._occupied > self._size:
            raise ValueError(f"{self._occupied} bytes of payloads in {self._size} bytes of shared memory")

    def release(self, offset: int) -> None:
        """Note in any thread that the payload at this offset is not used any more."""
        self._released.append(offset)
        if not self._scheduled and not self._closed:
            self._scheduled = True
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._report_released)

    def close(self) -> None:
        """Report nothing more."""
        self._closed = True
        if self._later is not None:
            self._later.cancel()

    def _report_released(self) -> None:
        """Report the released offsets, now or later."""
        self._scheduled = False
        if self._closed:
            return
        while self._released:
            self._free.append(self._released.popleft())
            self._bytes_free += self._held[self._free[-1]]
        if self._bytes_free >= PROMPT or len(self._free) >= MOST_OFFSETS:
            self._report_all()
        elif self._free and self._later is None:
            self._later = self._loop.call_later(DELAY, self._report_all)

    def _report_all(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        for start in range(0, len(self._free), MOST_OFFSETS):
            self._report(self._free[start : start + MOST_OFFSETS])
        self._occupied -= self._bytes_free
        for offset in self._free:
            del self._held[offset]
        self._free.clear()
        self._bytes_free = 0
