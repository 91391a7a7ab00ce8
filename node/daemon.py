"""The daemon: one process that is one peer. Gives a Life what it needs of the world: signals, a worker thread, a terminal."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from thinwire.compression.warmup import warm_up
from thinwire.swarm.manifest import Manifest

from .books import Books
from .config import Config
from .console import LOGGER, log_style, set_up_logging
from .data import Batches
from .device import choose_device
from .learner import Learner
from .life import Life
from .lock import hold
from .opening import Entry, arriving, founding
from .options import Options
from .peer import Peer
from .pipeline.arrival import seat
from .pipeline.group import held_of, learner
from .tokenizer import load_tokenizer
from .training import batches_of, prepare
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
        peer = self._peer = self._entry.peer(books.report.emit)
        self._report = books.report
        life = Life(
            peer,
            books.report,
            begin=self._begin,
            learn=self._learn,
            work=self._work,
            wait_for=options.wait_for,
            rounds=options.rounds,
            held=held_of,
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
        config, options = self._entry.config, self._options
        if options.memory is not None or options.stage is not None:
            staged = await self._stage(manifest)
            if staged is not None:
                return staged
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

    async def _stage(self, manifest: Manifest) -> Learner | None:
        """What we train as one of several that hold the model together; None where all of it fits."""
        config, options, peer = self._entry.config, self._options, self._peer
        read = partial(load_tokenizer, manifest.data.tokenizer, self._here, manifest.data.tokenizer_hash)
        tokenizer = await self._work(read)
        limit = math.inf if options.memory is None else options.memory
        found = await seat(peer, manifest, tokenizer.vocab, limit=limit, stage=options.stage)
        if found is None:
            return None

        def batches() -> Batches:
            return batches_of(manifest, tokenizer, config.data, config.directories.cache)

        if config.threads:
            torch.set_num_threads(config.threads)
        make = partial(learner, peer, manifest, tokenizer.vocab, found, batches=batches, work=self._work)
        made = await self._work(make)
        self._report.group = lambda: made.said
        return made
