"""Computing that the event loop must not wait for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

Work = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function where computing is allowed: in a thread in life, at once or later in a simulation."""


async def at_once(function: Callable[[], Any]) -> Any:
    """The Work of who has nothing else to do meanwhile."""
    return function()
