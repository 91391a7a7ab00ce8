"""Stream of a link inside one machine: payloads in shared memory, records on a Unix socket.

A sealed record has the head of a frame and the place of its payload,
or the number of payloads that its sender has copied.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import blake3
from thinwire.collectives.blocking_work import Workers
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.collectives.transport.shared_memory.local_sockets import LocalConnection
from thinwire.collectives.transport.shared_memory.region import SharedRegion, whole_pages
from thinwire.collectives.transport.zeromq.limits import Limits
from thinwire.collectives.transport.zeromq.record_crypto import LENGTHS, MAX_BULK, TAG, RecordCipher, record_size
from thinwire.collectives.transport.zeromq.record_writer import RecordWriter
from thinwire.collectives.transport.zeromq.stream import Claim, Stream
from thinwire.swarm.frame import HEADER_BYTES, nbytes

if TYPE_CHECKING:
    from thinwire.swarm.frame import Buffer

PLACE = struct.Struct("!QI")
"""Offset and bytes of a payload in the sender's region."""

COPIED = struct.Struct("!I")
"""Payloads of the other side that were copied since this was last sent."""

READ = 1 << 15
"""Bytes of records that one read takes; a record has at most some hundred."""


class SharedMemoryWriter(RecordWriter):
    """Writer of records with the places of payloads, which are in `region`."""

    def __init__(
        self,
        region: SharedRegion,
        transport: asyncio.Transport,
        sealer: RecordCipher,
        pool: BufferPool,
        workers: Workers | None,
        *,
        stall: float,
        flushed: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        super().__init__(transport, sealer, pool, workers, stall=stall, flushed=flushed, failed=failed)
        self._region = region

    def write(self, head: bytes, payload: Buffer) -> None:
        """Copy the payload into our region and send its place; only when `idle`."""
        assert self.idle
        size = nbytes(payload)
        start = self._region.reserve(size)
        self.up += size
        self.idle = False
        fill = partial(self._region.fill, start, payload)
        self._sealing.run(fill, lambda _: self._tell(head, PLACE.pack(start, size)), size)

    def _tell(self, head: bytes, place: bytes) -> None:
        """Send the head of a frame and the place of its payload, which is in the region."""
        self._release_payload()
        self.append(head, place)
        self._continue()

    @property
    def unconfirmed(self) -> int:
        """0: what was sent is in the memory of this machine."""
        return 0

    @property
    def _ready(self) -> bool:
        """True if the largest payload fits into our region, and no record waits."""
        return self._region.fits(MAX_BULK[1]) and not self.unsent

    @property
    def _left(self) -> int:
        return self._region.used + self.unsent


class SharedMemoryStream(Stream):
    """One stream with two regions of shared memory.

    A payload is copied in, and its hash is that of the copy that was taken out.
    """

    shared = True

    def __init__(
        self,
        pool: BufferPool,
        limits: Limits,
        connection: LocalConnection,
        claim: Claim | None = None,
        workers: Workers | None = None,
    ) -> None:
        super().__init__(pool, limits, claim, workers=workers)
        self._connection: LocalConnection = connection
        self._small = self._view = memoryview(bytearray(READ))
        self._places: deque[tuple[bytes, int, int]] = deque()  # head, offset and bytes of payloads to copy
        self._copied = self._unsaid = 0  # payloads copied and not reported, and the memory that they occupy
        self._held = 0  # memory of all payloads that were not reported
        if claim is None:
            self._room = READ

    def _new_writer(self, transport: asyncio.Transport, sealer: RecordCipher) -> RecordWriter:
        return SharedMemoryWriter(
            self._connection.region,
            transport,
            sealer,
            self._pool,
            self._workers,
            stall=self._limits.stall,
            flushed=self._flushed,
            failed=self._failed,
        )

    def _set_options(self, transport: asyncio.Transport) -> str:
        return "this machine"

    def _end(self, reason: str) -> None:
        super()._end(reason)
        self._places.clear()

    def _over(self) -> None:
        self._connection.close()

    def _advance(self) -> None:
        if self._claim is not None:
            self._admit(self._claim)
            self._room = READ
            return
        start = 0
        while self._have - start >= LENGTHS.size and self.state == "open":
            head, place = _parse_lengths(self._small[start : start + LENGTHS.size])
            size = record_size(head, place)
            if self._have - start < size:
                break
            self._take(head, place, self._small[start : start + size])
            start += size
        self._have -= start
        if start:
            self._small[: self._have] = bytes(self._small[start : start + self._have])
        self._need = self._have + 1
        self._copy()

    def _take(self, length: int, place: int, record: memoryview) -> None:
        assert self._opener is not None and self._owner is not None
        head = self._opener.open(length, record)
        if not place:
            self._connection.region.release(COPIED.unpack(head)[0])
            self.writer.resume()
            return
        offset, size = PLACE.unpack(record[-TAG - place : -TAG])
        if size > MAX_BULK[1]:
            raise ValueError(f"payload of {size} bytes is over the limits")
        self._held += whole_pages(size)
        if self._held > self._connection.reader.size:
            raise ValueError(f"{self._held} bytes of payloads in {self._connection.reader.size} bytes of shared memory")
        self._places.append((head, offset, size))

    def _copy(self) -> None:
        """Copy payloads out and pass them on, unless paused."""
        while self._places and self._owner is not None and not self._paused:
            head, offset, size = self._places.popleft()
            payload = self._pool.lend(size) if size else memoryview(b"")
            self._opening.run(partial(self._read, head, offset, payload), self._taken_out, size)

    def _read(self, head: bytes, offset: int, payload: memoryview) -> tuple[bytes, memoryview, bytes]:
        """Copy a payload out, in any thread; return the head of its frame, the copy, and its hash."""
        self._connection.reader.read(offset, payload)
        return head, payload, blake3.blake3(payload).digest()

    def _taken_out(self, taken: tuple[bytes, memoryview, bytes]) -> None:
        size = taken[1].nbytes
        self.down += size
        self._copied, self._unsaid = self._copied + 1, self._unsaid + whole_pages(size)
        if self._owner is not None:
            self._owner.arrived(self, *taken)
        self._report()

    def _report(self) -> None:
        """Tell the sender, from time to time, how much of its memory it may use again."""
        if self._copied and self.state == "open" and self._unsaid * 4 >= self._connection.reader.size:
            self.writer.append(COPIED.pack(self._copied))
            self._held -= self._unsaid
            self._copied = self._unsaid = 0

    def pause(self, paused: bool) -> None:
        """Stop or resume copying. Records are read on, because our own payloads wait for the reports in them."""
        if self.state == "closed" or paused == self._paused:
            return
        self._paused = paused
        self._copy()


def _parse_lengths(data: memoryview) -> tuple[int, int]:
    """Return the lengths of head and place. Raises ValueError if no record has them."""
    head, place = LENGTHS.unpack(data)
    frame = HEADER_BYTES < head <= MAX_BULK[0] and place == PLACE.size
    if not frame and (head, place) != (COPIED.size, 0):
        raise ValueError(f"record of {head} + {place} bytes is over the limits")
    return head, place
