"""Memory that one peer writes and another one of its machine reads: payloads in a memfd (Linux).

Seals prevent changes of the size, so no writer can end its reader with SIGBUS. The reader gets a descriptor for reading only.
Memory that was handed over is never used for anything else, and payloads exist until both sides have released them. So
payloads that a reader has not released stay unchanged, even if the link ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from thinwire.swarm.frame import nbytes

if TYPE_CHECKING:
    from thinwire.swarm.frame import Buffer

PAGE = mmap.PAGESIZE
SHRINK, GROW, SEAL = 0x0002, 0x0004, 0x0001
"""Seals of a memfd (fcntl(2)): the size stays; no seals are added.

A seal against writes of others would prevent `free_gaps`, too.
"""

ADD_SEALS, GET_SEALS = 1033, 1034
"""Commands of fcntl (F_LINUX_SPECIFIC_BASE + 9 and + 10), which Python does not define on all systems."""


class SharedRegion:
    """Memory of `size` bytes that this process writes.

    Each payload occupies whole pages, as near to the beginning as possible. Payloads are released in any order.
    `descriptor`: for the reader, to read only; valid until `hand_over`. Raises OSError if the system has no such memory.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        """Bytes of whole pages with payloads that were not released."""
        self._spans: dict[int, int] = {}  # bytes of whole pages of each payload by its offset
        self._free = [(0, size)]  # start and stop of each gap, in order
        writable = os.memfd_create("thinwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(writable, size)
            self._map = mmap.mmap(writable, size)
            with suppress(OSError, AttributeError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
            fcntl.fcntl(writable, ADD_SEALS, SHRINK | GROW | SEAL)
            os.fchmod(writable, stat.S_IRUSR)
            self.descriptor = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(writable)

    def fits(self, count: int) -> bool:
        """Return True if a payload of `count` bytes may be put now."""
        pages = whole_pages(count)
        return any(stop - start >= pages for start, stop in reversed(self._free))

    def reserve(self, size: int) -> int:
        """Return the offset of a payload of `size` bytes; `fill` it next.

        Raises ValueError if it does not fit.
        """
        pages = whole_pages(size)
        for at, (start, stop) in enumerate(self._free):
            if stop - start >= pages:
                self._free[at : at + 1] = [(start + pages, stop)] if stop - start > pages else []
                self._spans[start] = pages
                self.used += pages
                return start
        raise ValueError("no room in the shared memory")

    def fill(self, start: int, payload: Buffer) -> None:
        """Copy a payload to a reserved offset, in any thread. Do not close the region meanwhile."""
        if size := nbytes(payload):
            # numpy lets other threads run meanwhile, and an mmap does not.
            np.copyto(np.frombuffer(self._map, np.uint8, size, start), np.frombuffer(payload, np.uint8))

    def release(self, starts: Iterable[int]) -> None:
        """Free the payloads at these offsets. Raises ValueError if there is none at one of them."""
        for start in starts:
            pages = self._spans.pop(start, 0)
            if not pages:
                raise ValueError(f"no payload to release at {start} of the shared memory")
            self.used -= pages
            stop, free = start + pages, self._free
            at = bisect_left(free, (start, stop))
            first = last = at
            if at and free[at - 1][1] == start:
                first, start = at - 1, free[at - 1][0]
            if at < len(free) and free[at][0] == stop:
                last, stop = at + 1, free[at][1]
            free[first:last] = [(start, stop)]

    def free_gaps(self) -> None:
        """Return the memory of all gaps to the system, for both sides."""
        for start, stop in self._free:
            self._map.madvise(mmap.MADV_REMOVE, start, stop - start)

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
    """Region of another process, to be read only.

    Takes over `descriptor`. Raises ValueError unless it is sealed memory of at most `most` bytes, in pages of the usual size.
    """

    def __init__(self, descriptor: int, most: int) -> None:
        try:
            found = os.fstat(descriptor)
            # Only memory has seals, so no read of it waits for a disk or for another process.
            seals = fcntl.fcntl(descriptor, GET_SEALS)
            self.size = found.st_size
            # A hole in memory of huge pages (hugetlbfs) cannot always be filled again: reading it may be fatal.
            usual = stat.S_ISREG(found.st_mode) and os.fstatvfs(descriptor).f_bsize == PAGE
            if not usual or not seals & SHRINK or not 0 < self.size <= most:
                raise ValueError(f"not shared memory: {self.size} bytes, seals {seals:#x}")
            # The mapping ends with its last view.
            self._bytes = np.frombuffer(mmap.mmap(descriptor, self.size, prot=mmap.PROT_READ), np.uint8)
        except OSError as error:
            raise ValueError(f"not shared memory: {error.strerror}") from None
        finally:
            os.close(descriptor)

    def view(self, offset: int, size: int, gone: Callable[[int], None]) -> memoryview:
        """Return a view of the bytes from `offset` on, which is valid for ever.

        `gone(offset)` is called in any thread once no view of them is left. Raises ValueError if they are not all inside the
        region.
        """
        lease = self._part(offset, size)
        weakref.finalize(lease, gone, offset).atexit = False
        return lease.data

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on, in any thread.

        Raises ValueError if they are not all inside the region.
        """
        np.copyto(np.frombuffer(into, np.uint8), self._part(offset, into.nbytes))

    def _part(self, offset: int, size: int) -> NDArray[np.uint8]:
        if offset < 0 or size > self.size - offset:
            raise ValueError(f"{size} bytes at {offset} of {self.size} bytes of shared memory")
        return self._bytes[offset : offset + size]

    def close(self) -> None:
        """Give up the memory, as soon as no view of it is left."""
        self._bytes = self._bytes[:0].copy()


def whole_pages(count: int) -> int:
    """Return the bytes of a region that a payload of `count` bytes occupies."""
    return -(-max(count, 1) // PAGE) * PAGE
