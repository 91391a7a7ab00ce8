"""Buffers that are used again. Touching a fresh MiB costs ten times what AES-GCM takes for it: the kernel clears pages."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

_SMALLEST = 1 << 16


class Pool:
    """Lends byte buffers, the last returned first (it is still in the cache). Sizes are rounded up to multiples of
    64 KiB, and from 512 KiB on by an eighth at most.

    At most `spare` bytes are kept for later, so that a round finds the memory of the round before; sizes that were not asked
    for longest make room. How much is lent is for the borrowers to bound.
    """

    def __init__(self, spare: int = 256 << 20) -> None:
        self._limit = spare
        self._spare = 0
        self._free: OrderedDict[int, list[NDArray[np.uint8]]] = OrderedDict()  # what came back last is the last
        # What was lent comes back in whichever thread lets go of it, perhaps in the middle of a call here.
        self._lock = threading.RLock()

    def take(self, size: int) -> NDArray[np.uint8]:
        """A buffer of at least `size` bytes with arbitrary content, to be given back with `give`."""
        step = max(_SMALLEST, 1 << (size - 1).bit_length() >> 4)
        size = max(step, -(-size // step) * step)
        with self._lock:
            if size in self._free:
                self._spare -= size
                return self._pop(size)
        return np.empty(size, np.uint8)

    def give(self, buffer: NDArray[np.uint8]) -> None:
        """Take back a whole buffer that nobody looks at any more."""
        size = buffer.nbytes
        if size > self._limit:
            return
        with self._lock:
            self._free.setdefault(size, []).append(buffer)
            self._free.move_to_end(size)
            self._spare += size
            while self._spare > self._limit:
                oldest = next(iter(self._free))
                self._spare -= oldest
                self._pop(oldest)

    def _pop(self, size: int) -> NDArray[np.uint8]:
        free = self._free[size]
        buffer = free.pop()
        if not free:
            del self._free[size]
        return buffer

    def lend(self, size: int) -> memoryview:
        """`size` bytes that return by themselves when the last view of them is gone."""
        return self.part(self.take(size), 0, size)

    def part(self, buffer: NDArray[np.uint8], start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of a buffer that was taken; it returns by itself when the last view of them is gone."""
        lease = buffer[start:stop]
        weakref.finalize(lease, self.give, buffer).atexit = False
        return lease.data
