"""The daemon: one process that is one peer. Trains, exchanges, keeps a checkpoint, tells what it does, and stops well."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from thinwire.compression.kernels import warm_up

from .config import Config
from .console import LOGGER, log_style, set_up_logging
from .device import choose_device
from .lock import hold
from .opening import Entry, arriving, duplicate_key, founding
from .options import Options
from .peer import Peer
from .report import Reporter
from .training import Training, prepare
from .waiting import cancelled

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAVE_SECONDS = 120.0
"""Time between checkpoints; the last round is always saved."""

STATUS_SECONDS = 1.0
LINGER_SECONDS = 10.0
"""How long the others are given to fetch the last round from us before we leave."""

ABANDON_SECONDS = 5.0
"""How long a round may still take after the first request to stop."""

GATHER_SECONDS = 60.0
"""How long `--wait-for` waits for other peers."""

Result = TypeVar("Result")


def start(run: Path, config: Config, options: Options) -> int:
    """`thinwire start`: found a run, or come back to it. Returns the exit code."""
    if options.local:
        from .local import start_local

        return start_local(run, config, options)
    return _run(Daemon(founding(run.read_bytes(), config), options, here=run.parent))


def join(invite: str, config: Config, options: Options) -> int:
    """`thinwire join`: become a peer of the swarm an invite names. Returns the exit code."""
    return _run(Daemon(arriving(invite, config, options.search), options, here=Path.cwd()))


def _run(daemon: Daemon) -> int:
    directories, options = daemon.entry.config.directories, daemon.options
    set_up_logging(log_style(options.log), directories.log, debug=options.debug)
    with hold(directories.lock):
        if sys.platform == "win32":
            return asyncio.run(daemon.run())
        import uvloop

        return uvloop.run(daemon.run())


class Daemon:
    """One peer with its training. `here` is the directory in which files named by the manifest are looked for."""

    def __init__(self, entry: Entry, options: Options, *, here: Path) -> None:
        self.entry, self.config, self.options = entry, entry.config, options
        self._identity, self._run_id, self._here = entry.identity, entry.run_id, here
        config = entry.config
        self._device = choose_device(config.device)
        self._report = Reporter(
            config.directories.run(entry.run_id).events,
            config.directories.status,
            name=config.name,
            device=self._device,
            now=time.monotonic,
            wall=time.time,
        )
        self._worker = ThreadPoolExecutor(1, "compute")
        self._halt = threading.Event()
        self._stopping = asyncio.Event()
        self._saved_at = time.monotonic()
        self._saved_round = -1
        self._tokens = 0

    async def work(self, function: Callable[[], Result]) -> Result:
        """Run where computing is allowed: in the one worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

    # --- the life of a peer

    async def run(self) -> int:
        """Until the run's last round, a signal, or an error. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)
        peer = self.entry.peer(self._report.emit)
        teller = asyncio.create_task(self._tell(peer))
        life = asyncio.create_task(self._live(peer))
        try:
            stop = asyncio.create_task(self._stopping.wait())
            await asyncio.wait((life, stop), return_when=asyncio.FIRST_COMPLETED)
            if not life.done() and peer.ready:
                await asyncio.wait((life,), timeout=ABANDON_SECONDS)
            stop.cancel()
            if life.done():
                life.result()
            return 0
        finally:
            self._halt.set()
            await cancelled(life)
            await self._finish(peer)
            await cancelled(teller)
            self._report.phase = "done"
            self._report.status(peer, self._identity.peer_id, self._run_id)
            self._report.close()
            self._worker.shutdown(cancel_futures=True)
            for number in SIGNALS:
                # What is left takes a moment, and the exit code is settled: a first signal in it changes nothing any more.
                loop.remove_signal_handler(number)
                signal.signal(number, lambda number, _: self._signalled(number))

    async def _live(self, peer: Peer) -> None:
        self._report.emit("start", {"peer": self._identity.peer_id.hex(), "run": self._run_id.hex()})
        await self.work(warm_up)
        joins = await self.entry.begin(peer)
        manifest = peer.manifest
        training = await self.work(
            lambda: prepare(
                manifest,
                data=self.config.data,
                device=self._device,
                threads=self.config.threads,
                cache=self.config.directories.cache,
                here=self._here,
            )
        )
        self._training = training
        self._report.phase = "joining" if joins else "starting"
        await peer.take_up(
            training.layout,
            await self.work(training.parameters),
            read=training.read,
            write=training.write,
            work=self.work,
            joins=joins,
        )
        kept = peer.private is not None and training.restore(peer.private)
        if not kept and peer.replica.round:
            training.skip_to(peer.replica.round, len(peer.replica.members))
            self._report.emit("fresh", {"detail": "the inner optimizer's state is new and warms up"})
        self._report.emit("ready", {"round": peer.replica.round, "parameters": training.layout.total})
        invite = peer.invite()
        if not joins and invite is not None:
            print(f"thinwire join {invite.code()}", flush=True)
        await self._gather(peer)
        train = asyncio.create_task(self._train(peer, training))
        duplicate = asyncio.create_task(peer.presence.duplicate.wait())
        try:
            await asyncio.wait((train, duplicate, peer.running), return_when=asyncio.FIRST_COMPLETED)
            for task in (peer.running, train):
                if task.done():
                    task.result()
            if duplicate.done() and not train.done():
                raise duplicate_key(self._identity)
        finally:
            duplicate.cancel()
            await cancelled(train)

    async def _gather(self, peer: Peer) -> None:
        """Wait until as many peers as `--wait-for` asks for hold the state and take part, a minute at most."""
        until = time.monotonic() + GATHER_SECONDS
        while len({*peer.session.current.agreement.ready, peer.session.me}) < self.options.wait_for:
            if self._stopping.is_set() or peer.session.overtaken:
                return  # asked to stop, or the swarm has gone on without us
            if time.monotonic() > until:
                LOGGER.warning("going on without the peers that were waited for")
                return
            self._report.phase = "waiting"
            await asyncio.sleep(0.1)

    async def _train(self, peer: Peer, training: Training) -> None:
        manifest, replica, session = peer.manifest, peer.replica, peer.session
        last = self.options.rounds or manifest.run.rounds
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set() and (not last or replica.round < last):
            self._report.phase = "training"
            training.assign(peer.place(), self._identity.peer_id, self.options.place)
            interrupted = threading.Event()
            session.on_commit = interrupted.set
            stop = _Either(self._halt, interrupted)
            steps = await self.work(lambda stop=stop: training.trainer.run_steps(manifest.outer.steps, stop))  # type: ignore[misc]
            self._tokens += steps.tokens
            if steps.seconds > 0 and steps.steps:
                self._report.speed = steps.tokens / steps.seconds
            if self._stopping.is_set() and steps.steps < manifest.outer.steps:
                return
            self._report.phase = "exchanging"
            began = loop.time()
            loss = steps.loss if steps.steps else (self._report.loss or 0.0)
            outcome = await peer.rounds.sync(weight=self._tokens, loss=loss, speed=self._report.speed)
            if outcome.commit is not None:
                self._report.round(
                    peer,
                    loss=loss,
                    contributors=len(outcome.contributors),
                    missing=outcome.missing,
                    seconds=loop.time() - began,
                    steps=manifest.outer.steps,
                    tokens=self._tokens,
                )
                self._tokens = 0
                peer.drop_anchor()
                if time.monotonic() > self._saved_at + SAVE_SECONDS:
                    await self._save(peer, training)
            else:
                self._report.uncommitted(peer)

    async def _save(self, peer: Peer, training: Training) -> None:
        def save() -> str:
            return peer.save(training.private())

        self._report.checkpoint = await self.work(save) or self._report.checkpoint
        self._saved_at, self._saved_round = time.monotonic(), peer.replica.round

    # --- the end

    def _signalled(self, number: int) -> None:
        if self._stopping.is_set():
            os._exit(128 + number)
        LOGGER.warning("stopping after this round; once more to stop at once")
        self._report.phase = "leaving"
        self._stopping.set()
        self._halt.set()

    async def _finish(self, peer: Peer) -> None:
        """Keep what we have, let the others get what they need from us, say goodbye."""
        if peer.ready:
            training = getattr(self, "_training", None)
            if training is not None and peer.replica.round != self._saved_round:
                await self._save(peer, training)
            if not self._stopping.is_set():
                await peer.linger(LINGER_SECONDS)
        await peer.leave()
        if peer.ready:
            self._report.emit("left", {"round": peer.replica.round, "digest": peer.replica.digest.hex()})

    async def _tell(self, peer: Peer) -> None:
        while True:
            self._report.status(peer, self._identity.peer_id, self._run_id)
            await asyncio.sleep(STATUS_SECONDS)


class _Either(threading.Event):
    """Set when one of two events is."""

    def __init__(self, first: threading.Event, second: threading.Event) -> None:
        super().__init__()
        self._first, self._second = first, second

    def is_set(self) -> bool:
        return self._first.is_set() or self._second.is_set()
