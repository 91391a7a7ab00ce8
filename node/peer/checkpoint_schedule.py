"""Checkpoints of a running peer: when they are due, and the task that writes one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from thinwire.node.peer.peer import Peer
from thinwire.node.peer.reporter import Reporter
from thinwire.node.runtime.asyncio_extra import Work, cancelled, uninterrupted
from thinwire.node.state.checkpoint_store import SaveFailed, SaveOutcome
from thinwire.node.state.snapshot import PrivateState

SAVE_SECONDS, SAVE_ROUNDS = 30.0, 10
"""Least seconds and least rounds between two checkpoints; the last round is always saved."""


class CheckpointSchedule:
    """Checkpoints of one peer. Everything but `save` belongs to the loop's thread.

    `work`: runs a function while nothing changes the replica and the model is not trained.
    """

    def __init__(self, peer: Peer, report: Reporter, work: Work) -> None:
        self._peer, self._report, self._now, self._work = peer, report, peer.environment.now, work
        self._saved_at, self._saved_round, self._first = self._now(), 0, True
        self._writer: asyncio.Task[None] | None = None
        self._reported = False
        """True if an event has told that the disk is slow, or that training waits for it."""
        self._alarm = ""
        """Alarm about the last checkpoint; empty if it could be written."""

    @property
    def _due(self) -> bool:
        # Without any checkpoint an outage of all peers would end the run.
        if self._first and self._peer.checkpointer.digest is None:
            return True
        rounds = self._peer.replica.round - self._saved_round
        # A state that was taken over may be that of an earlier round.
        return self._now() - self._saved_at > SAVE_SECONDS and not 0 <= rounds < SAVE_ROUNDS

    async def begin_if_due(self, private: Callable[[], PrivateState | None]) -> None:
        """Begin a checkpoint if one is due; call this between two rounds.

        Returns when the private state of training is copied; a task writes the checkpoint. While it runs, no other one
        begins. Without memory for copies, returns when the private state or all of the checkpoint is written. `private` runs in
        `work`. Raises an error of our own in the last checkpoint.
        """
        peer = self._peer
        if not self._due:
            return
        self._saved_at, self._saved_round, self._first = self._now(), peer.replica.round, False
        if self._writer is not None and not self._writer.done():
            if not self._reported:
                detail = "the disk takes longer than the interval between checkpoints, so some are skipped"
                self._report.emit("checkpoint", {"detail": detail})
            self._reported = True
            return
        await self.written()
        began = self._now()
        if await self._work(lambda: peer.checkpointer.begin(peer.replica, peer.layout, private())):
            written, loop = asyncio.Event(), asyncio.get_running_loop()
            writer = self._writer = asyncio.create_task(self._write(partial(loop.call_soon_threadsafe, written.set)))
            if not peer.checkpointer.waits:
                return
            part, done = "the private state is", _first(writer, written)
        else:
            part, done = "all is", self._write_now(private)
        if not self._reported:
            detail = f"no memory to copy the state for a checkpoint, so training waits until {part} written"
            self._report.emit("checkpoint", {"detail": detail})
        self._reported = True
        await uninterrupted(done)
        # Other peers wait for ours meanwhile, so such writes take at most a tenth of the time.
        self._saved_at = self._now() + 9 * (self._now() - began)

    async def _write(self, private_written: Callable[[], object]) -> None:
        peer = self._peer
        self.saved(await peer.checkpointer.write(peer.layout, private_written))

    async def _write_now(self, private: Callable[[], PrivateState | None]) -> None:
        self.saved(await self._work(lambda: self._peer.save(private())))

    async def written(self) -> None:
        """Wait until no checkpoint is being written. Raises an error of our own in the last one."""
        writer = self._writer
        if writer is not None:
            await asyncio.wait([writer])
            self._writer = None
            writer.result()

    async def abandon(self) -> None:
        """Stop waiting for a checkpoint that is being written, like a killed process."""
        if self._writer is not None:
            await cancelled(self._writer)

    def save(self, private: Callable[[], PrivateState | None]) -> SaveOutcome | None:
        """Write a checkpoint unless this state is saved already.

        Blocks for the disk: call it in the worker, after `written` and `settled`.
        """
        peer = self._peer
        return peer.save(private()) if peer.ready and peer.replica.digest != peer.checkpointer.digest else None

    def saved(self, outcome: SaveOutcome | None) -> None:
        """Record the result of `save`. An alarm about failures ends with the next checkpoint that is written."""
        if isinstance(outcome, SaveFailed):
            if self._alarm != (alarm := f"no checkpoint: {outcome.reason}"):
                self._end_alarm(f"it was followed by another one: {alarm}")
                self._alarm = alarm
                self._report.emit("alarm", {"detail": alarm})
        elif outcome is not None:
            self._report.checkpoint = str(outcome.path)
            self._end_alarm("checkpoints are written again")

    def _end_alarm(self, why: str) -> None:
        alarm, self._alarm = self._alarm, ""
        if alarm:
            self._report.end_alarm(alarm, why)


async def _first(task: asyncio.Task[None], event: asyncio.Event) -> None:
    """Wait until the event is set or the task has ended."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    await cancelled(waiting)
