"""Work that must not block the event loop: in a thread, or in parts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Hashable, Iterator
from typing import Any, Generic, Protocol, TypeVar

Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)

Work = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function where computation is allowed: in a thread, or in a simulation at once or later."""

WORTH = 1 << 18
"""Smallest number of bytes that is given to a thread: their cipher and hash take longer than that."""


class Workers(Protocol):
    """Threads, such as those of a ThreadPoolExecutor."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> object:
        """Run a function in a thread as soon as one is free."""
        ...


async def at_once(function: Callable[[], Any]) -> Any:
    """Run the function at once: `Work` of a caller with nothing else on its event loop."""
    return function()


class OrderedWork:
    """Functions that run one after the other in threads; the event loop gets their results in order.

    Two functions of one object never run at the same time, so data that only they use needs no lock. `failed` receives the
    first exception of a function, or of the code that takes its result; after that no more results are delivered. Functions on
    less than WORTH bytes run on the event loop, unless others are ahead of them. workers: None: all run there, at once.
    """

    def __init__(self, workers: Workers | None, failed: Callable[[Exception], None]) -> None:
        self.held = 0
        """Bytes of the functions whose results were not delivered."""
        self._workers, self._failed = workers, failed
        self._loop = asyncio.get_running_loop()
        # The first one is in a thread.
        self._jobs: deque[tuple[Callable[[], Any], Callable[[Any], None], int]] = deque()
        self._closed = False
        self._finally: Callable[[], None] | None = None

    @property
    def busy(self) -> bool:
        """True if a function is in a thread."""
        return bool(self._jobs)

    def takes(self, size: int) -> bool:
        """Return True if a function on `size` bytes would go to a thread now."""
        return self._workers is not None and (size >= WORTH or bool(self._jobs))

    def run(self, function: Callable[[], Result], done: Callable[[Result], None], size: int) -> None:
        """Run a function on `size` bytes, then pass its result to `done` on the event loop.

        Ignored once closed.
        """
        if self._closed:
            return
        if not self.takes(size):
            self._deliver(function, done)
            return
        self._jobs.append((function, done, size))
        self.held += size
        if len(self._jobs) == 1:
            self._submit()

    def finish(self, then: Callable[[], None]) -> None:
        """Call `then` once all results are delivered, or never if they are not."""
        self.run(_nothing, lambda result: then(), 0)

    def close(self, then: Callable[[], None]) -> None:
        """Deliver no more results; call `then` as soon as no function is in a thread."""
        self._closed = True
        while len(self._jobs) > 1:
            self._jobs.pop()
        if self._jobs:
            self._finally = then
        else:
            then()

    def _submit(self) -> None:
        assert self._workers is not None
        function = self._jobs[0][0]
        try:
            self._workers.submit(self._work, function)
        except RuntimeError:  # the process ends, and Python starts no thread then
            self._loop.call_soon(self._work, function)

    def _work(self, function: Callable[[], Any]) -> None:
        """Run a function in a thread."""
        try:
            result = function()
        except Exception as error:
            self._report(_raiser(error))
        else:
            self._report(lambda: result)

    def _report(self, outcome: Callable[[], Any]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._ended, outcome)
        except RuntimeError:  # the event loop is closed
            return

    def _ended(self, outcome: Callable[[], Any]) -> None:
        _, done, size = self._jobs.popleft()
        self.held -= size
        if self._jobs:
            self._submit()  # first, so that the thread works while the result is used here
        if not self._closed:
            self._deliver(outcome, done)
        if self._closed and not self._jobs and self._finally is not None:
            then, self._finally = self._finally, None
            then()

    def _deliver(self, outcome: Callable[[], Result], done: Callable[[Result], None]) -> None:
        try:
            done(outcome())
        except Exception as error:
            self._closed = True
            self._failed(error)


class LatestWork(Generic[Key]):
    """Functions that run one after the other where computation is allowed, at most one for each key.

    The result of a function is ignored if its key was dropped, or has another function by then. `failed` receives the first
    exception of a function, or of the code that takes its result.
    """

    def __init__(self, work: Work, failed: Callable[[Exception], None]) -> None:
        self._work, self._failed = work, failed
        self._due: dict[Key, tuple[Callable[[], Any], Callable[[Key, Any], None]]] = {}
        self._task: asyncio.Task[None] | None = None

    def __contains__(self, key: Key) -> bool:
        return key in self._due

    def __iter__(self) -> Iterator[Key]:
        return iter(tuple(self._due))

    def run(self, key: Key, function: Callable[[], Result], done: Callable[[Key, Result], None]) -> None:
        """Queue a function; `done` takes the key and its result on the event loop."""
        self._due[key] = function, done
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._drain())

    def clear(self) -> None:
        """Drop all functions."""
        self._due.clear()

    async def _drain(self) -> None:
        try:
            while self._due:
                key, job = next(iter(self._due.items()))
                made = await self._work(job[0])
                if self._due.get(key) is job:
                    del self._due[key]
                    job[1](key, made)
        except Exception as error:
            self._failed(error)
        finally:
            self._task = None


def _nothing() -> None:
    pass


def _raiser(error: Exception) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it


RATE = 1000.0
"""Units of rationed work a second, all jobs together: some 15 % of a core."""

BURST = 512.0
"""Units that may be done at once after a pause: 75 ms."""

MAX_WAITING = 16 << 20
"""Most bytes of data that rationed jobs wait with."""


class JobPart(Protocol):
    """Next part of a job. `cost`: in units of one check of a signature (0.15 ms), as of now."""

    @property
    def cost(self) -> float:
        """Cost of the part."""
        ...


class SharedWork(Generic[Result]):
    """Work in parts that several may need: each of them does the next part, and all get the result.

    `job` yields the cost of each part before it does that part.
    """

    def __init__(self, job: Generator[float, None, Result]) -> None:
        self.cost = 0.0
        """Cost of the next part; 0 at the end."""
        self.done = False
        self._job = job
        self._advance()

    @property
    def result(self) -> Result:
        """Result; only when `done`."""
        return self._result

    def parts(self) -> Generator[JobPart, None, Result]:
        """Do what is left to do, part by part; return the result."""
        while not self.done:
            yield self
            if not self.done:
                self._advance()
        return self._result

    def _advance(self) -> None:
        try:
            self.cost = next(self._job)
        except StopIteration as end:
            self.cost, self.done = 0.0, True
            self._result: Result = end.value


def finish(parts: Generator[JobPart, None, Result]) -> Result:
    """Do all parts of a job; return the result."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: Result = end.value
            return result


async def in_turns(parts: Generator[JobPart, None, Result], turn: Callable[[], None] = lambda: None) -> Result:
    """Do all parts of a job; after each BURST call `turn` and let other tasks of the event loop run."""
    spent = 0.0
    while True:
        try:
            part = next(parts)
        except StopIteration as end:
            result: Result = end.value
            return result
        spent += part.cost
        if spent > BURST:
            spent = part.cost
            turn()
            await asyncio.sleep(0)


class RationedWork:
    """Work on what other peers send, in parts, on the event loop, with a limited share of its time.

    A job yields each part before it does that part. All jobs share one budget. The next part is one of the owner with the least
    cost so far, that part included, so a peer that sends much, even over many connections, delays others little.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._budget, self._ran_at = now, BURST, now()
        self._jobs: dict[tuple[bytes, Hashable], tuple[JobPart, int, Generator[JobPart, None, None]]] = {}
        """By owner and name: the next part, size of the data, and the job."""
        self._used: dict[bytes, float] = {}
        """Cost of each owner's parts since the last time when no job waited."""

    def holds(self, owner: bytes, name: Hashable) -> bool:
        """Return True if a job is not done yet."""
        return (owner, name) in self._jobs

    def add(self, owner: bytes, name: Hashable, size: int, job: Generator[JobPart, None, None]) -> bool:
        """Accept a job with `size` bytes of data; return False if it is refused.

        A job is refused if the last one of this name is not done, or if too much data waits and no other job is larger.
        Otherwise the largest job is dropped if too much data waits.
        """
        if self.holds(owner, name):
            return False
        if sum(one[1] for one in self._jobs.values()) + size > MAX_WAITING:
            largest = max(self._jobs, key=lambda key: self._jobs[key][1])
            if self._jobs[largest][1] <= size:
                return False
            del self._jobs[largest]
        if (part := next(job, None)) is not None:
            self._jobs[owner, name] = part, size, job
        return True

    def drop(self, owner: bytes) -> None:
        """Forget the jobs of an owner."""
        self._jobs = {key: job for key, job in self._jobs.items() if key[0] != owner}

    def run(self) -> None:
        """Do as much as the budget allows."""
        before, self._ran_at = self._ran_at, self._now()
        self._budget = min(BURST, self._budget + RATE * (self._ran_at - before))
        while self._jobs and self._budget > 0:
            key = min(self._jobs, key=lambda key: self._used.get(key[0], 0.0) + self._jobs[key][0].cost)
            part, size, job = self._jobs[key]
            cost = part.cost  # Another job may have done this part.
            self._budget -= cost
            self._used[key[0]] = self._used.get(key[0], 0.0) + cost
            due = next(job, None)
            # The part may have ended the link of its owner, and so dropped the job.
            if due is None:
                self._jobs.pop(key, None)
            elif key in self._jobs:
                self._jobs[key] = due, size, job
        if not self._jobs:
            self._used.clear()
