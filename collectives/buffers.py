"""Buffers that are used again. Touching a fresh MiB costs ten times what AES-GCM takes for it: the kernel clears pages."""

from __future__ import annotations

import threading
import weakref

import numpy as np
from numpy.typing import NDArray

_SMALLEST = 1 << 16


class Pool:
    """Lends byte buffers, the last returned first (it is still in the cache). Sizes are rounded up by an eighth at most.

    At most `spare` bytes are kept for later, so that a round finds the memory of the round before; how much is lent is for
    the borrowers to bound.
    """

    def __init__(self, spare: int = 256 << 20) -> None:
        self._limit = spare
        self._spare = 0
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        # What was lent comes back in whichever thread lets go of it, perhaps in the middle of a call here.
        self._lock = threading.RLock()

    def take(self, size: int) -> NDArray[np.uint8]:
        """A buffer of at least `size` bytes with arbitrary content, to be given back with `give`."""
        step = max(_SMALLEST, 1 << (size - 1).bit_length() >> 4)
        size = max(step, -(-size // step) * step)
        with self._lock:
            free = self._free.get(size)
            if free:
                self._spare -= size
                return free.pop()
        return np.empty(size, np.uint8)

    def give(self, buffer: NDArray[np.uint8]) -> None:
        """Take back a whole buffer that nobody looks at any more."""
        with self._lock:
            if self._spare + buffer.nbytes <= self._limit:
                self._spare += buffer.nbytes
                self._free.setdefault(buffer.nbytes, []).append(buffer)

    def lend(self, size: int) -> memoryview:
        """`size` bytes that return by themselves when the last view of them is gone."""
        return self.part(self.take(size), 0, size)

    def part(self, buffer: NDArray[np.uint8], start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of a buffer that was taken; it returns by itself when the last view of them is gone."""
        lease = buffer[start:stop]
        weakref.finalize(lease, self.give, buffer).atexit = False
        return lease.data
