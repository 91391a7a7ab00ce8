"""Two ways of waiting for a task that asyncio does not have."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def whole(work: Awaitable[Result]) -> Result:
    """Await something to its end even when cancelled meanwhile; the cancellation is raised afterwards."""
    job = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        if not job.done():
            await asyncio.wait([job])
        if not job.cancelled():
            job.exception()  # looked at; the cancellation is what is raised
        raise


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end, however it ends."""
    task.cancel()
    with contextlib.suppress(BaseException):
        await task
