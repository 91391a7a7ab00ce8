"""The peer of a user's training loop: it runs in the background and exchanges while the loop waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np
import torch
from thinwire.collectives.allreduce.service import AT_ONCE
from thinwire.collectives.timing import TICK
from thinwire.compression.core.types import Floats
from thinwire.compression.device import HOST
from thinwire.node.api.allreduce import Pending, Prepared, Some, operations_of
from thinwire.node.api.exchange import ExchangeTask, RoundReport
from thinwire.node.methods.kernel_compilation import compile_kernels
from thinwire.node.peer.bootstrap import RunEntry
from thinwire.node.peer.peer_services import GATHER_SECONDS, PeerServices
from thinwire.node.peer.report_sinks import ReportSinks
from thinwire.node.peer.status import Status
from thinwire.node.runtime.asyncio_extra import Result, stray_errors, uninterrupted
from thinwire.node.runtime.console import file_logger
from thinwire.node.runtime.loop_thread import LoopThread
from thinwire.node.runtime.open_files import check_open_files
from thinwire.node.runtime.process_lock import hold
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica_buffers import ParameterWrite, Read
from thinwire.node.state.snapshot import PrivateState
from thinwire.swarm.manifest.manifest import Manifest

FLUSH_SECONDS = 10.0
"""Longest wait of a peer that leaves for the end of its send queue, in seconds."""


class BackgroundPeer:
    """A peer and its thread, from the entry to the departure. The training loop calls all methods.

    Call `open` first, then `take_up`, then `exchange` as often as rounds are due, or instead `begin` and `finish` if
    training continues between the two; always `close` at the end.
    """

    def __init__(self, entry: RunEntry, wait_for: int = 1, wait_seconds: float = GATHER_SECONDS) -> None:
        """Create the peer. `wait_for`, `wait_seconds`: see `PeerServices.gather`. Raises InUseError."""
        self._entry, self._wait_for, self._wait_seconds = entry, wait_for, wait_seconds
        self._tasks: list[asyncio.Task[None]] = []
        with ExitStack() as stack:
            stack.enter_context(hold(entry.config.directories.lock))
            self._logger = stack.enter_context(file_logger(entry.config.directories.log))
            own = entry.identity.peer_id
            self._report_sinks = ReportSinks(entry.config, entry.run_id, own, logger=self._logger)
            stack.callback(self._report_sinks.close)
            self._background = LoopThread("thinwire")
            stack.callback(self._background.stop)
            self._report = self._report_sinks.report
            self._background.on_stray_errors(stray_errors(self._logger, self._alarm))
            if warning := check_open_files():
                self._alarm(warning)
            self.peer = entry.peer(self._report.emit)
            self._services = PeerServices(self.peer, self._report, meanwhile=self._until_due, work=self._between_rounds)
            stack.callback(lambda: self._background.last_call(self._leave()))
            self._resources = stack.pop_all()
        self._exchange_task = ExchangeTask()
        self.steps = 0
        """Inner steps of the next round, once the peer is a member; 0: the round is due at once."""
        self._trains_since = self.peer.environment.now()
        """Time at which the inner steps for the next exchange began."""
        self._uncounted_weight = 0
        """Weight that is in no round yet: the loop passes it again, added to that of later steps."""
        self._traffic = (0, 0)
        self._steps_in_progress: int | None = None
        """Inner steps of all rounds, the one in progress included; None: no exchange is in progress."""
        self.last: RoundReport | None = None
        """Report of the last exchange."""
        self.reports: deque[RoundReport] = deque(maxlen=1024)
        """Reports that were not read yet."""
        self.check, self.ask = self._background.check, self._background.ask

    def _alarm(self, text: str) -> None:
        self._report.emit("alarm", {"detail": text})

    def open(self) -> None:
        """Open the transport and find the run. Raises PortTaken, NoSwarm, Refused, ManifestMismatch."""
        self._joins = self._background.call(self._open())

    async def _open(self) -> bool:
        joins = await self._entry.begin(self.peer)
        await compile_kernels(self.peer.manifest, self._background.work)
        self._operations = operations_of(self.peer)
        self._tasks = [
            asyncio.create_task(self._report_sinks.publish_repeatedly(self.peer)),
            asyncio.create_task(self._keep_watch()),
        ]
        return joins

    async def _keep_watch(self) -> None:
        trouble = await self._services.trouble()
        self._logger.error("this peer cannot continue", exc_info=trouble)
        self._background.fail(trouble)

    def status(self) -> Status:
        """Return what `thinwire status` shows."""
        return self.ask(lambda: self._report.snapshot(self.peer))

    def emit(self, kind: str, fields: Mapping[str, object]) -> None:
        """Write an event."""
        self.ask(lambda: self._report.emit(kind, fields))

    def take_up(
        self,
        layout: Layout,
        theta: Floats,
        *,
        read: Read,
        write: ParameterWrite,
        synchronize: Callable[[], None],
        private: Callable[[], PrivateState | None],
        devices: Sequence[torch.device],
    ) -> None:
        """Become a member, see `Peer.take_up`.

        `synchronize`: waits until the parameters may be read. `private`: returns what a checkpoint stores of the caller.
        `devices` have the parameters.
        """
        self._report.device = ", ".join(map(str, devices))
        self._synchronize, self._private = synchronize, private
        self._report.phase = "joining" if self._joins else "starting"
        work = self._background.work
        device = devices[0] if len(devices) == 1 else HOST
        self._background.call(
            self.peer.take_up(layout, theta, read=read, write=write, work=work, joins=self._joins, device=device)
        )
        self.emit("ready", {"round": self.peer.replica.round, "parameters": layout.total})
        self.ask(self._services.follow)
        self._background.call(self._services.gather(self._wait_for, seconds=self._wait_seconds))
        self.steps, self._trains_since = self.peer.workload.steps(0.0), self.peer.environment.now()
        self._report.phase = "training"

    @property
    def leader(self) -> BackgroundPeer:
        """This peer, see GroupPeer."""
        return self

    @property
    def leads(self) -> bool:
        """True, see GroupPeer."""
        return True

    @property
    def manifest(self) -> Manifest:
        """Manifest of the run."""
        return self.peer.manifest

    @property
    def round(self) -> int:
        """The last committed round; 0 before the first."""
        return self.peer.replica.round if self.peer.ready else 0

    def refresh(self) -> None:
        """Do nothing, see GroupPeer."""

    def average(self, prepared: Prepared[Some], name: str, grace: float | None) -> Pending[Some]:
        """Start an all-reduce, see `Swarm.average`. Raises ValueError if too many are in progress."""
        if self._background.started >= AT_ONCE:
            raise ValueError(f"{AT_ONCE} averages are in progress: wait until some of them finish")
        wait = self.peer.manifest.exchange.timeout_seconds if grace is None else grace
        return Pending(
            self._background,
            lambda: self._operations.begin(name, prepared.plan, prepared.share, grace=wait),
            prepared,
            self.peer.environment.now,
        )

    @property
    def done(self) -> bool:
        """True if the run has had all its rounds. Raises background failures."""
        self.check()
        last = self.peer.manifest.run.rounds
        return bool(last) and self.peer.ready and self.peer.replica.round >= last and not self.under_way

    @property
    def under_way(self) -> bool:
        """True while an exchange is in progress."""
        return self._steps_in_progress is not None

    @property
    def steps_before(self) -> int:
        """Inner steps of a peer in all rounds up to now, the one in progress included."""
        if self._steps_in_progress is not None:  # The round may have ended already: its steps must not count twice.
            return self._steps_in_progress
        return self.peer.manifest.steps_after(self.peer.rounds.turn) if self.peer.ready else 0

    @property
    def overlap(self) -> int:
        """Inner steps to make while an exchange is in progress; 0 if training waits for it."""
        return self.peer.workload.overlap

    @property
    def overtaken(self) -> bool:
        """True if the others have committed the round in progress without us."""
        return self.peer.ready and self.peer.rounds.overtaken

    @property
    def gathers(self) -> bool:
        """True if the next round only makes the present peers members: the first round of the method "merge"."""
        return self.peer.ready and self.peer.workload.gathers

    def gather(self) -> RoundReport:
        """Run the round that makes the present peers members: all contribute their initial parameters."""
        return self.exchange(steps=0, weight=self.peer.workload.idle_weight)

    def exchange(self, *, steps: int, weight: int, loss: float | None = None) -> RoundReport:
        """Run one round after `steps` inner steps on `weight` samples, see `OuterLoop.sync`."""
        self._synchronize()
        self.ask(self._exchange_task.let_end)
        return self._record(self._background.call(self._exchange(steps, weight, loss)))

    def begin(self, *, steps: int, weight: int, loss: float | None = None) -> RoundReport | None:
        """Start an exchange; the contribution has been read when this returns.

        Return the report if the exchange is over already; otherwise `finish` is due `overlap` inner steps later.
        """
        self._synchronize()
        steps_in_progress = self.peer.manifest.steps_after(self.peer.rounds.turn + 1)
        report = self._background.call(self._exchange_task.begin(partial(self._exchange, steps, weight, loss)))
        if report is not None:
            return self._record(report)
        self._steps_in_progress = steps_in_progress
        return None

    def finish(self) -> RoundReport:
        """Finish an exchange: wait for the verdict and set the parameters."""
        self._synchronize()
        self._steps_in_progress = None
        return self._record(self._background.call(self._exchange_task.finish()))

    def _record(self, report: RoundReport) -> RoundReport:
        """Store the report of an exchange that has ended, and begin a checkpoint if one is due."""
        self.last = report
        self.reports.append(report)
        self._background.call(self._services.checkpoints.begin_if_due(self._private))
        return report

    def abandon(self) -> None:
        """Cancel an exchange that has begun."""
        self._background.last_call(self._exchange_task.cancel())

    def copy(self) -> Floats:
        """Return a copy of the outer parameters, and the values of the buffers behind them."""

        def copied() -> Floats:
            replica = self.peer.replica
            return np.concatenate([replica.theta, replica.buffers])

        return self._background.call(self._background.work(copied))

    async def _until_due(self) -> None:
        self._trains_since = self.peer.environment.now()
        await self._exchange_task.until_due()

    async def _exchange(self, steps: int, weight: int, loss: float | None) -> RoundReport:
        peer, now = self.peer, self.peer.environment.now
        if steps and weight > self._uncounted_weight:
            self._report.speed = (weight - self._uncounted_weight) / max(1e-9, now() - self._trains_since)
        self._uncounted_weight = weight
        await peer.rounds.settled()
        before = peer.replica.contents
        try:
            outcome, seconds = await self._services.exchange(steps=steps, weight=weight, loss=loss)
        finally:
            if not peer.manifest.overlap:
                self._trains_since = now()
            self.steps = peer.workload.steps(self._report.speed)
        committed, kept = outcome.commit is not None, outcome.kept + outcome.merged
        # Compare last: the digest of a new round is computed later.
        changed = not (committed or outcome.taken or peer.rounds.follows) and peer.replica.contents != before
        adopted = committed or outcome.dropped or changed
        if adopted or outcome.taken:
            self._uncounted_weight = kept
        before_up, before_down = self._traffic
        up, down = self._traffic = peer.traffic()
        return RoundReport(
            round=peer.replica.round,
            committed=committed,
            adopted=adopted,
            contributors=len(outcome.contributors),
            seconds=seconds,
            missing={peer_id.hex(): reason for peer_id, reason in outcome.missing.items()},
            members=tuple(peer_id.hex() for peer_id in outcome.contributors),
            loss=loss,
            bytes_up=up - before_up,
            bytes_down=down - before_down,
            steps=steps,
            weight=weight,
            kept=kept,
            taken=outcome.taken,
        )

    def save(self) -> None:
        """Write a checkpoint, unless this round has one. Returns once it is on the medium."""
        follows = self.peer.rounds.follows
        self._background.last_call(self._services.checkpoints.written())
        self.settle()
        if follows:
            self._background.call(self.peer.rounds.rest())
        try:
            if self.peer.rounds.overlaps_calls:  # an exchange in progress changes the state meanwhile
                saved = self._background.call(
                    self._background.work(lambda: self._services.checkpoints.save(self._private))
                )
            else:
                saved = self._services.checkpoints.save(self._private)
            self.ask(lambda: self._services.checkpoints.saved(saved))
        finally:
            if follows:
                self.ask(self.peer.rounds.resume)

    async def _between_rounds(self, function: Callable[[], Result]) -> Result:
        """Run a function while the caller waits and nothing changes the replica.

        If the worker can only be busy with the digest, another thread runs the function at once.
        """
        rounds = self.peer.rounds
        if rounds.follows or rounds.overlaps_calls:  # the worker changes the replica also between two exchanges
            return await self._background.work(function)
        return await uninterrupted(self.peer.environment.aside(function))

    def settle(self) -> None:
        """Wait until the last round has its digest, if the loop still runs."""
        if self.peer.ready:
            self._background.last_call(self.peer.rounds.settled())

    def linger(self) -> None:
        """Serve other peers what they still need from us. Raises background failures."""
        self._background.call(self._linger())

    async def _linger(self) -> None:
        await self._services.linger()
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                while not self.peer.presence.send_queue.idle:
                    await asyncio.sleep(TICK)

    def close(self) -> None:
        """Leave the swarm and free threads, ports and the home's lock. A second call does nothing."""
        self._resources.close()

    async def _leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._exchange_task.cancel()
        try:
            await self._services.checkpoints.written()
        finally:
            await self._services.leave()
        self._report_sinks.publish(self.peer)
