"""Pool of reusable buffers.

Touching a fresh MiB costs ten times as much as its AES-GCM, because the kernel clears pages.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

_SMALLEST = 1 << 16


class BufferPool:
    """Lends byte buffers. The buffer returned last is lent first, as it is still in the cache.

    Sizes are rounded up to multiples of 64 KiB, and above 512 KiB by at most an eighth. The pool retains at most
    `spare` bytes, so that a round reuses the memory of the previous round; the sizes that were used longest ago are
    freed first. The pool does not limit how much is lent; borrowers do.
    """

    def __init__(self, spare: int = 256 << 20) -> None:
        self._limit = spare
        self._spare = 0
        self._free: OrderedDict[int, list[NDArray[np.uint8]]] = OrderedDict()  # most recently returned size last
        # A buffer returns in whichever thread releases it, perhaps in the middle of a call here.
        self._lock = threading.RLock()

    @property
    def spare(self) -> int:
        """Bytes that are stored for later borrowers."""
        return self._spare

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return a buffer of at least `size` bytes with arbitrary content. Return it with `give`."""
        step = max(_SMALLEST, 1 << (size - 1).bit_length() >> 4)
        size = max(step, -(-size // step) * step)
        with self._lock:
            if size in self._free:
                self._spare -= size
                return self._pop(size)
        return np.empty(size, np.uint8)

    def give(self, buffer: NDArray[np.uint8]) -> None:
        """Take back a whole buffer that nothing references any more."""
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

    def free(self) -> None:
        """Free what is stored for later borrowers."""
        with self._lock:
            self._free.clear()
            self._spare = 0

    def _pop(self, size: int) -> NDArray[np.uint8]:
        free = self._free[size]
        buffer = free.pop()
        if not free:
            del self._free[size]
        return buffer

    def lend(self, size: int) -> memoryview:
        """Return a view of `size` bytes that returns to the pool when the last view of it is gone."""
        return self.part(self.take(size), 0, size)

    def part(self, buffer: NDArray[np.uint8], start: int, stop: int) -> memoryview:
        """Return a view of bytes [start, stop) of a taken buffer.

        The buffer returns when the last view is gone.
        """
        lease = buffer[start:stop]
        weakref.finalize(lease, self.give, buffer).atexit = False
        return lease.data
