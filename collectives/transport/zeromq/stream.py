"""Bulk streams: frames with large payloads as sealed records over plain TCP.

The dialler begins with session id, stream number and a proof of the key. Each number is accepted once per session,
which prevents replay. Records then flow both ways. Any failure closes the stream.

Large records are sealed and handed to the kernel, or opened and hashed, in threads: one record at a time in each direction.
Then the thread alone uses the cipher and the buffer. Sockets are read, and all else happens, on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import blake3
import numpy as np
from cryptography.exceptions import InvalidTag
from numpy.typing import NDArray
from thinwire.collectives.blocking_work import OrderedWork, Workers
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.collectives.transport.tcp_options import (
    CONGESTION,
    DirectSocket,
    adapt,
    confirmed,
    hold_back,
    pace,
    round_trip,
    tune,
)
from thinwire.collectives.transport.zeromq.limits import Limits
from thinwire.collectives.transport.zeromq.listener import HalfOpen
from thinwire.collectives.transport.zeromq.record_crypto import (
    EXPRESS,
    LENGTHS,
    MAX_BULK,
    MAX_WORD,
    OPENING,
    TAG,
    RecordCipher,
    parse_lengths,
    record_size,
    session_of,
    stream_keys,
)
from thinwire.swarm.frame import nbytes

if TYPE_CHECKING:
    from thinwire.swarm.frame import Buffer


BACKLOG = 1 << 18
"""Bytes of small frames that may wait in a stream's write buffer."""

UNOPENED = 4 << 20
"""Bytes of received records that may wait to be opened; a stream with more is not read."""

ALIGNED = 64
"""Bytes of a cache line."""

EMPTY = memoryview(b"")


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


Claim = Callable[[bytes], "tuple[StreamOwner, bytes] | None"]
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
        claim: Claim | None = None,
        crowd: HalfOpen | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.idle = False
        """True if a record may be written now."""
        self.up = 0
        self.down = 0
        self.reason = ""
        """Why the stream is closed; "" while it is open."""
        self.by_peer = False
        """True if the other side or the network ended it."""
        self._pool, self._limits, self._claim, self._crowd = pool, limits, claim, crowd
        self._source = ""
        self._lost = False  # The connection is; `reason` is set once all that came before has been opened.
        self._owner: StreamOwner | None = None
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._sealer: RecordCipher | None = None
        self._opener: RecordCipher | None = None
        self._sealing, self._opening = OrderedWork(workers, self._failed), OrderedWork(workers, self._failed)
        self._direct: DirectSocket | None = None
        self._rest = EMPTY  # of a record that threads write: what the kernel has not taken
        self._sealed: asyncio.Future[None] | None = None
        self._outgoing: NDArray[np.uint8] | None = None
        self._incoming: NDArray[np.uint8] | None = None
        # `_view` is the read buffer: `_small`, or `_incoming` while a record arrives. It holds `_have` bytes, `_need`
        # are needed to continue, and one read may go up to `_room`.
        self._small = memoryview(bytearray(OPENING.size + TAG))
        self._view = self._small
        self._have, self._need = 0, OPENING.size + TAG if claim else LENGTHS.size
        self._room = self._need
        self._head = self._payload = self._first = 0
        self._most = MAX_BULK
        self._paused = self._behind = self._stopped = False  # by the owner; by records to open; in effect
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._began, self._mark = 0.0, 0
        self._congestion = CONGESTION

    # --- lifecycle

    def open(self, owner: StreamOwner, secret: bytes, number: int) -> None:
        """Prove the secret and start, on the side that dialled. Call once connected."""
        assert self._transport is not None
        self._owner = owner
        self._sealer, self._opener = stream_keys(secret, number)
        opening = OPENING.pack(session_of(secret), number)
        data = opening + self._sealer.prove(opening)
        self._transport.write(data)
        self.up += len(data)
        self._start(owner, number)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio.Transport, but have the same methods.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0, 0)
        source = self._set_options(self._transport)
        if self._claim is None:
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
        self.by_peer = not self.reason
        self.idle, self._lost = False, True
        if not self.reason:
            self._sealing.close(self._release_payload)
        # What came before the end counts.
        self._opening.finish(partial(self._end, "stream reset" if exc else "stream closed by the peer"))

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
        self._most = MAX_WORD if number == EXPRESS else MAX_BULK
        self.idle = True
        owner.flushed(self)

    def _end(self, reason: str) -> None:
        if self.reason:
            return
        self.reason, self.idle = reason, False
        for timer in (self._timer, self._stall):
            if timer:
                timer.cancel()
        # Buffers that the event loop may still use are left to the garbage collector and never lent again.
        self._incoming = self._outgoing = None
        self._rest = EMPTY
        if self._direct is not None:
            self._loop.remove_writer(self._direct)
        self._opening.close(self._check_over)
        self._sealing.close(self._check_over)
        self._settle()
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.broken(self, reason)

    def _check_over(self) -> None:
        if not self._opening.busy and not self._sealing.busy:
            self._over()

    def _over(self) -> None:
        """Free what threads have used: the stream is closed, and no thread works for it."""
        direct, self._direct = self._direct, None
        if direct is not None:
            direct.close()
        self._release_payload()

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

    def _settle(self) -> None:
        """Remove the stream from the unauthenticated ones: it has authenticated or closed."""
        if self._claim is not None and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._crowd is not None:
            self._crowd.remove(self._source, self._crowded_out)
        self._claim = None

    def _crowded_out(self) -> None:
        self.fail("too many unproved connections")

    @property
    def rtt(self) -> float | None:
        """Kernel's round-trip time in seconds."""
        if self._transport is None or self.reason or self._lost:
            return None
        return round_trip(self._transport.get_extra_info("socket"))

    @property
    def waiting(self) -> int:
        """Sent bytes that the other side's machine has not acknowledged yet."""
        if self._transport is None or self.reason or self._lost:
            return 0
        done = confirmed(self._transport.get_extra_info("socket"))
        return max(0, self.up - done) if done is not None else self.unsent

    def pace(self, rate: int) -> None:
        """Pace at `rate` bytes/s within a record, too; before the first record.

        The event loop seals and writes then: the link is what limits, and the kernel takes little at a time.
        """
        self._sealing = OrderedWork(None, self._failed)
        if self._transport is not None:
            pace(self._transport.get_extra_info("socket"), rate)

    # --- writing

    def takes_now(self, size: int) -> bool:
        """Return whether the payload of a frame of `size` bytes may change as soon as `write` returns."""
        return not self._sealing.takes(size)

    async def write_in_turn(self, head: bytes, payload: Buffer) -> None:
        """Seal one frame and start to send it; only when `idle`. The payload may change once this returns."""
        self.write(head, payload)
        if self._sealing.busy:
            self._sealed = self._loop.create_future()
            await self._sealed

    def write(self, head: bytes, payload: Buffer) -> None:
        """Seal one frame and start to send it; only when `idle`. If it is not taken now, use `write_in_turn`."""
        assert self.idle and self._transport is not None
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
        assert self._transport is not None
        if self._direct is None:
            with suppress(OSError):
                self._direct = DirectSocket(self._transport.get_extra_info("socket"))
        return self._direct

    def _seal(self, head: bytes, payload: Buffer, record: memoryview, direct: DirectSocket | None) -> int:
        """Seal a record, in any thread; send what the kernel takes by `direct`, and return its bytes."""
        assert self._sealer is not None
        self._sealer.seal(head, payload, record)
        return 0 if direct is None else direct.send(record)

    def _send(self, record: memoryview, direct: DirectSocket | None, sent: int) -> None:
        """Send what is left of a record of which `sent` bytes are sent, as soon as the kernel takes more."""
        assert self._transport is not None
        self._release_payload()
        if direct is None:
            self._transport.write(record)
        else:
            self._rest = record[sent:]
            if self._rest:
                self._loop.add_writer(direct, self._send_rest, direct)
        if self._outgoing is not None and not self.unsent:
            self._flushed()
        elif not self.reason and self._stall is None:
            self._stall = self._loop.call_later(self._limits.stall, self._check_stall, self.unsent)

    def _send_rest(self, direct: DirectSocket) -> None:
        self._loop.remove_writer(direct)
        rest = self._rest
        self._sealing.run(partial(direct.send, rest), partial(self._send, rest, direct), rest.nbytes)

    def _release_payload(self) -> None:
        """Let the sender of a frame continue: no thread reads its payload any more."""
        sealed, self._sealed = self._sealed, None
        if sealed is not None and not sealed.done():
            sealed.set_result(None)

    def post(self, head: bytes) -> None:
        """Seal a frame without payload and queue it behind data being sent. Check `crowded` first."""
        assert self._sealer is not None and self._transport is not None
        if self._lost:
            return
        record = bytearray(record_size(len(head), 0))
        try:
            self._sealer.seal(head, b"", memoryview(record))
        except ValueError as error:
            self.fail(str(error))
            return
        self.up += len(record)
        self._transport.write(record)
        if left := self.unsent:
            self.idle = False
            if self._stall is None:
                self._stall = self._loop.call_later(self._limits.stall, self._check_stall, left)

    @property
    def unsent(self) -> int:
        """Written bytes that the kernel has not taken yet."""
        if self._transport is None or self._lost:
            return 0
        return self._transport.get_write_buffer_size() + self._rest.nbytes

    @property
    def crowded(self) -> bool:
        """True if nothing more should be posted before the stream is `idle`, because too much data waits."""
        return self.unsent > BACKLOG

    def pause_writing(self) -> None:
        """Do nothing: writers check the size of the buffer themselves."""

    def resume_writing(self) -> None:
        if not self.idle and not self.reason and not self._sealing.busy and not self._rest:
            self._flushed()

    def _flushed(self) -> None:
        if self._stall:
            self._stall.cancel()
            self._stall = None
        buffer, self._outgoing, self._rest = self._outgoing, None, EMPTY
        if buffer is not None:
            self._pool.give(buffer)
        self.idle = True
        if self._owner is not None:
            self._owner.flushed(self)

    @property
    def _left(self) -> int:
        """Bytes that the other side has not taken."""
        return self.unsent

    def _check_stall(self, before: int) -> None:
        left = self._left
        if left >= before:
            self.fail("peer takes no data")
        else:
            self._stall = self._loop.call_later(self._limits.stall, self._check_stall, left)

    # --- reading

    def pause(self, paused: bool) -> None:
        """Stop or resume reading; while stopped, the peer's data waits in its own buffers."""
        if self._transport is not None and not self.reason:
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
            while self._have >= self._need and not self.reason:
                self._advance()
        except (InvalidTag, ValueError) as error:
            self._failed(error)

    def _advance(self) -> None:
        if self._claim is not None:
            self._admit(self._claim)
        elif self._incoming is None:
            self._begin()
        else:
            self._finish()

    def _admit(self, claim: Claim) -> None:
        opening = bytes(self._small[: OPENING.size])
        session, number = OPENING.unpack(opening)
        claimed = claim(session)
        if claimed is None:
            raise ValueError("a stream of no session")
        owner, secret = claimed
        self._opener, self._sealer = stream_keys(secret, number)
        self._opener.check(opening, bytes(self._small[OPENING.size : self._need]))
        self._have, self._need, self._room = 0, LENGTHS.size, LENGTHS.size
        self._settle()
        self._start(owner, number)
        self._owner = owner

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
        if not self.reason:
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
