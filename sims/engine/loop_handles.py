"""Handles of a simulated loop: those of asyncio, constructed in fewer steps.

Nearly all of a simulation's work consists of such callbacks.
"""

from __future__ import annotations

from contextvars import Context
from typing import Any

import msgspec


class Handle(msgspec.Struct, eq=False, gc=False):
    """Callback that is ready, with the interface of asyncio.Handle. call: the callback and its arguments."""

    context: Context
    call: tuple[Any, ...]
    ended: bool = False
    """True if it was cancelled."""

    def cancel(self) -> None:
        """Prevent the callback from running."""
        self.ended = True

    def cancelled(self) -> bool:
        """Return True after `cancel`."""
        return self.ended


class Timer(msgspec.Struct, eq=False):
    """Callback of a later time, with the interface of asyncio.TimerHandle.

    call: the callback and its arguments. due: loop time in seconds.
    """

    context: Context
    call: tuple[Any, ...]
    due: float
    ended: bool = False
    """True if it was cancelled."""

    def when(self) -> float:
        """Return the time in seconds at which the callback is due."""
        return self.due

    def cancel(self) -> None:
        """Prevent the callback from running."""
        if not self.ended:
            self.ended = True
            self.call = ()  # it may refer to large objects

    def cancelled(self) -> bool:
        """Return True after `cancel`."""
        return self.ended
