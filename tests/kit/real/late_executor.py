"""Executor and `Work` for tests: functions run when the test asks for it, one at a time."""

import asyncio
import random
import threading
from concurrent.futures import Executor, Future


class LateExecutor(Executor):
    """Holds functions back until `run` or `run_all`; an `eager` one starts each at once, after those before it."""

    def __init__(self, seed=0, *, eager=False):
        self.waiting = []
        self.eager = eager
        self._rng = random.Random(seed)

    def submit(self, function, /, *arguments, **options):
        future = Future()
        self.waiting.append((future, function, arguments, options))
        if self.eager:
            self.run()
        return future

    def run(self):
        """Run one of the waiting functions, drawn at random, to its end."""
        future, function, arguments, options = self.waiting.pop(self._rng.randrange(len(self.waiting)))
        thread = threading.Thread(target=lambda: future.set_result(function(*arguments, **options)))
        thread.start()
        thread.join()

    def run_all(self):
        """Run all waiting functions in random order."""
        while self.waiting:
            self.run()


class LateWork:
    """`Work` that computes one function at each `go`."""

    def __init__(self):
        self.waiting = []

    async def __call__(self, function):
        self.waiting.append(asyncio.get_running_loop().create_future())
        await self.waiting[-1]
        return function()

    async def go(self):
        """Compute, and let the caller use the result."""
        self.waiting.pop(0).set_result(None)
        for _ in range(3):
            await asyncio.sleep(0)
