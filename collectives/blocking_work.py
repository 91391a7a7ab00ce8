"""Work that must not block the event loop: how a caller passes it to a thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

Work = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function where computation is allowed: in a thread, or in a simulation at once or later."""


async def at_once(function: Callable[[], Any]) -> Any:
    """Run the function at once: `Work` of a caller with nothing else on its event loop."""
    return function()
