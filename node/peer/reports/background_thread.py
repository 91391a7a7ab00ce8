"""Thread for work that an event loop must not wait for, with a bound on what waits for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

MOST = 256
"""Pieces of work that may wait."""


class Background:
    """One thread that runs pieces of work one after the other; it starts with the first one."""

    def __init__(self, name: str, most: int = MOST) -> None:
        self._pool, self._most = ThreadPoolExecutor(1, name), most
        self._waiting: set[Future[None]] = set()
        self.refused = 0
        """Pieces that found too many others waiting."""

    def run(self, work: Callable[[], None]) -> bool:
        """Run a piece of work later; return False, and never run it, if too many wait.

        All calls come from one thread. The work handles its exceptions.
        """
        if len(self._waiting) >= self._most:
            self.refused += 1
            return False
        future = self._pool.submit(work)
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return True

    def close(self) -> None:
        """Wait until all pieces have run."""
        self._pool.shutdown()
