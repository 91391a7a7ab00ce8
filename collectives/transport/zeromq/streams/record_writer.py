"""Writing side of a bulk stream: frames as sealed records over TCP.

Large records are sealed and handed to the kernel in threads, one at a time. Then the thread alone uses the cipher and the
buffer. All else happens on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from thinwire.collectives.blocking_work import OrderedWork, Workers
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.collectives.transport.tcp_options import CONGESTION, DirectSocket, adapt, confirmed, hold_back, pace
from thinwire.collectives.transport.zeromq.streams.record_crypto import RecordCipher, record_size
from thinwire.swarm.frame import nbytes

if TYPE_CHECKING:
    from thinwire.swarm.frame import Buffer

BACKLOG = 1 << 18
"""Bytes of small records that may wait in a stream's write buffer."""

EMPTY = memoryview(b"")


@dataclass(frozen=True, slots=True)
class WriterSetup:
    """Arguments of a RecordWriter.

    `pool`: memory of records. `workers`: threads for large records; None: the event loop does everything. `stall`: seconds in
    which the other side must take something. `flushed()` is called when the next record is taken, `failed(error)` if a record
    cannot be sealed or sent, or the other side takes nothing.
    """

    transport: asyncio.Transport
    sealer: RecordCipher
    pool: BufferPool
    workers: Workers | None
    stall: float
    flushed: Callable[[], None]
    failed: Callable[[Exception], None]


class RecordWriter:
    """Writer of the records of one stream."""

    def __init__(self, setup: WriterSetup) -> None:
        self.idle = False
        """True if a record may be written now."""
        self.up = 0
        """Bytes of all records so far."""
        self._transport, self._sealer, self._pool = setup.transport, setup.sealer, setup.pool
        self._stall, self._tell_flushed, self._failed = setup.stall, setup.flushed, setup.failed
        self._loop = asyncio.get_running_loop()
        self._sealing = OrderedWork(setup.workers, setup.failed)
        self._direct: DirectSocket | None = None
        self._rest = EMPTY  # of a record that threads write: what the kernel has not taken
        self._sealed: asyncio.Future[None] | None = None
        self._outgoing: NDArray[np.uint8] | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._congestion = CONGESTION
        self._closed = False

    def prove(self, opening: bytes) -> None:
        """Send the opening of a stream and prove the key."""
        data = opening + self._sealer.prove(opening)
        self._transport.write(data)
        self.up += len(data)

    def take_next(self) -> None:
        """Take the first record, or the next one because all that was written has left."""
        if self._closed:
            return
        if self._stall_timer:
            self._stall_timer.cancel()
            self._stall_timer = None
        buffer, self._outgoing, self._rest = self._outgoing, None, EMPTY
        if buffer is not None:
            self._pool.give(buffer)
        self.idle = True
        self._tell_flushed()

    def pace(self, rate: int) -> None:
        """Pace at `rate` bytes/s within a record, too; before the first record.

        The event loop seals and writes then: the link is what limits, and the kernel takes little at a time.
        """
        self._sealing = OrderedWork(None, self._failed)
        pace(self._transport.get_extra_info("socket"), rate)

    # --- records with a payload, one at a time

    def takes_now(self, size: int) -> bool:
        """Return True if the payload of a frame of `size` bytes may change as soon as `write` returns."""
        return not self._sealing.takes(size)

    async def write_in_turn(self, head: bytes, payload: Buffer) -> None:
        """Seal one frame and start to send it; only when `idle`. The payload may change once this returns."""
        self.write(head, payload)
        if self._sealing.busy:
            self._sealed = self._loop.create_future()
            await self._sealed

    def write(self, head: bytes, payload: Buffer) -> None:
        """Seal one frame and start to send it; only when `idle`. If it is not taken now, use `write_in_turn`."""
        assert self.idle
        size, threaded = record_size(len(head), nbytes(payload)), not self.takes_now(nbytes(payload))
        self._outgoing = self._pool.take(size)
        record = self._outgoing.data[:size]
        self.up += size
        self.idle = False
        sock = self._transport.get_extra_info("socket")
        self._congestion = adapt(sock, self._congestion)
        hold_back(sock)
        direct = self._direct_socket() if threaded and not self.unsent else None
        self._rest = record if direct is not None else EMPTY
        seal = partial(self._seal, head, payload, record, direct)
        self._sealing.run(seal, partial(self._send, record, direct), nbytes(payload))

    def _direct_socket(self) -> DirectSocket | None:
        """Return the socket by which threads write; None if no descriptor is left: the event loop writes."""
        if self._direct is None:
            with suppress(OSError):
                self._direct = DirectSocket(self._transport.get_extra_info("socket"))
        return self._direct

    def _seal(self, head: bytes, payload: Buffer, record: memoryview, direct: DirectSocket | None) -> int:
        """Seal a record, in any thread; send what the kernel takes by `direct`, and return its bytes."""
        self._sealer.seal(head, payload, record)
        return 0 if direct is None else direct.send(record)

    def _send(self, record: memoryview, direct: DirectSocket | None, sent: int) -> None:
        """Send what is left of a record of which `sent` bytes are sent, as soon as the kernel takes more."""
        self._release_payload()
        if direct is None:
            self._transport.write(record)
        else:
            self._rest = record[sent:]
            if self._rest:
                self._loop.add_writer(direct, self._send_rest, direct)
        self._continue()

    def _send_rest(self, direct: DirectSocket) -> None:
        self._loop.remove_writer(direct)
        rest = self._rest
        self._sealing.run(partial(direct.send, rest), partial(self._send, rest, direct), rest.nbytes)

    def _release_payload(self) -> None:
        """Let the sender of a frame continue: no thread reads its payload any more."""
        sealed, self._sealed = self._sealed, None
        if sealed is not None and not sealed.done():
            sealed.set_result(None)

    # --- small records, behind what is being sent

    def post(self, head: bytes) -> None:
        """Seal a frame without payload and queue it behind data being sent. Check `crowded` first."""
        self.append(head)
        if self.unsent:
            self.idle = False
            self._watch()

    def append(self, head: bytes, payload: bytes = b"") -> None:
        """Seal a small record and add it to the write buffer."""
        if self._closed:
            return
        record = bytearray(record_size(len(head), len(payload)))
        try:
            self._sealer.seal(head, payload, memoryview(record))
        except ValueError as error:
            self._failed(error)
            return
        self.up += len(record)
        self._transport.write(record)

    # --- the progress of what was written

    @property
    def unsent(self) -> int:
        """Written bytes that the kernel has not taken yet."""
        return 0 if self._closed else self._transport.get_write_buffer_size() + self._rest.nbytes

    @property
    def crowded(self) -> bool:
        """True if nothing more should be posted before the writer is `idle`, because too much data waits."""
        return self.unsent > BACKLOG

    @property
    def unconfirmed(self) -> int:
        """Sent bytes that the other side's machine has not acknowledged yet."""
        if self._closed:
            return 0
        done = confirmed(self._transport.get_extra_info("socket"))
        return max(0, self.up - done) if done is not None else self.unsent

    @property
    def _ready(self) -> bool:
        """True if all has left, and another record may be taken."""
        return not self.unsent

    @property
    def _left(self) -> int:
        """Bytes that the other side has not taken."""
        return self.unsent

    def resume(self) -> None:
        """Take the next record if the last one has left."""
        if not self.idle and not self._sealing.busy and self._ready:
            self.take_next()

    def _continue(self) -> None:
        """Take the next record if the last one has left; else watch that it leaves."""
        if self._closed:
            return
        if self._ready:
            self.take_next()
        else:
            self._watch()

    def _watch(self) -> None:
        """Fail if the other side takes nothing for a while."""
        if self._stall_timer is None:
            self._stall_timer = self._loop.call_later(self._stall, self._check_stall, self._left)

    def _check_stall(self, before: int) -> None:
        left = self._left
        if left >= before:
            self._failed(ValueError("peer takes no data"))
        else:
            self._stall_timer = self._loop.call_later(self._stall, self._check_stall, left)

    # --- the end

    @property
    def busy(self) -> bool:
        """True if a thread works for this stream."""
        return self._sealing.busy

    def close(self, then: Callable[[], None]) -> None:
        """Write nothing more. Free what threads use, and call `then`, once no thread works for the stream."""
        if self._closed:
            return
        self._closed, self.idle = True, False
        if self._stall_timer:
            self._stall_timer.cancel()
        # A buffer that the event loop may still use is left to the garbage collector and never lent again.
        self._outgoing, self._rest = None, EMPTY
        if self._direct is not None:
            self._loop.remove_writer(self._direct)
        self._sealing.close(partial(self._over, then))

    def _over(self, then: Callable[[], None]) -> None:
        direct, self._direct = self._direct, None
        if direct is not None:
            direct.close()
        self._release_payload()
        then()
