"""Memory that one peer writes and another one of its machine reads: payloads in a memfd (Linux).

The writer keeps the only mapping. Seals prevent that the size changes, and that the other process writes. The reader
copies payloads out with `preadv`, so no writer can end it with SIGBUS, or change bytes after their hash was checked.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from thinwire.swarm.frame import nbytes

if TYPE_CHECKING:
    from thinwire.swarm.frame import Buffer

PAGE = mmap.PAGESIZE
SHRINK, GROW, SEAL = 0x0002, 0x0004, 0x0001
FUTURE_WRITE = 0x0010
"""Seals of a memfd (fcntl(2)): the size stays; no seals are added; only mappings that exist may write."""

ADD_SEALS, GET_SEALS = 1033, 1034
"""Commands of fcntl (F_LINUX_SPECIFIC_BASE + 9 and + 10), which Python does not define on all systems."""


class SharedRegion:
    """Ring of `size` bytes that this process writes.

    Payloads are released in the order in which they were put. Raises OSError if the system has no such memory.
    `descriptor`: to hand to the reader, before `seal_off`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        """Bytes of payloads that were not released."""
        self._spans: deque[tuple[int, int]] = deque()  # start and bytes of each payload, oldest first
        self._head = 0
        self.descriptor = os.memfd_create("thinwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            self._map = mmap.mmap(self.descriptor, size)
            with suppress(OSError, AttributeError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
            with suppress(OSError):  # before Linux 5.1
                fcntl.fcntl(self.descriptor, ADD_SEALS, FUTURE_WRITE)
            fcntl.fcntl(self.descriptor, ADD_SEALS, SHRINK | GROW | SEAL)
        except BaseException:
            os.close(self.descriptor)
            raise

    def fits(self, count: int) -> bool:
        """Return whether a payload of `count` bytes may be put now."""
        return self._place(whole_pages(count)) is not None

    def reserve(self, size: int) -> int:
        """Return the offset of a payload of `size` bytes; `fill` it next.

        Raises ValueError if it does not fit.
        """
        start = self._place(whole_pages(size))
        if start is None:
            raise ValueError("no room in the shared memory")
        self._head = start + whole_pages(size)
        self._spans.append((start, size))
        self.used += size
        return start

    def fill(self, start: int, payload: Buffer) -> None:
        """Copy a payload to a reserved offset, in any thread. Do not close the region meanwhile."""
        if size := nbytes(payload):
            # numpy lets other threads run meanwhile, and an mmap does not.
            np.copyto(np.frombuffer(self._map, np.uint8, size, start), np.frombuffer(payload, np.uint8))

    def release(self, count: int) -> None:
        """Free the `count` oldest payloads. Raises ValueError if there are not as many."""
        if not 0 < count <= len(self._spans):
            raise ValueError(f"{count} payloads released of {len(self._spans)}")
        for _ in range(count):
            self.used -= self._spans.popleft()[1]

    def _place(self, size: int) -> int | None:
        """Return where `size` bytes are free, None if nowhere."""
        if not self._spans:
            return 0 if size <= self.size else None
        tail = self._spans[0][0]
        if self._head > tail and self.size - self._head >= size:
            return self._head
        if self._head > tail:
            return 0 if tail >= size else None
        return self._head if tail - self._head >= size else None

    def hand_over(self) -> None:
        """Close the descriptor: the reader has it."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def close(self) -> None:
        """Free the memory as soon as the reader has closed it, too."""
        self.hand_over()
        self._map.close()


class RegionReader:
    """Region of another process.

    Takes over `descriptor`. Raises ValueError unless it is sealed memory of at most `most` bytes.
    """

    def __init__(self, descriptor: int, most: int) -> None:
        self._descriptor = descriptor
        try:
            found = os.fstat(descriptor)
            # Only memory has seals, so no read of it waits for a disk or for another process.
            seals = fcntl.fcntl(descriptor, GET_SEALS)
        except OSError as error:
            self.close()
            raise ValueError(f"not shared memory: {error.strerror}") from None
        self.size = found.st_size
        if not stat.S_ISREG(found.st_mode) or not seals & SHRINK or not 0 < self.size <= most:
            self.close()
            raise ValueError(f"not shared memory: {self.size} bytes, seals {seals:#x}")

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on.

        Raises ValueError if they are not all inside the region.
        """
        if offset < 0 or into.nbytes > self.size - offset:
            raise ValueError(f"{into.nbytes} bytes at {offset} of {self.size} bytes of shared memory")
        while into.nbytes:
            count = os.preadv(self._descriptor, [into], offset)
            if count <= 0:
                raise ValueError("shared memory ends early")
            into, offset = into[count:], offset + count

    def close(self) -> None:
        """Give up the memory."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def whole_pages(count: int) -> int:
    """Return the bytes of a region that a payload of `count` bytes occupies."""
    return -(-max(count, 1) // PAGE) * PAGE
