"""Stream of a link inside one machine: payloads in shared memory, records on a Unix socket.

A sealed record has the head of a frame and the place of its payload, or the places of payloads that its sender does not need
any more.
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
from thinwire.collectives.transport.shared_memory.places import MOST_OFFSETS, Places
from thinwire.collectives.transport.shared_memory.region import SharedRegion
from thinwire.collectives.transport.zeromq.sockets.limits import Limits
from thinwire.collectives.transport.zeromq.streams.record_crypto import LENGTHS, MAX_BULK, TAG, record_size
from thinwire.collectives.transport.zeromq.streams.record_writer import RecordWriter, WriterSetup
from thinwire.collectives.transport.zeromq.streams.stream import UNOPENED, FindOwner, Stream
from thinwire.swarm.frame import HEADER_BYTES, nbytes

if TYPE_CHECKING:
    from thinwire.swarm.frame import Buffer

PLACE = struct.Struct("!QI")
"""Offset and bytes of a payload in the sender's region."""

OFFSET = struct.Struct("!Q")
"""Offset of a payload in the other side's region that may be used for other payloads."""

IN_PLACE = 1 << 16
"""Fewest bytes of a payload that is used where it is.

A smaller one costs less to copy than to follow, and would leave small gaps in the region if it was held for long.
"""

READ = 1 << 15
"""Bytes of records that one read takes; a record has at most some hundred."""


class SharedMemoryWriter(RecordWriter):
    """Writer of records with the places of payloads, which are in `region`."""

    def __init__(self, region: SharedRegion, setup: WriterSetup) -> None:
        super().__init__(setup)
        self.region = region
        """Memory for the payloads that we send."""

    def write(self, head: bytes, payload: Buffer) -> None:
        """Copy the payload into our region and send its place; only when `idle`."""
        assert self.idle
        size = nbytes(payload)
        start = self.region.reserve(size)
        self.up += size
        self.idle = False
        fill = partial(self.region.fill, start, payload)
        self._sealing.run(fill, lambda _: self._send_place(head, PLACE.pack(start, size)), size)

    def _send_place(self, head: bytes, place: bytes) -> None:
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
        return self.region.fits(MAX_BULK[1]) and not self.unsent

    @property
    def _left(self) -> int:
        return self.region.used + self.unsent


class SharedMemoryStream(Stream):
    """One stream with two regions of shared memory.

    A large payload near the beginning of the other side's region is hashed and used where it is, as long as anything
    refers to it. The last bytes of a region (`SharedLimits.copied`) are for payloads that are copied out at once, so that
    the other side can send whatever we hold. If the other side is in another container, all payloads are copied.
    """

    shared = True

    def __init__(
        self,
        pool: BufferPool,
        limits: Limits,
        connection: LocalConnection,
        find_owner: FindOwner | None = None,
        workers: Workers | None = None,
    ) -> None:
        super().__init__(pool, limits, find_owner, workers=workers)
        self._connection: LocalConnection = connection
        self._small = self._view = memoryview(bytearray(READ))
        self._waiting: deque[tuple[bytes, int, int]] = deque()  # head, offset and bytes of payloads to take
        self._more = False
        """True if the event loop will take more of them, in its next turn."""
        self._in_place = connection.reader.size - limits.shared.copied if connection.trusted else 0
        """Bytes of the other side's region that are used where they are."""
        self._held = Places(connection.reader.size, self._report)
        if find_owner is None:
            self._room = READ

    def _new_writer(self, setup: WriterSetup) -> RecordWriter:
        return SharedMemoryWriter(self._connection.region, setup)

    def _set_options(self, transport: asyncio.Transport) -> str:
        return "this machine"

    def _end(self, reason: str) -> None:
        super()._end(reason)
        self._waiting.clear()
        self._held.close()

    def _over(self) -> None:
        self._connection.close()

    def _advance(self) -> None:
        if self._find_owner is not None:
            self._admit(self._find_owner)
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
        self._take_out()

    def _take(self, length: int, place: int, record: memoryview) -> None:
        assert self._opener is not None and self._owner is not None
        head = self._opener.open(length, record)
        if not place:
            self._connection.region.release(offset for (offset,) in OFFSET.iter_unpack(head))
            self.writer.resume()
            return
        offset, size = PLACE.unpack(record[-TAG - place : -TAG])
        if size > MAX_BULK[1]:
            raise ValueError(f"payload of {size} bytes is over the limits")
        self._held.take(offset, size)
        self._waiting.append((head, offset, size))

    def _take_out(self) -> None:
        """Take payloads and pass them on, unless paused.

        After some MiB it continues in the next turn of the event loop.
        """
        reader, taken = self._connection.reader, 0
        while self._waiting and self._owner is not None and not self._paused and not self._more:
            head, offset, size = self._waiting.popleft()
            if size >= IN_PLACE and offset + size <= self._in_place:
                payload = reader.view(offset, size, self._held.release)
                self._opening.run(partial(_hashed, head, payload), self._taken_out, size)
            else:
                payload = self._pool.lend(size) if size else memoryview(bytearray())
                self._opening.run(partial(self._copy, head, offset, payload), self._taken_out, size)
            taken += size
            if taken >= UNOPENED:
                self._more = True
                self._loop.call_soon(self._take_more)

    def _take_more(self) -> None:
        self._more = False
        self._take_out()

    def _after_all(self, then: Callable[[], None]) -> None:
        if self._more:
            self._loop.call_soon(self._after_all, then)
        else:
            super()._after_all(then)

    def _copy(self, head: bytes, offset: int, payload: memoryview) -> tuple[bytes, memoryview, bytes]:
        """Copy a payload out, in any thread; return the head of its frame, the copy, and its hash."""
        self._connection.reader.read(offset, payload)
        self._held.release(offset)
        return _hashed(head, payload)

    def _taken_out(self, taken: tuple[bytes, memoryview, bytes]) -> None:
        self.down += taken[1].nbytes
        if self._owner is not None:
            self._owner.arrived(self, *taken)

    def _report(self, offsets: list[int]) -> None:
        """Report to the sender that it may use the memory of these payloads again."""
        if self.state == "open":
            self.writer.append(b"".join(map(OFFSET.pack, offsets)))

    def pause(self, paused: bool) -> None:
        """Stop or resume taking payloads.

        Records are still read, because our own payloads wait for the reports in them.
        """
        if self.state == "closed" or paused == self._paused:
            return
        self._paused = paused
        self._take_out()


def _hashed(head: bytes, payload: memoryview) -> tuple[bytes, memoryview, bytes]:
    return head, payload, blake3.blake3(payload).digest()


def _parse_lengths(data: memoryview) -> tuple[int, int]:
    """Return the lengths of head and place. Raises ValueError if no record has them."""
    head, place = LENGTHS.unpack(data)
    frame = HEADER_BYTES < head <= MAX_BULK[0] and place == PLACE.size
    offsets = 0 < head <= MOST_OFFSETS * OFFSET.size and not head % OFFSET.size and not place
    if not frame and not offsets:
        raise ValueError(f"record of {head} + {place} bytes is over the limits")
    return head, place
