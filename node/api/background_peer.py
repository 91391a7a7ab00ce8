"""The peer of a user's training loop: it runs in the background and exchanges while the loop waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from thinwire.collectives.allreduce.service import AT_ONCE
from thinwire.collectives.timing import TICK
from thinwire.compression.core.types import Floats
from thinwire.compression.device import HOST
from thinwire.node.api.allreduce import Pending, Prepared, Some, operations_of
from thinwire.node.methods.kernel_compilation import compile_kernels
from thinwire.node.peer.bootstrap import RunEntry
from thinwire.node.peer.peer_services import GATHER_SECONDS, PeerServices
from thinwire.node.peer.report_sinks import ReportSinks
from thinwire.node.peer.status import Status
from thinwire.node.runtime.asyncio_extra import Result, cancelled, uninterrupted
from thinwire.node.runtime.console import file_logger
from thinwire.node.runtime.loop_thread import LoopThread
from thinwire.node.runtime.open_files import check_open_files
from thinwire.node.runtime.process_lock import hold
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica_buffers import ParameterWrite, Read
from thinwire.node.state.snapshot import PrivateState
from thinwire.swarm.manifest.manifest import Manifest

FLUSH_SECONDS = 10.0
"""Seconds for data that we owe to other peers to leave before we do."""


@dataclass(frozen=True, slots=True)
class RoundReport:
    """Report of an exchange.

    - round: number of the last round committed here. committed: whether this exchange committed one.
    - adopted: whether the model now has the swarm's parameters. contributors: number of peers whose work is in them.
    - seconds: time for which the loop waited. missing: ids (hexadecimal) of peers that were left out, with reasons.
    - members: ids (hexadecimal) of the contributors. loss: mean loss of the steps here, finite; None: unknown.
    - bytes_up, bytes_down: bytes sent and received on this peer's links since the last report.
    - steps, weight: inner steps of this exchange, and their samples or tokens. kept: part of the weight that is not in the
      round, but still in the model and due with the next one. taken: the weight is accounted for, with or without a commit,
      and must not be given again.
    """

    round: int
    committed: bool
    adopted: bool
    contributors: int
    seconds: float
    missing: Mapping[str, str] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    loss: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    steps: int = 0
    weight: int = 0
    kept: int = 0
    taken: bool = False


class BackgroundPeer:
    """A peer and its thread, from the first knock to the goodbye. The training loop calls all methods.

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
            if warning := check_open_files():
                self._report.emit("alarm", {"detail": warning})
            self.peer = entry.peer(self._report.emit)
            self._services = PeerServices(self.peer, self._report, meanwhile=self._until_due, work=self._between_rounds)
            stack.callback(lambda: self._background.last_call(self._leave()))
            self._resources = stack.pop_all()
        self._exchanged_at = self.peer.environment.now()
        self._carried = 0  # weight not yet in any round: the loop gives it again, with that of later steps
        self._exchange_task: asyncio.Task[RoundReport] | None = None
        self._begun, self._due = asyncio.Event(), asyncio.Event()
        self.steps = 0
        """Inner steps of the next round, once the peer is a member; 0: the round is due at once."""
        self.under_way = False
        """True while an exchange is in progress."""
        self._steps_in_flight = 0
        self.last: RoundReport | None = None
        """Report of the last exchange."""
        self.reports: deque[RoundReport] = deque(maxlen=1024)
        """Reports that were not read yet."""
        self._traffic = (0, 0)
        self.check, self.ask = self._background.check, self._background.ask

    def open(self) -> None:
        """Open the transport and find the run. Raises PortTaken, NoSwarm, Refused, ManifestMismatch."""
        self._joins = self._background.call(self._open())

    async def _open(self) -> bool:
        joins = await self._entry.begin(self.peer)
        await compile_kernels(self.peer.manifest, self._background.work)
        self._operations = operations_of(self.peer)
        self._tasks = [
            asyncio.create_task(self._report_sinks.keep_telling(self.peer)),
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
        self.steps = self.peer.workload.steps(0.0)
        self._report.phase = "training"
        self._exchanged_at = self.peer.environment.now()

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
    def steps_before(self) -> int:
        """Inner steps of a peer in all rounds up to now, the one in progress included."""
        if self.under_way:  # The round may have ended already: its steps must not count twice.
            return self._steps_in_flight
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
        """True if the next round only makes the present peers members: the first round of "merge"."""
        return self.peer.ready and self.peer.workload.gathers

    def gather(self) -> RoundReport:
        """Run that round: all peers contribute their initial parameters."""
        return self.exchange(steps=0, weight=self.peer.workload.idle_weight)

    def exchange(self, *, steps: int, weight: int, loss: float | None = None) -> RoundReport:
        """Run one round after `steps` inner steps on `weight` samples, see `OuterLoop.sync`."""
        self._synchronize()
        self.ask(self._due.set)
        return self._over(self._background.call(self._exchange(steps, weight, loss)))

    def begin(self, *, steps: int, weight: int, loss: float | None = None) -> RoundReport | None:
        """Start an exchange; the contribution has been read when this returns.

        Return the report if the exchange is over already; otherwise `finish` is due `overlap` inner steps later.
        """
        self._synchronize()
        self._steps_in_flight = self.peer.manifest.steps_after(self.peer.rounds.turn + 1)
        report = self._background.call(self._begin(steps, weight, loss))
        self.under_way = report is None
        return None if report is None else self._over(report)

    def finish(self) -> RoundReport:
        """Finish an exchange: wait for the verdict and set the parameters."""
        self._synchronize()
        self.under_way = False
        return self._over(self._background.call(self._finish()))

    def _over(self, report: RoundReport) -> RoundReport:
        self.last = report
        self.reports.append(report)
        self._background.call(self._services.checkpoint(self._private))
        return report

    def abandon(self) -> None:
        """Cancel an exchange that has begun."""
        self._background.last_call(self._abandon())

    async def _abandon(self) -> None:
        if self._exchange_task is not None:
            await cancelled(self._exchange_task)
            self._exchange_task = None

    def copy(self) -> Floats:
        """Return a copy of the outer parameters, and the values of the buffers behind them."""

        def copied() -> Floats:
            replica = self.peer.replica
            return np.concatenate([replica.theta, replica.buffers])

        return self._background.call(self._background.work(copied))

    async def _begin(self, steps: int, weight: int, loss: float | None) -> RoundReport | None:
        self._begun.clear()
        self._due.clear()
        self._exchange_task = task = asyncio.create_task(self._exchange(steps, weight, loss))
        begun = asyncio.create_task(self._begun.wait())
        try:
            await asyncio.wait((task, begun), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await cancelled(task)
            raise
        finally:
            begun.cancel()
        return await self._finish() if task.done() else None

    async def _finish(self) -> RoundReport:
        task, self._exchange_task = self._exchange_task, None
        assert task is not None, "no exchange has begun"
        self._due.set()
        return await task  # if this is cancelled, so is the exchange

    async def _until_due(self) -> None:
        self._exchanged_at = self.peer.environment.now()
        self._begun.set()
        await self._due.wait()

    async def _exchange(self, steps: int, weight: int, loss: float | None) -> RoundReport:
        peer, now = self.peer, self.peer.environment.now
        if steps and weight > self._carried:
            self._report.speed = (weight - self._carried) / max(1e-9, now() - self._exchanged_at)
        self._carried = weight
        await peer.rounds.settled()
        before = peer.replica.contents
        try:
            outcome, seconds = await self._services.exchange(steps=steps, weight=weight, loss=loss)
        finally:
            if not peer.manifest.overlap:
                self._exchanged_at = now()
            self.steps = peer.workload.steps(self._report.speed)
        missing = {who.hex(): reason for who, reason in outcome.missing.items()}
        committed = outcome.commit is not None
        # Compare last: the digest of a new round is computed later.
        moved = not (committed or outcome.taken or peer.rounds.follows) and peer.replica.contents != before
        adopted = committed or outcome.dropped or moved
        if committed or adopted or outcome.taken:
            self._carried = outcome.kept + outcome.merged
        before_up, before_down = self._traffic
        up, down = self._traffic = peer.traffic()
        return RoundReport(
            peer.replica.round,
            committed,
            adopted,
            len(outcome.contributors),
            seconds,
            missing,
            tuple(who.hex() for who in outcome.contributors),
            loss,
            up - before_up,
            down - before_down,
            steps,
            weight,
            outcome.kept + outcome.merged,
            outcome.taken,
        )

    def save(self) -> None:
        """Write a checkpoint, unless this round has one. Returns once it is on the medium."""
        follows = self.peer.rounds.follows
        self._background.last_call(self._services.written())
        self.settle()
        if follows:
            self._background.call(self.peer.rounds.rest())
        try:
            if self.peer.rounds.overlaps_calls:  # an exchange in progress changes the state meanwhile
                saved = self._background.call(self._background.work(lambda: self._services.save(self._private)))
            else:
                saved = self._services.save(self._private)
            self.ask(lambda: self._services.saved(saved))
        finally:
            if follows:
                self.ask(self.peer.rounds.resume)

    async def _between_rounds(self, function: Callable[[], Result]) -> Result:
        """Run while the caller waits and nothing changes the replica.

        Where the worker may be busy with the digest only, another thread runs the function at once.
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
        """Say goodbye and free all resources: threads, ports, the home's lock. A second call does nothing."""
        self._resources.close()

    async def _leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._abandon()
        try:
            await self._services.written()
        finally:
            await self._services.leave()
        self._report_sinks.tell(self.peer)
