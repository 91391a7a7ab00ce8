"""Handles of a simulated loop: asyncio's own, constructed in fewer steps.

Nearly all of a simulation's work consists of such callbacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any


class Handle(asyncio.Handle):
    """asyncio.Handle without the traces of debug mode, which take longer than everything else."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], loop: Any, context: Context | None
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None


class Timer(asyncio.TimerHandle):
    """asyncio.TimerHandle without traces, like `Handle`. `_scheduled` is true while it is in the heap."""

    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: Any,
        context: Context | None,
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop, self._callback, self._args, self._when = loop, callback, args, when
        self._cancelled, self._repr, self._source_traceback, self._scheduled = False, None, None, True

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._callback = self._args = None  # type: ignore[assignment]  # they may refer to large objects
            if self._scheduled:
                self._loop._timer_handle_cancelled(self)
