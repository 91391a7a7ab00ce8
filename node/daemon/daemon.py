"""The daemon: one process that is one peer.

Provides a PeerLifecycle with signals, a worker thread and a terminal.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from thinwire.node.daemon.announcing import Announcing
from thinwire.node.daemon.mapping import Mapping
from thinwire.node.daemon.options import Options, join_line
from thinwire.node.daemon.progress_line import ProgressLine
from thinwire.node.methods.kernel_compilation import compile_kernels
from thinwire.node.peer.bootstrap import RunEntry, arriving, founding
from thinwire.node.peer.lifecycle import PeerLifecycle
from thinwire.node.peer.peer import Peer
from thinwire.node.peer.report_sinks import ReportSinks
from thinwire.node.peer.status import Status
from thinwire.node.pipeline.groups.host_learner import HostLearner
from thinwire.node.pipeline.groups.learner_factory import learner, next_of
from thinwire.node.pipeline.groups.origin_learner import OriginLearner
from thinwire.node.pipeline.groups.stage_assignment import share
from thinwire.node.pipeline.groups.stage_join import seat
from thinwire.node.pipeline.model.staged_model import StagedModel
from thinwire.node.runtime.asyncio_extra import cancelled, stray_errors
from thinwire.node.runtime.console import LOGGER, LiveLine, discard_unwritable, log_style, set_up_logging
from thinwire.node.runtime.device import choose_device
from thinwire.node.runtime.directories import RunDirectory
from thinwire.node.runtime.load_settings import Config
from thinwire.node.runtime.open_files import check_open_files
from thinwire.node.runtime.process_lock import hold
from thinwire.node.runtime.signals import HANGUP, ending
from thinwire.node.training.batches import Batches
from thinwire.node.training.corpus import Progress
from thinwire.node.training.learner import Learner
from thinwire.node.training.local_learner import Computing, LocalLearner, batches_of, build_learner
from thinwire.node.training.models.lora import write_config
from thinwire.node.training.models.tokenizer import load_tokenizer, tokenizer_file
from thinwire.node.training.models.user_model import check_named, config_file
from thinwire.node.training.text_source import DEFAULT_DATA
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.identity.invite import Invite
from thinwire.swarm.identity.regular_file import TOKENIZER, content_of
from thinwire.swarm.identity.stage_claim import Seat
from thinwire.swarm.manifest.manifest import Manifest

Result = TypeVar("Result")
Made = TypeVar("Made", bound=Learner)


class NotSaved(HintedError):
    """The last state of a peer was not written, and no other peer can be reached that has it."""

    exit_code: ClassVar[int] = 1


def start(run: Path, config: Config, options: Options) -> int:
    """Found a run, or return to it, as `thinwire start` does without --local. Return the exit code."""
    new = options.new or bool(options.weights)
    entry = founding(content_of(run), config, run.name, new=new)
    return _run(entry, options, here=run.parent)


def join(invite: str | Invite, config: Config, options: Options) -> int:
    """Become a peer of the swarm of an invite, or of its text. Return the exit code."""
    return _run(arriving(invite, config, options.search), options, here=Path.cwd())


def _run(entry: RunEntry, options: Options, *, here: Path) -> int:
    """Run a daemon; return the exit code."""
    warning, directories = check_open_files(extend=True), entry.config.directories
    style = log_style(options.log)
    live = LiveLine() if style == "rich" else None
    daemon = Daemon(entry, options, here=here, warning=warning, live=live)
    set_up_logging(style, directories.log, debug=options.debug, live=live)
    try:
        with hold(directories.lock), removed_if_never_begun(directories.run(entry.run_id)):
            if sys.platform == "win32":
                return asyncio.run(daemon.run())
            import uvloop

            return uvloop.run(daemon.run())
    finally:
        if live is not None:
            live.hide()


@contextmanager
def removed_if_never_begun(folder: RunDirectory) -> Iterator[None]:
    """Remove the folder of a run that the block has created if the block raises a HintedError.

    A folder with votes or checkpoints stays. Without the removal, `thinwire runs` and other commands would show a run that
    has never begun, or that this peer never entered.
    """
    there = folder.path.exists()
    try:
        yield
    except HintedError:
        if not (there or folder.checkpoints.exists() or any(folder.path.glob("votes-*"))):
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def print_join_line(invite: str, manifest: Manifest) -> None:
    """Print the command with which others join; the run continues even if stdout is closed."""
    try:
        print(join_line(invite, manifest.model), flush=True)
    except OSError as error:
        LOGGER.warning("cannot print the invite: %s; `thinwire invite` shows it", error.strerror)
        discard_unwritable()
    if note := Invite.parse(invite).note:
        LOGGER.info(note)


def _held_out(learner: Learner) -> float:
    """Return the held-out loss; NaN for a peer that does not hold the whole model."""
    return learner.held_out_loss() if isinstance(learner, LocalLearner) else math.nan


class Daemon:
    """One peer process.

    `here`: directory of files named by the manifest. `warning`: reported as an alarm. `live`: shows the progress.
    """

    def __init__(
        self, entry: RunEntry, options: Options, *, here: Path, warning: str = "", live: LiveLine | None = None
    ) -> None:
        self._live_line, self._progress = live, ProgressLine()
        self._entry, self._options, self._here, self._warning = entry, options, here, warning
        self._device = choose_device(entry.config.device)
        self._worker, self._second = ThreadPoolExecutor(1, "compute"), ThreadPoolExecutor(1, "digest")
        self._stopped_by = 0
        """Number of the first signal to stop; 0: none has come."""
        self._loading: Future[Any] | None = None
        """Load of the model and the data, in the worker thread."""
        self._made: HostLearner | OriginLearner | None = None
        self._seat: Seat | None = None
        """Stage that the peer changes to after the present lifecycle; None: it changes to none."""

    async def run(self) -> int:
        """Run until the run's last round, a signal, or an error. Return the exit code."""
        loop = asyncio.get_running_loop()
        report_sinks = ReportSinks(
            self._entry.config,
            self._entry.run_id,
            self._entry.identity.peer_id,
            self._device,
            lambda: "" if self._made is None else self._made.summary,
            show=self._show,
        )
        self._report = report_sinks.report
        loop.set_exception_handler(stray_errors(LOGGER, self._alarm))
        if self._warning:
            self._alarm(self._warning)
        lifecycle = self._new_lifecycle()

        def signalled(number: int) -> None:
            if self._stopped_by and number == HANGUP:
                return
            if self._stopped_by:
                self._exit_at_once(number)
            self._stopped_by = number
            when = " after this round" if lifecycle.takes_part else ""
            LOGGER.warning(f"stopping{when}; once more to stop at once")
            lifecycle.stop()

        options, announcing = self._options, None
        if options.public or options.lan:
            announcing = Announcing(self._entry.config, self._report, public=options.public, lan=options.lan)
            announcing.begin(lambda: self._peer)
        mapping = Mapping(self._entry.config, self._report.emit)
        mapping.begin(lambda: self._peer)
        handled = ending()
        for number in handled:
            loop.add_signal_handler(number, signalled, number)
        try:
            await self._run_lifecycle(lifecycle, report_sinks)
            while self._seat is not None and not self._stopped_by:
                lifecycle = self._new_lifecycle()
                await self._run_lifecycle(lifecycle, report_sinks)
            if lifecycle.unsaved:
                raise NotSaved(
                    f"the last checkpoint was not written, and no other peer has the state: {lifecycle.unsaved}",
                    "make room, and start again with the same command: the run continues at its newest checkpoint",
                )
            return 0
        finally:
            if announcing is not None:
                await announcing.end()
            await mapping.end()
            loop.set_exception_handler(None)
            report_sinks.close()
            for number in handled:
                # From here on the loop handles no signals. The remaining work takes a moment, and the exit code is decided:
                # a first signal changes nothing, a second one exits at once.
                loop.remove_signal_handler(number)
                signal.signal(number, lambda number, _: signalled(number))
            if self._stopped_by and self._loading is not None and not self._loading.done():
                self._exit_at_once(
                    self._stopped_by
                )  # The loading of a model cannot be interrupted, and is useless now.
            for worker in (self._worker, self._second):
                worker.shutdown(cancel_futures=True)

    def _alarm(self, text: str) -> None:
        self._report.emit("alarm", {"detail": text})

    def _exit_at_once(self, number: int) -> NoReturn:
        if self._live_line is not None:
            self._live_line.hide()  # it has hidden the cursor
        os._exit(128 + number)

    def _new_lifecycle(self) -> PeerLifecycle:
        """Create the next lifecycle: a peer that changes to another stage ends one and begins another."""
        peer, options = self._entry.peer(self._report.emit), self._options
        self._peer = peer

        def moves(learner: Learner) -> bool:
            self._seat = next_of(learner)
            return self._seat is not None

        return PeerLifecycle(
            peer,
            self._report,
            begin=self._begin,
            learn=self._learn,
            work=self._work,
            beside=self._beside,
            wait_for=options.wait_for,
            rounds=options.rounds,
            moves=moves,
            evaluate=_held_out,
            every=self._entry.config.evaluate_every,
            invited=self._invite,
        )

    def _show(self, status: Status) -> None:
        """Show the progress on a terminal."""
        if self._live_line is not None:
            rounds = self._options.rounds or status.rounds
            self._live_line.show(self._progress.text(status, rounds, self._live_line.width))

    def _invite(self, invite: str) -> None:
        if self._live_line is not None:
            self._live_line.hide()  # until the next status, so that the invite has a separate line
        print_join_line(invite, self._peer.manifest)

    async def _run_lifecycle(self, lifecycle: PeerLifecycle, report_sinks: ReportSinks) -> None:
        publisher = asyncio.create_task(report_sinks.publish_repeatedly(lifecycle.peer))
        try:
            await lifecycle.run()
        finally:
            await cancelled(publisher)
            report_sinks.publish(lifecycle.peer)

    async def _work(self, function: Callable[[], Result]) -> Result:
        """Run a function in the worker thread, the only one that trains."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

    async def _beside(self, function: Callable[[], Result]) -> Result:
        """Run a function in the second thread, while the worker thread trains."""
        return await asyncio.get_running_loop().run_in_executor(self._second, function)

    async def _load(self, make: Callable[[], Made]) -> Made:
        """Make the learner in the worker thread."""
        self._loading = loading = self._worker.submit(make)
        return await asyncio.wrap_future(loading)

    async def _begin(self, peer: Peer) -> bool:
        joins = await self._entry.begin(peer)
        check_named(peer.manifest, self._entry.config.model)
        await compile_kernels(peer.manifest, self._work)
        return joins

    async def _learn(self, manifest: Manifest) -> Learner:
        made = await self._prepared(manifest)
        config, run = self._entry.config, self._entry.config.directories.run(self._entry.run_id)
        if config.data is None and isinstance(made, LocalLearner | OriginLearner):
            LOGGER.info(DEFAULT_DATA)
        if manifest.model.kind == "hf":
            run.model_config.write_bytes(content_of(config_file(config.model)))
        if manifest.data.tokenizer != "bytes":
            try:
                run.tokenizer.write_bytes(content_of(tokenizer_file(manifest.data.tokenizer, self._here), TOKENIZER))
            except OSError as error:
                LOGGER.warning("cannot copy the tokenizer for `thinwire export`: %s", error.strerror)
        return made

    async def _prepared(self, manifest: Manifest) -> Learner:
        config, options = self._entry.config, self._options
        if options.memory is not None or options.stage is not None:
            staged = await self._stage(manifest)
            if staged is not None:
                return staged
        here = self._here

        def build() -> LocalLearner:
            made = build_learner(
                manifest,
                Computing(self._device, config.threads, config.compile, config.gradient_checkpointing),
                data=config.data,
                cache=config.directories.cache,
                here=here,
                clock=time.perf_counter,
                place=options.place,
                work=self._work,
                weights=options.weights,
                model=config.model,
                say=LOGGER.info,
            )
            if manifest.pipeline.stages and manifest.model.kind != "transformer":
                StagedModel(manifest, made.tokenizer.vocab, config.model, here).check(made.trainer.model)
            return made

        made = await self._load(build)
        if manifest.lora.rank:
            write_config(made.trainer.model, config.directories.run(self._entry.run_id).path)
        return made

    async def _stage(self, manifest: Manifest) -> Learner | None:
        """Return the learner of one stage, if several peers hold the model together; None if all of it fits."""
        config, options, peer = self._entry.config, self._options, self._peer
        read = partial(load_tokenizer, manifest.data.tokenizer, self._here, manifest.data.tokenizer_hash)
        tokenizer = await self._work(read)
        model = StagedModel(manifest, tokenizer.vocab, config.model, self._here)
        limit = math.inf if options.memory is None else options.memory
        taken, self._seat = self._seat, None
        if taken is not None:
            peer.announce(taken.code())
            found: Seat | None = taken
        else:
            found = await seat(peer, model, limit=limit, stage=options.stage, work=self._work)
        if found is None:
            return None

        if config.compile or config.gradient_checkpointing:
            LOGGER.warning("the settings compile and gradient_checkpointing have no effect on a stage")

        def batches() -> Batches:
            progress = Progress(time.perf_counter, LOGGER.info)
            return batches_of(manifest, tokenizer, config.data, config.directories.cache, progress)

        if config.threads:
            torch.set_num_threads(config.threads)
        # A peer whose stage was given stays there.
        fits = (await self._work(partial(share, model, limit)))[1] if options.stage is None else ()
        make = partial(learner, peer, model, found, batches=batches, work=self._work, fits=fits)
        made = await self._load(make)
        self._made = made
        return made
