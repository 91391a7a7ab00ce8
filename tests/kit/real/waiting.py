"""Waiting for real processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

CAP = 100.0
"""Seconds after which something missing counts as a failure; a generous multiple of the usual time."""

Found = TypeVar("Found")


def until(
    what: str, found: Callable[[], Found], *, seconds: float = CAP, state: Callable[[], object] = lambda: ""
) -> Found:
    """Return the first true value of `found()`. Fail after `seconds`; the error has `what`, and the state."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, f"never: {what} {state()}"
        time.sleep(0.05)
    return value
