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
from thinwire.swarm.seat import Seat

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
from .pipeline.group import held_of, learner, next_of
from .pipeline.place import share
from .signals import HANGUP, ending
from .tokenizer import load_tokenizer
from .training import batches_of, prepare
from .waiting import cancelled

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


def _hand_out(invite: str) -> None:
    """Print how others join; a run goes on though nobody reads that."""
    try:
        print(f"thinwire join {invite}", flush=True)
    except OSError as error:
        LOGGER.warning("cannot print the invite: %s; `thinwire invite` shows it", error.strerror)
        # What is still buffered must not complain when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Daemon:
    """See the module. `here` is the directory in which files named by the manifest are looked for."""

    def __init__(self, entry: Entry, options: Options, *, here: Path) -> None:
        self._entry, self._options, self._here = entry, options, here
        self._device = choose_device(entry.config.device)
        self._worker, self._second = ThreadPoolExecutor(1, "compute"), ThreadPoolExecutor(1, "digest")
        self._stopping = False
        self._seat: Seat | None = None
        """Where the peer goes that has ended a life for it."""

    async def run(self) -> int:
        """Until the run's last round, a signal, or an error. Returns the exit code."""
        loop = asyncio.get_running_loop()
        books = Books(self._entry.config, self._entry.run_id, self._device)
        self._report = books.report
        life = self._life()

        def signalled(number: int) -> None:
            if self._stopping and number == HANGUP:
                return
            if self._stopping:
                os._exit(128 + number)
            self._stopping = True
            LOGGER.warning("stopping after this round; once more to stop at once")
            life.stop()

        handled = ending()
        for number in handled:
            loop.add_signal_handler(number, signalled, number)
        try:
            await self._live(life, books)
            while self._seat is not None and not self._stopping:
                life = self._life()
                await self._live(life, books)
            return 0
        finally:
            books.close()
            for worker in (self._worker, self._second):
                worker.shutdown(cancel_futures=True)
            for number in handled:
                # What is left takes a moment, and the exit code is settled: a first signal in it changes nothing any more.
                loop.remove_signal_handler(number)
                signal.signal(number, lambda number, _: signalled(number))

    def _life(self) -> Life:
        """The next one: a peer that moves to another stage ends one and begins another."""
        peer, options = self._entry.peer(self._report.emit), self._options
        self._peer = peer

        def moves(learner: Learner) -> bool:
            self._seat = next_of(learner)
            return self._seat is not None

        return Life(
            peer,
            self._report,
            begin=self._begin,
            learn=self._learn,
            work=self._work,
            beside=self._beside,
            wait_for=options.wait_for,
            rounds=options.rounds,
            held=held_of,
            moves=moves,
            invited=_hand_out,
        )

    async def _live(self, life: Life, books: Books) -> None:
        teller = asyncio.create_task(books.keep_telling(life.peer))
        try:
            await life.run()
        finally:
            await cancelled(teller)
            books.tell(life.peer)

    async def _work(self, function: Callable[[], Result]) -> Result:
        """Run where computing is allowed: in the one worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

    async def _beside(self, function: Callable[[], Result]) -> Result:
        """The same in another thread, while the first one trains."""
        return await asyncio.get_running_loop().run_in_executor(self._second, function)

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
        taken, self._seat = self._seat, None
        if taken is not None:
            peer.announce(taken.code())
            found: Seat | None = taken
        else:
            found = await seat(peer, manifest, tokenizer.vocab, limit=limit, stage=options.stage)
        if found is None:
            return None

        def batches() -> Batches:
            return batches_of(manifest, tokenizer, config.data, config.directories.cache)

        if config.threads:
            torch.set_num_threads(config.threads)
        # Who was told its stage stays there.
        fits = share(manifest, tokenizer.vocab, limit)[1] if options.stage is None else ()
        make = partial(learner, peer, manifest, tokenizer.vocab, found, batches=batches, work=self._work, fits=fits)
        made = await self._work(make)
        self._report.group = lambda: made.said
        return made
