"""The peer beside a training loop of one's own: alive in the background, exchanging while the loop waits."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from thinwire.compression.codec import Floats
from thinwire.compression.kernels import warm_up

from .background import Background, SwarmError
from .fragments import Layout
from .lock import hold
from .opening import Entry, duplicate_key
from .outer import Read
from .report import Reporter
from .snapshot import PrivateState
from .status import Status

SAVE_SECONDS = 120.0
"""Time between checkpoints; the last round is always saved."""

LINGER_SECONDS = 10.0
"""How long the others are given to fetch the last round from us before we leave."""

LEAVE_SECONDS = 10.0
"""How long saying goodbye may take."""

STATUS_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RoundReport:
    """How an exchange went.

    round: the last round committed here. committed: whether this exchange committed one. adopted: whether the model now has
    the swarm's parameters. contributors: peers whose work is in them. seconds: how long the loop waited. missing: ids
    (hexadecimal) of peers that were left out, with reasons.
    """

    round: int
    committed: bool
    adopted: bool
    contributors: int
    seconds: float
    missing: Mapping[str, str] = field(default_factory=dict)


class Companion:
    """A peer and the thread it lives in, from the first knock to the goodbye. All methods are the training loop's to call.

    `open` first, then `take_up`, then `exchange` as often as rounds are due; `close` at the end, whatever happened.
    """

    def __init__(self, entry: Entry) -> None:
        """Raises InUseError."""
        config = entry.config
        self._entry = entry
        self._watch: asyncio.Task[None] | None = None
        self._saved_at, self._saved_round = time.monotonic(), 0
        self._exchanged_at = time.monotonic()
        with ExitStack() as stack:
            stack.enter_context(hold(config.directories.lock))
            self._report = Reporter(
                config.directories.run(entry.run_id).events,
                config.directories.status,
                name=config.name,
                device="",
                now=time.monotonic,
                wall=time.time,
            )
            stack.callback(self._report.close)
            self._background = Background("thinwire")
            stack.callback(self._background.stop)
            self.peer = entry.peer(self._report.emit)
            stack.callback(lambda: self._background.last_call(self._leave()))
            self._resources = stack.pop_all()
        self.check, self.ask = self._background.check, self._background.ask

    def open(self) -> None:
        """Open the doors and find the run. Raises PortTaken, NoSwarm, Refused, ManifestMismatch."""
        self._joins = self._background.call(self._open())

    async def _open(self) -> bool:
        await self._background.work(warm_up)
        joins = await self._entry.begin(self.peer)
        self._watch = asyncio.create_task(self._keep_watch())
        return joins

    async def _keep_watch(self) -> None:
        peer = self.peer
        while True:
            self._report.status(peer, self._entry.identity.peer_id, self._entry.run_id)
            if peer.running.done():
                error = None if peer.running.cancelled() else peer.running.exception()
                return self._background.fail(error or SwarmError("the swarm's session has ended"))
            if peer.presence.duplicate.is_set():
                return self._background.fail(duplicate_key(self._entry.identity))
            await asyncio.sleep(STATUS_SECONDS)

    def status(self) -> Status:
        """What `thinwire status` shows."""
        return self.ask(lambda: self._report.snapshot(self.peer, self._entry.identity.peer_id, self._entry.run_id))

    def emit(self, kind: str, fields: Mapping[str, object]) -> None:
        """Write an event."""
        self.ask(lambda: self._report.emit(kind, fields))

    def take_up(
        self, layout: Layout, theta: Floats, *, read: Read, write: Callable[[Floats], None], device: str
    ) -> None:
        """Become a member, see `Peer.take_up`."""
        self._report.device = device
        self._report.phase = "joining" if self._joins else "starting"
        work = self._background.work
        self._background.call(self.peer.take_up(layout, theta, read=read, write=write, work=work, joins=self._joins))
        self.emit("ready", {"round": self.peer.replica.round, "parameters": layout.total})
        self._report.phase, self._saved_round = "training", self.peer.replica.round
        self._exchanged_at = time.monotonic()

    def exchange(self, *, steps: int, weight: int, loss: float | None) -> RoundReport:
        """One round, see `Rounds.sync`."""
        return self._background.call(self._exchange(steps, min(weight, self.peer.manifest.max_weight), loss))

    async def _exchange(self, steps: int, weight: int, loss: float | None) -> RoundReport:
        peer, report, before, began = self.peer, self._report, self.peer.replica.digest, time.monotonic()
        report.phase, report.speed = "exchanging", weight / max(1e-9, began - self._exchanged_at)
        try:
            outcome = await peer.rounds.sync(weight=weight, loss=loss or 0.0, speed=report.speed)
        finally:
            report.phase, self._exchanged_at = "training", time.monotonic()
        seconds, count = self._exchanged_at - began, len(outcome.contributors)
        if outcome.commit is not None:
            shown = math.nan if loss is None else loss
            report.round(
                peer,
                loss=shown,
                contributors=count,
                missing=outcome.missing,
                seconds=seconds,
                steps=steps,
                tokens=weight,
            )
            peer.drop_anchor()
        else:
            report.uncommitted(peer)
        missing = {who.hex(): reason for who, reason in outcome.missing.items()}
        adopted = peer.replica.digest != before
        return RoundReport(peer.replica.round, outcome.commit is not None, adopted, count, seconds, missing)

    def save_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return time.monotonic() > self._saved_at + SAVE_SECONDS

    def save(self, private: Callable[[], PrivateState | None]) -> None:
        """Write a checkpoint with this private state, unless there is one of this round. In the caller's thread."""
        if self.peer.ready and self.peer.replica.round != self._saved_round:
            self._report.checkpoint = self.peer.save(private()) or self._report.checkpoint
            self._saved_at, self._saved_round = time.monotonic(), self.peer.replica.round

    def linger(self) -> None:
        """Let the others get what they need from us. Raises what has gone wrong in the background."""
        self.check()
        if self.peer.ready:
            self._background.call(self.peer.linger(LINGER_SECONDS))

    def close(self) -> None:
        """Say goodbye and give everything back: threads, ports, the home. A second call does nothing."""
        self._resources.close()

    async def _leave(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await self.peer.leave()
        if self.peer.ready:
            replica = self.peer.replica
            self._report.emit("left", {"round": replica.round, "digest": replica.digest.hex()})
        self._report.phase = "done"
        self._report.status(self.peer, self._entry.identity.peer_id, self._entry.run_id)
