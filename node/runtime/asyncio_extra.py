"""Waiting functions that asyncio lacks, and a report of errors that it only prints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Any, TypeAlias, TypeVar

from thinwire.collectives.blocking_work import Work, at_once

__all__ = ["ErrorHandler", "Result", "Work", "at_intervals", "at_once", "cancelled", "stray_errors", "uninterrupted"]

Result = TypeVar("Result")

ErrorHandler: TypeAlias = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]
"""Exception handler of an event loop."""

MOST_STRAY = 64
"""Different errors that a process reports."""


def stray_errors(logger: logging.Logger, alarm: Callable[[str], None]) -> ErrorHandler:
    """Return a handler of errors that reach no caller, such as those of callbacks.

    Each different error is logged once, with its traceback. `alarm` gets a text about an error of our own: without it the
    part of the process that has failed would stop unnoticed. Errors of the system, such as those of sockets, are only
    logged: other machines cause them.
    """
    known = set[str]()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        text = str(context["message"]) if error is None else f"{type(error).__name__}: {error}"
        if text in known or len(known) >= MOST_STRAY:
            return
        known.add(text)
        logger.error("%s", context["message"], exc_info=error)
        if isinstance(error, Exception) and not isinstance(error, OSError):
            alarm(
                f"internal error: {text}; this peer may not work until it is restarted; the log file has the traceback"
            )

    return handle


async def at_intervals(seconds: float, function: Callable[[], object]) -> None:
    """Call a function at regular intervals until cancelled, first after one interval.

    Raises the exception of the function. Timers call it: a task that sleeps takes more than twice as long, mostly to be woken.
    """
    loop, context = asyncio.get_running_loop(), copy_context()  # A timer without a context would copy it at each call.
    failure: asyncio.Future[None] = loop.create_future()
    timer: asyncio.TimerHandle

    def call() -> None:
        nonlocal timer
        if failure.done():  # cancelled, but not yet awake
            return
        try:
            function()
        except Exception as error:
            failure.set_exception(error)
        else:
            timer = loop.call_later(seconds, call, context=context)

    timer = loop.call_later(seconds, call, context=context)
    try:
        await failure
    finally:
        timer.cancel()


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
