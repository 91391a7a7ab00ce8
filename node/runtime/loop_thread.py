"""An event loop in a separate thread, for a caller without one.

Calls wait, can be interrupted, and never hang.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

from thinwire.node.runtime.asyncio_extra import ErrorHandler, uninterrupted
from thinwire.swarm.identity.errors import HintedError

Result = TypeVar("Result")

LOOK_SECONDS = 0.5
"""Seconds between a waiting caller's checks that the thread is still alive."""


class SwarmError(HintedError):
    """The swarm's part of this process has failed or ended."""

    exit_code: ClassVar[int] = 1


class LoopThread:
    """A thread with an event loop, and one more thread that computes for it while the caller waits.

    The second thread touches the caller's parameters only while the caller waits in `call`; when `call` returns or
    raises, only computations that were deliberately left running continue, and they do not touch the parameters.
    """

    def __init__(self, name: str) -> None:
        self._loop = _new_loop()
        self._worker = ThreadPoolExecutor(1, f"{name}-compute")
        self._calls: set[asyncio.Task[Any]] = set()
        self._started: set[concurrent.futures.Future[Any]] = set()
        self._failure: BaseException | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except BaseException as error:
            self._failure = self._failure or error
        finally:
            self._cancel_started()
            # Here, because the thread that calls `stop` may have a running loop (a notebook).
            self._loop.run_until_complete(_cancel_others())

    def _cancel_started(self) -> None:
        for result in list(self._started):
            result.cancel()

    # --- from the caller's thread

    def on_stray_errors(self, handler: ErrorHandler) -> None:
        """Pass errors on the loop that reach no caller to `handler`."""
        self._loop.set_exception_handler(handler)

    def check(self) -> None:
        """Raise a background failure, if any: an error with a hint, or SwarmError."""
        failure = self._failure
        while isinstance(failure, BaseExceptionGroup) and len(failure.exceptions) == 1:
            failure = failure.exceptions[0]  # a TaskGroup wraps its first failure
        if isinstance(failure, HintedError):
            raise failure
        if failure is not None:
            raise SwarmError(
                f"the swarm's thread failed: {type(failure).__name__}: {failure}",
                "please report this error with the traceback",
            ) from failure
        if os.getpid() != self._process:
            raise SwarmError(
                "this process is a fork of the one that joined the swarm, and has no peer",
                "call the swarm only in the process that called thinwire.join",
            )
        if not self._thread.is_alive():
            raise SwarmError("this peer has left the swarm", "call thinwire.join again to continue")

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run on the loop and wait for the result.

        An exception that interrupts the wait (Ctrl-C) cancels the work, waits until it has ended, and is raised.
        """
        try:
            self.check()
        except BaseException:
            work.close()
            raise
        return self._call(work)

    def last_call(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """Run `work` like `call`, but also after a failure, for clean-up. Return None if the thread has ended."""
        if not self._thread.is_alive():
            work.close()
            return None
        return self._call(work)

    def start(self, work: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        """Start work on the loop without waiting.

        Cancelling the result cancels the work; a failure, or the thread's end, cancels both.
        """
        try:
            self.check()
        except BaseException:
            work.close()
            raise
        result = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._started.add(result)
        result.add_done_callback(self._started.discard)
        # it may have failed meanwhile, too late for its clean-up to see this result
        if self._failure is not None or not self._thread.is_alive():
            result.cancel()
        return result

    @property
    def started(self) -> int:
        """Number of started works that have not ended."""
        return len(self._started)

    def wait(self, result: concurrent.futures.Future[Any], timeout: float | None = None) -> bool:
        """Wait for a started work, at most `timeout` seconds; return whether it has ended.

        Raises what `check` raises.
        """
        left = timeout if timeout is not None else math.inf
        while left >= 0 and not concurrent.futures.wait([result], timeout=min(LOOK_SECONDS, left)).done:
            self.check()
            left = left - LOOK_SECONDS if left > LOOK_SECONDS else -1.0
        return result.done()

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        result: concurrent.futures.Future[Result] = concurrent.futures.Future()
        begun: list[asyncio.Task[Result]] = []

        def begin() -> None:
            task = self._loop.create_task(work)
            begun.append(task)
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            task.add_done_callback(lambda done: _hand_over(done, result))

        def cancel() -> None:
            if begun:
                begun[0].cancel()
            else:  # interrupted before it started
                work.close()
                result.set_exception(concurrent.futures.CancelledError())

        try:
            self._loop.call_soon_threadsafe(begin)
            self._wait(result)
        except BaseException:
            if not result.done() and self._thread.is_alive():
                self._loop.call_soon_threadsafe(cancel)
                self._wait(result)
            raise
        try:
            return result.result()
        except concurrent.futures.CancelledError:
            self.check()
            raise SwarmError("the swarm's work was cancelled") from None

    def _wait(self, result: concurrent.futures.Future[Any]) -> None:
        while not concurrent.futures.wait([result], timeout=LOOK_SECONDS).done:
            if not self._thread.is_alive():
                self.check()

    def ask(self, function: Callable[[], Result]) -> Result:
        """Return the result of a quick function, computed on the loop's thread, where its objects may be used."""

        async def answer() -> Result:
            return function()

        return self.call(answer())

    def stop(self) -> None:
        """End both threads and cancel everything that still runs on the loop."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()
        self._worker.shutdown(cancel_futures=True)

    # --- on the loop

    def fail(self, error: BaseException) -> None:
        """Note the end of something that should have continued: present and later callers get the error."""
        self._failure = self._failure or error
        for task in self._calls:
            task.cancel()
        self._cancel_started()

    async def work(self, function: Callable[[], Result]) -> Result:
        """Run in the computing thread.

        If cancelled, still wait for the function's end, so that nothing computes unnoticed.
        """
        return await uninterrupted(asyncio.get_running_loop().run_in_executor(self._worker, function))


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _hand_over(done: asyncio.Task[Result], result: concurrent.futures.Future[Result]) -> None:
    if done.cancelled():
        result.set_exception(concurrent.futures.CancelledError())
        return
    error = done.exception()
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(done.result())


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
