"""Bulk streams: frames with large payloads as sealed records over plain TCP.

The dialler begins with session id, stream number and a proof of the key. Each number is accepted once per session,
which prevents replay. Records then flow both ways. Any failure closes the stream.

A stream reads records here, and writes them with a `RecordWriter`. Large records are opened and hashed in threads, one at a
time. Then the thread alone uses the cipher and the buffer. Sockets are read, and all else happens, on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Literal, Protocol, TypeAlias, cast

import blake3
import numpy as np
from cryptography.exceptions import InvalidTag
from numpy.typing import NDArray
from thinwire.collectives.blocking_work import OrderedWork, Workers
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.collectives.transport.tcp_options import tune
from thinwire.collectives.transport.zeromq.sockets.limits import Limits
from thinwire.collectives.transport.zeromq.sockets.listener import HalfOpen
from thinwire.collectives.transport.zeromq.streams.record_crypto import (
    EXPRESS,
    LENGTHS,
    MAX_BULK,
    MAX_EXPRESS,
    OPENING,
    TAG,
    RecordCipher,
    parse_lengths,
    record_size,
    session_of,
    stream_keys,
)
from thinwire.collectives.transport.zeromq.streams.record_writer import RecordWriter, WriterSetup

UNOPENED = 4 << 20
"""Bytes of received records that may wait to be opened; a stream with more is not read.

Of payloads in shared memory, about as many bytes are opened in one turn of the event loop.
"""

ALIGNED = 64
"""Bytes of a cache line."""

State: TypeAlias = Literal["open", "lost", "closed"]
"""State of a stream.

- "open": from the beginning.
- "lost": the connection has ended. Records that came before are being opened, and count.
- "closed": no record is delivered any more.
"""


class StreamOwner(Protocol):
    """The pool that a stream belongs to."""

    def joined(self, stream: Stream, number: int) -> None:
        """Add a stream whose proof is right. Raises ValueError if the number was used before."""
        ...

    def arrived(self, stream: Stream, head: bytes, payload: memoryview, digest: bytes) -> None:
        """Handle an opened record. digest: blake3 of the payload.

        Raises ValueError if it holds no valid frame.
        """
        ...

    def flushed(self, stream: Stream) -> None:
        """Note that a stream's buffers are empty: it takes the next record."""
        ...

    def broken(self, stream: Stream, reason: str) -> None:
        """Note that a stream is closed."""
        ...


FindOwner = Callable[[bytes], "tuple[StreamOwner, bytes] | None"]
"""Return the owner and secret of a session id, or None if unknown.

Proves nothing yet and changes nothing.
"""


class Stream(asyncio.BufferedProtocol):
    """One sealed stream. Reads straight into a pooled buffer, decrypts in place and passes it on uncopied.

    workers: threads for large records; None: the event loop does everything.
    """

    shared = False
    """True if payloads are in shared memory."""

    def __init__(
        self,
        pool: BufferPool,
        limits: Limits,
        find_owner: FindOwner | None = None,
        crowd: HalfOpen | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.state: State = "open"
        self.reason = ""
        """Why the stream is closed; "" before."""
        self.down = 0
        """Bytes received so far."""
        self.by_peer = False
        """True if the other side or the network ended it."""
        self._pool, self._limits, self._find_owner, self._crowd = pool, limits, find_owner, crowd
        self._source = ""
        self._workers = workers
        self._owner: StreamOwner | None = None
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._writer: RecordWriter | None = None
        self._opener: RecordCipher | None = None
        self._opening = OrderedWork(workers, self._failed)
        self._incoming: NDArray[np.uint8] | None = None
        # `_view` is the read buffer: `_small`, or `_incoming` while a record arrives. It holds `_have` bytes, `_need`
        # are needed to continue, and one read may go up to `_room`.
        self._small = memoryview(bytearray(OPENING.size + TAG))
        self._view = self._small
        self._have, self._need = 0, OPENING.size + TAG if find_owner else LENGTHS.size
        self._room = self._need
        self._head = self._payload = self._first = 0
        self._most = MAX_BULK
        self._paused = self._behind = self._stopped = False  # by the owner; by records to open; in effect
        self._timer: asyncio.TimerHandle | None = None
        self._began, self._mark = 0.0, 0

    # --- lifecycle

    def open(self, owner: StreamOwner, secret: bytes, number: int) -> None:
        """Prove the secret and start, on the side that dialled. Call once connected."""
        assert self._transport is not None
        sealer, self._opener = stream_keys(secret, number)
        self._writer = self._new_writer(self._setup(self._transport, sealer))
        self._writer.prove(OPENING.pack(session_of(secret), number))
        self._start(owner, number)

    def _setup(self, transport: asyncio.Transport, sealer: RecordCipher) -> WriterSetup:
        stall = self._limits.stall
        return WriterSetup(transport, sealer, self._pool, self._workers, stall, self._flushed, self._failed)

    def _new_writer(self, setup: WriterSetup) -> RecordWriter:
        return RecordWriter(setup)

    @property
    def writer(self) -> RecordWriter:
        """Writer of the stream's records; only once the dialler has proved the secret."""
        assert self._writer is not None
        return self._writer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio.Transport, but have the same methods.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0, 0)
        source = self._set_options(self._transport)
        if self._find_owner is None:
            return
        self._timer = self._loop.call_later(self._limits.handshake, self.fail, "no proof in time")
        if self._crowd is not None:
            self._source = source
            if not self._crowd.add(self._source, self._crowded_out):
                self.fail("too many connections from there")

    def _set_options(self, transport: asyncio.Transport) -> str:
        """Set the socket's options; return the address of the other side."""
        tune(transport.get_extra_info("socket"))
        return str(transport.get_extra_info("peername")[0])

    def connection_lost(self, exc: Exception | None) -> None:
        self.by_peer = self.state == "open"
        if self.state == "open":
            self.state = "lost"
            self._close_writer()
        self._after_all(partial(self._end, "stream reset" if exc else "stream closed by the peer"))

    def _after_all(self, then: Callable[[], None]) -> None:
        """Call `then` once what came before the end of the connection is delivered: it counts."""
        self._opening.finish(then)

    def eof_received(self) -> bool:
        return False

    def fail(self, reason: str, *, flush: bool = False) -> None:
        """Close the stream, dropping unwritten data unless `flush`; stop reading."""
        transport = self._transport
        self._end(reason)
        if transport is not None and not transport.is_closing():
            transport.close() if flush else transport.abort()

    def _start(self, owner: StreamOwner, number: int) -> None:
        owner.joined(self, number)
        self._owner = owner
        self._most = MAX_EXPRESS if number == EXPRESS else MAX_BULK
        self.writer.take_next()

    def _flushed(self) -> None:
        if self._owner is not None:
            self._owner.flushed(self)

    def _end(self, reason: str) -> None:
        if self.state == "closed":
            return
        self.state, self.reason = "closed", reason
        if self._timer:
            self._timer.cancel()
        # A buffer that the event loop may still use is left to the garbage collector and never lent again.
        self._incoming = None
        self._opening.close(self._check_over)
        self._close_writer()
        self._leave_crowd()
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.broken(self, reason)

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close(self._check_over)

    def _check_over(self) -> None:
        writing = self._writer is not None and self._writer.busy
        if self.state == "closed" and not self._opening.busy and not writing:
            self._over()

    def _over(self) -> None:
        """Free what threads have used: the stream is closed, and no thread works for it."""

    def _failed(self, error: Exception) -> None:
        """Close the stream because of a record that could not be sealed, opened or handled."""
        if isinstance(error, InvalidTag):
            self.fail("a record does not open with the agreed key")
        elif isinstance(error, ValueError):
            self.fail(str(error))
        elif isinstance(error, OSError):
            self.by_peer = True
            self.fail("stream reset")
        else:
            self.fail("internal error")
            raise error

    def _leave_crowd(self) -> None:
        """Remove the stream from the unauthenticated ones: it has authenticated or closed."""
        if self._find_owner is not None and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._crowd is not None:
            self._crowd.remove(self._source, self._crowded_out)
        self._find_owner = None

    def _crowded_out(self) -> None:
        self.fail("too many unproved connections")

    def pause_writing(self) -> None:
        """Do nothing: the writer checks the size of the buffer itself."""

    def resume_writing(self) -> None:
        if self._writer is not None:
            self._writer.resume()

    # --- reading

    def pause(self, paused: bool) -> None:
        """Stop or resume reading; while stopped, the peer's data waits in its own buffers."""
        if self._transport is not None and self.state != "closed":
            self._paused = paused
            self._read_or_wait()

    def _read_or_wait(self) -> None:
        stopped = self._paused or self._behind
        if self._transport is None or self._transport.is_closing() or stopped == self._stopped:
            return
        self._stopped = stopped
        if stopped:
            self._transport.pause_reading()
        else:
            self._began, self._mark = self._loop.time(), self.down
            self._transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._have : self._room]

    def buffer_updated(self, count: int) -> None:
        self._have += count
        self.down += count
        try:
            while self._have >= self._need and self.state == "open":
                self._advance()
        except (InvalidTag, ValueError) as error:
            self._failed(error)

    def _advance(self) -> None:
        if self._find_owner is not None:
            self._admit(self._find_owner)
        elif self._incoming is None:
            self._begin()
        else:
            self._finish()

    def _admit(self, find_owner: FindOwner) -> None:
        opening = bytes(self._small[: OPENING.size])
        session, number = OPENING.unpack(opening)
        found = find_owner(session)
        if found is None:
            raise ValueError("a stream of no session")
        owner, secret = found
        assert self._transport is not None
        self._opener, sealer = stream_keys(secret, number)
        self._opener.check(opening, bytes(self._small[OPENING.size : self._need]))
        self._writer = self._new_writer(self._setup(self._transport, sealer))
        self._have, self._need, self._room = 0, LENGTHS.size, LENGTHS.size
        self._leave_crowd()
        self._start(owner, number)

    def _begin(self) -> None:
        self._head, self._payload = parse_lengths(self._small[: LENGTHS.size], self._most)
        self._need = record_size(self._head, self._payload)
        # One read takes the record and the lengths of the next. The payload is aligned to a cache line.
        self._room = self._need + LENGTHS.size
        self._first = -(self._need - self._payload - TAG) % ALIGNED
        self._incoming = self._pool.take(self._first + self._room)
        self._view = self._incoming.data[self._first :]
        self._view[: LENGTHS.size] = self._small[: LENGTHS.size]
        self._began = self._loop.time()
        if self._timer is None:
            self._mark = self.down
            self._timer = self._loop.call_later(self._limits.rate_window, self._check_rate)

    def _finish(self) -> None:
        assert self._incoming is not None
        record = self._view[: self._need]
        surplus = self._have - self._need
        self._small[:surplus] = self._view[self._need : self._have]
        stop = self._first + self._need - TAG
        payload = self._pool.part(self._incoming, stop - self._payload, stop)
        self._incoming, self._view = None, self._small
        self._have, self._need, self._room = surplus, LENGTHS.size, LENGTHS.size
        self._opening.run(partial(self._open, self._head, record, payload), self._pass_on, record.nbytes)
        self._behind = self._opening.held > UNOPENED
        self._read_or_wait()

    def _open(self, head: int, record: memoryview, payload: memoryview) -> tuple[bytes, memoryview, bytes]:
        """Open a record, in any thread; return its head, its payload and the payload's hash."""
        assert self._opener is not None
        return self._opener.open(head, record), payload, blake3.blake3(payload).digest()

    def _pass_on(self, opened: tuple[bytes, memoryview, bytes]) -> None:
        if self._owner is not None:
            self._owner.arrived(self, *opened)
        self._behind = self._opening.held > UNOPENED
        if self.state == "open":
            self._read_or_wait()

    def _check_rate(self) -> None:
        self._timer = None
        if self._incoming is None:
            return
        limits = self._limits
        old = self._loop.time() - self._began >= limits.rate_window
        if old and not self._stopped and self.down - self._mark < limits.rate * limits.rate_window:
            self.fail(f"slower than {limits.rate} bytes/s")
            return
        self._mark = self.down
        self._timer = self._loop.call_later(limits.rate_window, self._check_rate)
