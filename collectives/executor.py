"""Execution of computations that must not block the event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

Work = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function where computation is allowed: in a thread, or in a simulation at once or later."""


async def at_once(function: Callable[[], Any]) -> Any:
    """Run the function at once, as the Work of a caller that has nothing else to do."""
    return function()
