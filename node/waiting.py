"""Ways of waiting that asyncio does not have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from thinwire.collectives.aside import Work, at_once

__all__ = ["Result", "Work", "at_once", "cancelled", "whole"]

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
    """Cancel a task and wait for its end. Its errors are of no interest any more; what ends the process is raised."""
    task.cancel()
    await asyncio.wait([task])
    failure = None if task.cancelled() else task.exception()
    if failure is not None and not isinstance(failure, Exception):
        raise failure
