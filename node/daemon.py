"""The daemon: one process that is one peer. Gives a Life what it needs of the world: signals, a worker thread, a terminal."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from thinwire.compression.warmup import warm_up
from thinwire.swarm.manifest import Manifest

from .books import Books
from .config import Config
from .console import LOGGER, log_style, set_up_logging
from .device import choose_device
from .learner import Learner
from .life import Life
from .lock import hold
from .opening import Entry, arriving, founding
from .options import Options
from .peer import Peer
from .training import prepare
from .waiting import cancelled

SIGNALS = (signal.SIGINT, signal.SIGTERM)

Result = TypeVar("Result")


def start(run: Path, config: Config, options: Options) -> int:
    """`thinwire start`: found a run, or come back to it. Returns the exit code."""
    if options.local:
        from .local import start_local

        return start_local(run, config, options)
    return _run(founding(run.read_bytes(), config, run.name), options, here=run.parent)


def join(invite: str, config: Config, options: Options) -> int:
    """`thinwire join`: become a peer of the swarm an invite names. Returns the exit code."""
    return _run(arriving(invite, config, options.search), options, here=Path.cwd())


def _run(entry: Entry, options: Options, *, here: Path) -> int:
    daemon, directories = Daemon(entry, options, here=here), entry.config.directories
    set_up_logging(log_style(options.log), directories.log, debug=options.debug)
    with hold(directories.lock):
        if sys.platform == "win32":
            return asyncio.run(daemon.run())
        import uvloop

        return uvloop.run(daemon.run())


class Daemon:
    """See the module. `here` is the directory in which files named by the manifest are looked for."""

    def __init__(self, entry: Entry, options: Options, *, here: Path) -> None:
        self._entry, self._options, self._here = entry, options, here
        self._device = choose_device(entry.config.device)
        self._worker = ThreadPoolExecutor(1, "compute")

    async def run(self) -> int:
        """Until the run's last round, a signal, or an error. Returns the exit code."""
        loop, options = asyncio.get_running_loop(), self._options
        books = Books(self._entry.config, self._entry.run_id, self._device)
        peer = self._entry.peer(books.report.emit)
        life = Life(
            peer,
            books.report,
            begin=self._begin,
            learn=self._learn,
            work=self._work,
            wait_for=options.wait_for,
            rounds=options.rounds,
            invited=lambda code: print(f"thinwire join {code}", flush=True),
        )

        def signalled(number: int) -> None:
            if life.stopping:
                os._exit(128 + number)
            LOGGER.warning("stopping after this round; once more to stop at once")
            life.stop()

        for number in SIGNALS:
            loop.add_signal_handler(number, signalled, number)
        teller = asyncio.create_task(books.keep_telling(peer))
        try:
            await life.run()
            return 0
        finally:
            await cancelled(teller)
            books.tell(peer)
            books.close()
            self._worker.shutdown(cancel_futures=True)
            for number in SIGNALS:
                # What is left takes a moment, and the exit code is settled: a first signal in it changes nothing any more.
                loop.remove_signal_handler(number)
                signal.signal(number, lambda number, _: signalled(number))

    async def _work(self, function: Callable[[], Result]) -> Result:
        """Run where computing is allowed: in the one worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

    async def _begin(self, peer: Peer) -> bool:
        await self._work(warm_up)
        return await self._entry.begin(peer)

    async def _learn(self, manifest: Manifest) -> Learner:
        config = self._entry.config
        return await self._work(
            lambda: prepare(
                manifest,
                data=config.data,
                device=self._device,
                threads=config.threads,
                cache=config.directories.cache,
                here=self._here,
                clock=time.perf_counter,
                place=self._options.place,
                work=self._work,
            )
        )
