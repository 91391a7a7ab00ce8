"""Virtual time: an asyncio event loop whose clock advances only when no callback is ready.

Everything that could make a run differ from its repetition is either drawn from the seed or refused: threads, sockets,
name resolution, signals. The order of callbacks that are ready at the same moment is random on purpose (a real network
gives no order either), so that one test with many seeds explores many schedules. It depends only on the seed, the moment and
the callbacks of this moment: a callback more or less at an earlier moment does not change it.
"""

from __future__ import annotations

import asyncio
import gc
import struct
import threading
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from functools import cache, partial
from typing import Any, NoReturn, TypeVar, TypeVarTuple, Unpack

from blake3 import blake3
from thinwire.sims.engine.loop_handles import Handle, Timer
from thinwire.sims.engine.timers import Timers

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

WINDOW = 1e-3
"""Virtual seconds within which at most `max_callbacks` callbacks may run."""

RARE = (20_000_000, 1000, 20)
"""Thresholds of Python's cyclic garbage collector during a simulation.

Nearly all objects that a simulation creates either stay alive or are freed without it: only simulated processes that have ended
leave reference cycles, see `SimWorld.booted`. Among a thousand peers, a look at all objects takes seconds.
"""

EVENTS = 1 << 16
"""Bytes of trace events that are buffered before they are hashed together."""

DRAW_FACTOR, DRAW_SUMMAND, DRAW_MASK = 6364136223846793005, 1442695040888963407, (1 << 64) - 1
"""Linear congruential generator that draws the order of callbacks (Knuth's MMIX).

The highest bits are used. It starts from the seed and the time at each moment that has several callbacks; to seed a better
generator takes microseconds.
"""

HOST: ContextVar[object] = ContextVar("HOST", default=None)
"""Simulated process that runs: set in the context of a peer's first task, inherited by all its tasks.

See `SimLoop.freeze`.
"""


@cache
def _lengths(parts: int) -> struct.Struct:
    return struct.Struct(f"<dH{parts}I")


class SimFailure(Exception):
    """Error in the simulated program: an exception in a callback, or one of the failures below."""


class Deadlock(SimFailure):
    """Failure: nothing is scheduled, and the main coroutine still waits."""


class Livelock(SimFailure):
    """Failure: too many callbacks ran in one virtual millisecond."""


class Overtime(SimFailure):
    """Failure: the main coroutine did not finish within its limit of virtual seconds."""


class SimTask(asyncio.Task[Any]):
    """Task with a number as its hash.

    asyncio cancels the tasks of a TaskGroup in the order of a set. With addresses as hashes that order would depend on
    the history of the process.
    """

    def __init__(self, number: int, *given: Any, **options: Any) -> None:
        self._number = number
        super().__init__(*given, **options)

    def __hash__(self) -> int:
        return self._number


def _never_retrieved(task: asyncio.Task[Any]) -> bool:
    """Return True if a task has failed and its exception was never retrieved."""
    return task.done() and not task.cancelled() and bool(getattr(task, "_log_traceback", False))


class SimLoop(asyncio.AbstractEventLoop):
    """Event loop in virtual time, starting at 0 seconds.

    explore: run a random ready callback instead of the oldest. max_callbacks: how many may run within one virtual
    millisecond. The parts of AbstractEventLoop that are not implemented (sockets, name resolution, subprocesses,
    signals) raise NotImplementedError, as is intended here.
    """

    def __init__(self, seed: int, *, explore: bool = True, max_callbacks: int = 1_000_000) -> None:
        self.now = 0.0
        """Virtual seconds, the value of `time`; read only."""
        self.failure: BaseException | None = None
        self._seed = seed
        # Attributes: functions in C take a third of the time of a method that calls them.
        self.create_future: Callable[[], asyncio.Future[Any]] = partial(asyncio.Future, loop=self)
        self._explore = explore
        self._max_callbacks = max_callbacks
        # Any: it is a Handle or a Timer.
        self._ready: list[Any] = []
        self._timers = Timers()
        self._thread = threading.get_ident()
        self._trace = blake3()
        self._events = bytearray()
        self._frozen: dict[object, list[Any]] = {}
        self._closed = False
        # Strong references in order of creation: asyncio holds only a weak set, whose order depends on addresses.
        self._tasks: list[asyncio.Task[Any]] = []
        self._prune_at = 256
        self._created = 0

    # --- what the simulation adds

    def record(self, *parts: bytes) -> None:
        """Add an event to the trace, with the current time."""
        lengths = _lengths(len(parts)).pack(self.now, len(parts), *map(len, parts))
        self._events += b"".join((lengths, *parts))
        if len(self._events) > EVENTS:
            self._hash_events()

    def _hash_events(self) -> None:
        self._trace.update(self._events)
        self._events.clear()

    @property
    def trace(self) -> str:
        """blake3 hash (hex) of all events so far; equal in a repeated run with the same seed."""
        self._hash_events()
        return str(self._trace.hexdigest())

    def freeze(self, host: object) -> None:
        """Stop a host until `thaw`, like a stopped process: its timers expire, but its callbacks do not run."""
        self._frozen.setdefault(host, [])

    def thaw(self, host: object) -> None:
        """Let a host run again; its pending callbacks are ready at once. No effect if it was not frozen."""
        self._ready += self._frozen.pop(host, [])

    def drive(self, until: asyncio.Future[Any], limit: float) -> None:
        """Run callbacks until `until` is done. Raises a SimFailure."""
        ready, near, frozen = self._ready, self._timers.near, self._frozen
        seed, explore = self._seed, self._explore
        now, window, ran, most = self.now, self.now + WINDOW, 0, self._max_callbacks
        drawn, moment = 0, -1.0
        while not until.done():
            if not ready:
                if near and not near[0][2].ended and now < near[0][0] <= limit:
                    self.now = now = near[0][0]  # as `_advance` does, without calls in the usual case
                else:
                    now = self._advance(limit)
                if now > window:
                    window, ran = now + WINDOW, 0
            while near and near[0][0] <= now:
                timer = near.popleft()[2]
                if not timer.ended:
                    ready.append(timer)
            ran += 1
            if ran > most:
                self._give_up(Livelock(f"{most} callbacks ran at {now:.6f} s"))
            if len(ready) == 1:
                handle = ready.pop()
            elif not explore:
                handle = ready.pop(0)
            else:
                if now != moment:
                    drawn, moment = hash((seed, now)), now
                drawn = (drawn * DRAW_FACTOR + DRAW_SUMMAND) & DRAW_MASK
                pick = (drawn >> 33) * len(ready) >> 31
                ready[pick], ready[-1] = ready[-1], ready[pick]
                handle = ready.pop()
            if handle.ended:
                continue
            if frozen and (host := handle.context.get(HOST)) in frozen:
                frozen[host].append(handle)
                continue
            try:  # as asyncio.Handle._run, without a call: there is no debug mode here
                handle.context.run(*handle.call)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"exception": error})
            if self.failure is not None:
                raise SimFailure(f"unhandled exception in a callback: {self.failure!r}") from self.failure

    def _advance(self, limit: float) -> float:
        """Advance to the time of the next timer, since nothing is ready. Returns it."""
        when = self._timers.next()
        if when is None:
            self._give_up(Deadlock(f"nothing is scheduled at {self.now:.6f} s"))
        if when > limit:
            self._give_up(Overtime(f"not done after {limit} virtual seconds"))
        if when > self.now:
            self.now = when
        return self.now

    def _give_up(self, failure: SimFailure) -> NoReturn:
        raise failure from self._unretrieved_error()

    def _unretrieved_error(self) -> BaseException | None:
        """Return the exception of a finished task that was never retrieved, often the cause of a deadlock."""
        for task in self._tasks:
            if _never_retrieved(task):
                return task.exception()
        return None

    def cancel_leftovers(self) -> BaseException | None:
        """Cancel every unfinished task and wait for it. Returns an exception that was never retrieved.

        Repeats until no task is left, including tasks started meanwhile; a remaining task would be collected as garbage
        during a later simulation.
        """
        while leftovers := [task for task in self._tasks if not task.done()]:
            for task in leftovers:
                task.cancel()
            for task in leftovers:
                self.drive(task, self.now + 60.0)
        return self._unretrieved_error()

    # --- what asyncio needs

    def time(self) -> float:
        return self.now

    # The callback is one of `call`, which saves every handle a tuple.

    def call_soon(self, *call: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        if self._closed:
            self._check()
        handle = Handle(copy_context() if context is None else context, call)
        self._ready.append(handle)
        return handle  # type: ignore[return-value]  # it has the interface

    def call_soon_threadsafe(self, *call: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        self._check()
        return self.call_soon(*call, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, *call: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self._plan(self.now + delay, call, context)

    def call_at(  # type: ignore[override]
        self, when: float, *call: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self._plan(when, call, context)

    def _plan(self, when: float, call: tuple[Any, ...], context: Context | None) -> asyncio.TimerHandle:
        if self._closed:
            self._check()
        if when != when:
            raise ValueError("a timer cannot be set to NaN")
        timer = Timer(copy_context() if context is None else context, call, when)
        self._timers.add(timer)
        return timer  # type: ignore[return-value]  # it has the interface

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("the simulated loop is closed")
        if threading.get_ident() != self._thread:
            raise RuntimeError("a simulation has one thread: its order would not be reproducible otherwise")

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None, **options: Any
    ) -> asyncio.Task[Any]:
        self._check()
        if len(self._tasks) > self._prune_at:
            self._tasks = [task for task in self._tasks if not task.done() or _never_retrieved(task)]
            self._prune_at = 2 * len(self._tasks) + 256
        self._created += 1
        task = SimTask(self._created, coro, loop=self, name=name, context=context, **options)
        self._tasks.append(task)
        return task

    def run_in_executor(self, executor: object, func: Callable[[Unpack[Ts]], T], *args: *Ts) -> asyncio.Future[T]:
        raise RuntimeError("no threads in a simulation: pass a function that takes virtual time instead")

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.failure is None:
            self.failure = context.get("exception") or RuntimeError(str(context.get("message")))

    # Returns False: each new future asks, and a built-in type answers sooner than a method.
    get_debug = staticmethod(bool)

    def is_running(self) -> bool:
        return asyncio._get_running_loop() is self

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        self._tasks.clear()


def current() -> SimLoop:
    """Return the running SimLoop. Raises RuntimeError outside of a simulation."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, SimLoop):
        raise RuntimeError("not inside a simulation")
    return loop


def run(
    main: Coroutine[Any, Any, T],
    *,
    seed: int,
    limit: float = 3600.0,
    explore: bool = True,
    max_callbacks: int = 1_000_000,
) -> T:
    """Run `main` on a fresh SimLoop and return its result.

    limit: maximum of virtual seconds. Tasks that it leaves behind are cancelled. Raises the exception of `main`, or a
    SimFailure for a deadlock, livelock, overrun, or an unhandled exception in a callback or another task.
    """
    if asyncio._get_running_loop() is not None:
        main.close()
        raise RuntimeError("a simulation cannot run inside a running event loop")
    # The world of the run before is in reference cycles. The collector counts its objects, few among those of the imported
    # modules, and not its arrays, so without this the worlds of many runs would wait for it.
    gc.collect(1)
    loop = SimLoop(seed, explore=explore, max_callbacks=max_callbacks)  # type: ignore[abstract]  # missing methods raise
    asyncio._set_running_loop(loop)
    thresholds = gc.get_threshold()
    gc.set_threshold(*RARE)
    gc.freeze()
    try:
        task = loop.create_task(main, name="main")
        try:
            loop.drive(task, limit)
            result: T = task.result()
        except BaseException:
            loop.failure = None
            try:
                loop.cancel_leftovers()
            except SimFailure:
                pass  # the first failure is the one to report
            raise
        failed = loop.cancel_leftovers()
        if failed is not None:
            raise SimFailure(f"a task failed and its exception was never retrieved: {failed!r}") from failed
        return result
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        asyncio._set_running_loop(None)
        loop.close()
