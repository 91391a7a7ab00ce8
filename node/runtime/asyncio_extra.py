"""Waiting functions that asyncio lacks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from thinwire.collectives.blocking_work import Work, at_once

__all__ = ["Result", "Work", "at_once", "cancelled", "uninterrupted"]

Result = TypeVar("Result")


async def uninterrupted(work: Awaitable[Result]) -> Result:
    """Await `work` to its end even if cancelled meanwhile; raise the cancellation afterwards."""
    job = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        if not job.done():
            await asyncio.wait([job])
        if not job.cancelled():
            job.exception()  # mark the exception as retrieved; the cancellation is raised
        raise


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end. Ignore its errors, except those that end the process."""
    task.cancel()
    await asyncio.wait([task])
    failure = None if task.cancelled() else task.exception()
    if failure is not None and not isinstance(failure, Exception):
        raise failure
