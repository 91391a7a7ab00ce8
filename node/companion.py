"""The peer beside a training loop of one's own: alive in the background, exchanging while the loop waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from thinwire.collectives.operations import AT_ONCE
from thinwire.compression.codec import Floats
from thinwire.compression.warmup import warm_up

from .averages import Pending, Prepared, Some, operations_of
from .background import Background
from .books import Books
from .duties import Duties
from .fragments import Layout
from .lock import hold
from .opening import Entry
from .outer import Read, Write
from .presence import TICK
from .snapshot import PrivateState
from .status import Status
from .waiting import cancelled

FLUSH_SECONDS = 10.0
"""How long what others are owed may take to get out before we leave."""


@dataclass(frozen=True, slots=True)
class RoundReport:
    """How an exchange went.

    round: the last round committed here. committed: whether this exchange committed one. adopted: whether the model now has
    the swarm's parameters. contributors: peers whose work is in them. seconds: how long the loop waited. missing: ids
    (hexadecimal) of peers that were left out, with reasons. members: ids of the contributors. loss: what was given here, as a
    finite number. bytes_up, bytes_down: what went over this peer's links since the report before. steps, weight: what this
    exchange was about. kept: of the weight, what is not in the round, but still in the model and due with the next.
    taken: the weight is booked, with or without a commit, and not to be given again.
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


class Companion:
    """A peer and the thread it lives in, from the first knock to the goodbye. All methods are the training loop's to call.

    `open` first, then `take_up`, then `exchange` as often as rounds are due, or in its place `begin` and `finish` where
    training goes on between the two; `close` at the end, whatever happened.
    """

    def __init__(self, entry: Entry) -> None:
        """Raises InUseError."""
        self._entry = entry
        self._tasks: list[asyncio.Task[None]] = []
        with ExitStack() as stack:
            stack.enter_context(hold(entry.config.directories.lock))
            self._books = Books(entry.config, entry.run_id)
            stack.callback(self._books.close)
            self._background = Background("thinwire")
            stack.callback(self._background.stop)
            self._report = self._books.report
            self.peer = entry.peer(self._report.emit)
            self._duties = Duties(self.peer, self._report)
            stack.callback(lambda: self._background.last_call(self._leave()))
            self._resources = stack.pop_all()
        self._exchanged_at = self.peer.doors.now()
        self._carried = 0  # weight that came to no round yet: the loop gives it again, with that of the steps since
        self._flight: asyncio.Task[RoundReport] | None = None
        self._begun, self._due = asyncio.Event(), asyncio.Event()
        self.steps: int | None = None
        """Inner steps of the next round, once the peer is a member; 0: the round is due at once."""
        self._traffic = (0, 0)
        self.check, self.ask = self._background.check, self._background.ask

    def open(self) -> None:
        """Open the doors and find the run. Raises PortTaken, NoSwarm, Refused, ManifestMismatch."""
        self._joins = self._background.call(self._open())

    async def _open(self) -> bool:
        await self._background.work(warm_up)
        joins = await self._entry.begin(self.peer)
        self._operations = operations_of(self.peer)
        self._tasks = [
            asyncio.create_task(self._books.keep_telling(self.peer)),
            asyncio.create_task(self._keep_watch()),
        ]
        return joins

    async def _keep_watch(self) -> None:
        self._background.fail(await self._duties.trouble())

    def status(self) -> Status:
        """What `thinwire status` shows."""
        return self.ask(lambda: self._report.snapshot(self.peer))

    def emit(self, kind: str, fields: Mapping[str, object]) -> None:
        """Write an event."""
        self.ask(lambda: self._report.emit(kind, fields))

    def take_up(self, layout: Layout, theta: Floats, *, read: Read, write: Write, device: str) -> None:
        """Become a member, see `Peer.take_up`."""
        self._report.device = device
        self._report.phase = "joining" if self._joins else "starting"
        work = self._background.work
        self._background.call(self.peer.take_up(layout, theta, read=read, write=write, work=work, joins=self._joins))
        if self.peer.manifest.overlap:
            self.ask(lambda: self._duties.train_on(self._until_due))
        self.emit("ready", {"round": self.peer.replica.round, "parameters": layout.total})
        self.ask(self._duties.follow)
        self.steps = self.peer.steps(0.0)
        self._report.phase = "training"
        self._exchanged_at = self.peer.doors.now()

    def average(self, prepared: Prepared[Some], name: str, grace: float | None) -> Pending[Some]:
        """Begin an average, see `Swarm.average`. Raises ValueError when too many are in progress."""
        if self._background.started >= AT_ONCE:
            raise ValueError(f"{AT_ONCE} averages are in progress: wait for some of them")
        wait = self.peer.manifest.exchange.seconds if grace is None else grace
        return Pending(
            self._background,
            lambda: self._operations.begin(name, prepared.plan, prepared.share, grace=wait),
            prepared,
            self.peer.doors.now,
        )

    def exchange(self, *, steps: int, weight: int, loss: float | None) -> RoundReport:
        """One round, see `Rounds.sync`."""
        self.ask(self._due.set)
        return self._background.call(self._exchange(steps, weight, loss))

    def begin(self, *, steps: int, weight: int, loss: float | None) -> RoundReport | None:
        """The first part of an exchange: what goes out has been read when it returns. The report, when that was all already."""
        return self._background.call(self._begin(steps, weight, loss))

    def finish(self) -> RoundReport:
        """The rest of it: waits for the verdict, and sets the parameters."""
        return self._background.call(self._finish())

    def abandon(self) -> None:
        """Have done with an exchange that has begun, whatever becomes of it."""
        self._background.last_call(self._abandon())

    async def _abandon(self) -> None:
        if self._flight is not None:
            await cancelled(self._flight)
            self._flight = None

    def copy(self) -> Floats:
        """The outer parameters."""
        return self._background.call(self._background.work(lambda: self.peer.replica.theta.copy()))

    async def _begin(self, steps: int, weight: int, loss: float | None) -> RoundReport | None:
        self._begun.clear()
        self._due.clear()
        self._flight = flight = asyncio.create_task(self._exchange(steps, weight, loss))
        begun = asyncio.create_task(self._begun.wait())
        try:
            await asyncio.wait((flight, begun), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await cancelled(flight)
            raise
        finally:
            begun.cancel()
        return await self._finish() if flight.done() else None

    async def _finish(self) -> RoundReport:
        flight, self._flight = self._flight, None
        assert flight is not None, "no exchange has begun"
        self._due.set()
        return await flight  # and when this is cancelled, so is that

    async def _until_due(self) -> None:
        self._exchanged_at = self.peer.doors.now()
        self._begun.set()
        await self._due.wait()

    async def _exchange(self, steps: int, weight: int, loss: float | None) -> RoundReport:
        peer, now = self.peer, self.peer.doors.now
        if steps and weight > self._carried:
            self._report.speed = (weight - self._carried) / max(1e-9, now() - self._exchanged_at)
        self._carried = weight
        await peer.rounds.settled()
        before = peer.replica.newest
        try:
            outcome, seconds = await self._duties.exchange(steps=steps, weight=weight, loss=loss)
        finally:
            if not peer.manifest.overlap:
                self._exchanged_at = now()
            self.steps = peer.steps(self._report.speed)
        missing = {who.hex(): reason for who, reason in outcome.missing.items()}
        committed = outcome.commit is not None
        # Asked last: the digest of a round that has just been made is not there yet.
        moved = not (committed or outcome.taken or peer.manifest.asynchronous) and peer.replica.newest != before
        adopted = committed or outcome.dropped or moved
        if committed or adopted or outcome.taken:
            self._carried = outcome.kept
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
            outcome.kept,
            outcome.taken,
        )

    def save_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return self.ask(lambda: self._duties.save_due)

    def save(self, private: Callable[[], PrivateState | None]) -> None:
        """Write a checkpoint with this private state, unless there is one of this round. In the caller's thread."""
        follows = self.peer.manifest.asynchronous
        self.settle()
        if follows:
            self._background.call(self.peer.rounds.rest())
        try:
            if self.peer.manifest.chained:  # what is under way changes the state meanwhile, there
                saved = self._background.call(self._background.work(lambda: self._duties.save(private)))
            else:
                saved = self._duties.save(private)
            self.ask(lambda: self._duties.saved(saved))
        finally:
            if follows:
                self.ask(self.peer.rounds.go_on)

    def settle(self) -> None:
        """Wait until the last round has its digest, if there is still somebody to make it."""
        if self.peer.ready:
            self._background.last_call(self.peer.rounds.settled())

    def linger(self) -> None:
        """Let the others get what they need from us. Raises what has gone wrong in the background."""
        self._background.call(self._linger())

    async def _linger(self) -> None:
        await self._duties.linger()
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                while not self.peer.presence.outbox.idle:
                    await asyncio.sleep(TICK)

    def close(self) -> None:
        """Say goodbye and give everything back: threads, ports, the home. A second call does nothing."""
        self._resources.close()

    async def _leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._abandon()
        await self._duties.leave()
        self._books.tell(self.peer)
