"""Bulk streams: frames with big payloads as sealed records over plain TCP.

A stream belongs to a link, whose `secret` (agreed inside CURVE) gives every stream and direction a key of its own. The
dialer first sends session id, stream number and a proof of the key; each number is accepted once a session, so nothing
can be replayed. Then records follow: lengths of head and payload, head sealed, payload sealed (AES-256-GCM, NIST
SP 800-38D; the lengths are associated data, the nonce is a counter). Any failure closes the stream.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from thinwire.swarm.frame import HEADER_BYTES, nbytes
from thinwire.swarm.protocol import TYPES

from .buffers import Pool
from .limits import Limits
from .ports import HalfOpen

if TYPE_CHECKING:
    from thinwire.swarm.frame import Buffer

TAG = 16
LENGTHS = struct.Struct("!II")
OPENING = struct.Struct("!16sB")
"""Session id and stream number; the proof, TAG bytes, follows."""

_BULK = [kind for kind in TYPES.values() if kind.payload and not kind.signed]
MAX_HEAD = HEADER_BYTES + max(kind.limit for kind in _BULK)
MAX_PAYLOAD = max(kind.payload for kind in _BULK)
MAX_RECORDS = 1 << 32
"""Most seals with one key; a stream that reaches it ends, and the link is dialled anew with new keys."""


class Owner(Protocol):
    """The link a stream belongs to."""

    def joined(self, stream: Stream, number: int) -> None:
        """A stream whose proof is right. Raises ValueError when the number was used before."""
        ...

    def arrived(self, head: bytes, payload: memoryview) -> None:
        """A record that was opened. Raises ValueError when it holds no valid frame."""
        ...

    def flushed(self, stream: Stream) -> None:
        """What was written has left our buffers: the stream takes the next record."""
        ...

    def broken(self, stream: Stream, reason: str) -> None:
        """The stream is closed."""
        ...


Claim = Callable[[bytes], "tuple[Owner, bytes] | None"]
"""Session id -> the link and its secret; None for a session that is not known. Proves nothing yet, changes nothing."""


def session_of(secret: bytes) -> bytes:
    """The 16 public bytes that name the session of a secret (HKDF, RFC 5869)."""
    return HKDF(SHA256(), 16, salt=None, info=b"thinwire bulk session 1").derive(secret)


def _keys(secret: bytes, number: int) -> tuple[AESGCM, AESGCM]:
    """Keys of one stream: dialer to acceptor, acceptor to dialer."""
    data = HKDF(SHA256(), 64, salt=None, info=b"thinwire bulk stream 1" + bytes([number])).derive(secret)
    return AESGCM(data[:32]), AESGCM(data[32:])


def tune(sock: socket.socket, congestion: str = "bbr") -> bool:
    """Set a TCP socket for long links; True when the kernel grants the congestion control asked for.

    Keep-alive holds the mappings of address translators open through minutes of local steps. Buffer sizes are left to
    the kernel, whose automatic tuning reaches further than what a process may ask for.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    except (AttributeError, OSError):
        return False
    return True


def round_trip(sock: socket.socket) -> float | None:
    """The kernel's smoothed round-trip time of a TCP socket in seconds (Linux), else None."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    except (AttributeError, OSError):
        return None
    return float(struct.unpack_from("=I", info, 68)[0]) / 1e6 if len(info) >= 72 else None


class Stream(asyncio.BufferedProtocol):
    """One sealed stream. Reads straight into a pooled buffer, opens into another, and hands that up uncopied."""

    def __init__(self, pool: Pool, limits: Limits, claim: Claim | None = None, crowd: HalfOpen | None = None) -> None:
        self.idle = False
        """Whether a record may be written now."""
        self.up = 0
        self.down = 0
        self.reason = ""
        """Why it is closed; "" while it is open."""
        self.by_peer = False
        """Whether it was the other side, or the network, that ended it."""
        self._pool, self._limits, self._claim, self._crowd = pool, limits, claim, crowd
        self._source = ""
        self._owner: Owner | None = None
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._sealer: AESGCM | None = None
        self._opener: AESGCM | None = None
        self._sealed = self._opened = 0
        self._outgoing: NDArray[np.uint8] | None = None
        self._incoming: NDArray[np.uint8] | None = None
        self._small = memoryview(bytearray(OPENING.size + TAG))
        self._view = self._small
        self._have, self._need = 0, OPENING.size + TAG if claim else LENGTHS.size
        self._room = self._need
        self._lengths = (0, 0)
        self._paused = False
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._began, self._mark = 0.0, 0

    # --- life

    def open(self, owner: Owner, secret: bytes, number: int) -> None:
        """Dialer: prove the secret and begin. Call once connected."""
        assert self._transport is not None
        self._owner = owner
        self._sealer, self._opener = _keys(secret, number)
        opening = OPENING.pack(session_of(secret), number)
        proof = self._sealer.encrypt(self._nonce(0), b"", opening)
        self._transport.write(opening + proof)
        self._sealed, self.up = 1, len(opening) + len(proof)
        self.idle = True
        owner.joined(self, number)
        owner.flushed(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio.Transport, but do all that it does.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0, 0)
        tune(transport.get_extra_info("socket"))
        if self._claim:
            self._deadline = self._loop.call_later(self._limits.handshake, self.fail, "no proof in time")
            if self._crowd is not None:
                self._source = str(transport.get_extra_info("peername")[0])
                if not self._crowd.add(self._source, self._crowded_out):
                    self.fail("too many connections from there")

    def connection_lost(self, exc: Exception | None) -> None:
        self.by_peer = not self.reason
        self._end("stream reset" if exc else "stream closed by the peer")

    def eof_received(self) -> bool:
        return False

    def fail(self, reason: str) -> None:
        """Close at once, dropping what is not yet written."""
        transport = self._transport
        self._end(reason)
        if transport is not None and not transport.is_closing():
            transport.abort()

    def _end(self, reason: str) -> None:
        if self.reason:
            return
        self.reason, self.idle = reason, False
        for timer in (self._deadline, self._stall):
            if timer:
                timer.cancel()
        # Buffers still known to the event loop are left to the garbage collector, never lent again.
        self._incoming = self._outgoing = None
        self._settle()
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.broken(self, reason)

    def _settle(self) -> None:
        if self._crowd is not None:
            self._crowd.remove(self._source, self._crowded_out)
        if self._claim is not None and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._claim = None

    def _crowded_out(self) -> None:
        self.fail("too many unproved connections")

    @property
    def rtt(self) -> float | None:
        """Round-trip time in seconds, as the kernel sees it."""
        return round_trip(self._transport.get_extra_info("socket")) if self._transport and not self.reason else None

    # --- writing

    def write(self, head: bytes, payload: Buffer) -> None:
        """Seal one frame and start to send it; only when `idle`. The payload may change after this returns."""
        assert self.idle and self._sealer is not None and self._transport is not None
        if self._sealed + 2 >= MAX_RECORDS:
            self.fail("key used up")
            return
        size = nbytes(payload)
        lengths = LENGTHS.pack(len(head), size)
        middle = LENGTHS.size + len(head) + TAG
        end = middle + size + TAG
        self._outgoing = self._pool.take(end)
        view = self._outgoing.data
        view[: LENGTHS.size] = lengths
        self._sealer.encrypt_into(self._nonce(self._sealed), head, lengths, view[LENGTHS.size : middle])
        self._sealer.encrypt_into(self._nonce(self._sealed + 1), payload, lengths, view[middle:end])
        self._sealed += 2
        self.up += end
        self.idle = False
        self._transport.write(view[:end])
        if self._outgoing is not None and self._transport.get_write_buffer_size() == 0:
            self._flushed()
        elif not self.reason:
            self._stall = self._loop.call_later(self._limits.stall, self._check_stall, end)

    def pause_writing(self) -> None:
        """`write` asks for the size of the buffer itself."""

    def resume_writing(self) -> None:
        if not self.idle and self._outgoing is not None:
            self._flushed()

    def _flushed(self) -> None:
        if self._stall:
            self._stall.cancel()
            self._stall = None
        buffer, self._outgoing = self._outgoing, None
        if buffer is not None:
            self._pool.give(buffer)
        self.idle = True
        if self._owner is not None:
            self._owner.flushed(self)

    def _check_stall(self, before: int) -> None:
        assert self._transport is not None
        left = self._transport.get_write_buffer_size()
        if left >= before:
            self.fail("peer takes no data")
        else:
            self._stall = self._loop.call_later(self._limits.stall, self._check_stall, left)

    # --- reading

    def pause(self, paused: bool) -> None:
        """Stop or resume reading: the peer's writes then wait in its own buffers."""
        if self._transport is None or self.reason or paused == self._paused:
            return
        self._paused = paused
        if paused:
            self._transport.pause_reading()
        else:
            self._mark = self.down
            self._transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._have : self._room]

    def buffer_updated(self, count: int) -> None:
        self._have += count
        self.down += count
        try:
            while self._have >= self._need and not self.reason:
                self._advance()
        except InvalidTag:
            self.fail("a record does not open with the agreed key")
        except ValueError as error:
            self.fail(str(error))

    def _advance(self) -> None:
        if self._claim is not None:
            self._admit()
        elif self._incoming is None:
            self._begin()
        else:
            self._finish()

    def _admit(self) -> None:
        opening = bytes(self._small[: OPENING.size])
        session, number = OPENING.unpack(opening)
        assert self._claim is not None
        claimed = self._claim(session)
        if claimed is None:
            raise ValueError("a stream of no session")
        owner, secret = claimed
        self._opener, self._sealer = _keys(secret, number)
        self._opener.decrypt(self._nonce(0), bytes(self._small[OPENING.size :]), opening)
        owner.joined(self, number)
        self._opened, self._owner = 1, owner
        self._settle()
        self._have, self._need, self._room = 0, LENGTHS.size, LENGTHS.size
        self.idle = True
        owner.flushed(self)

    def _begin(self) -> None:
        head, payload = LENGTHS.unpack(self._small[: LENGTHS.size])
        if not HEADER_BYTES < head <= MAX_HEAD or payload > MAX_PAYLOAD:
            raise ValueError(f"record of {head} + {payload} bytes is over the limits")
        if self._opened + 2 >= MAX_RECORDS:
            raise ValueError("key used up")
        self._lengths = head, payload
        self._need = LENGTHS.size + head + payload + 2 * TAG
        # One read takes the record and the lengths of the next.
        self._room = self._need + LENGTHS.size
        self._incoming = self._pool.take(self._room)
        self._view = self._incoming.data
        self._view[: LENGTHS.size] = self._small[: LENGTHS.size]
        self._began = self._loop.time()
        if self._deadline is None:
            self._mark = self.down
            self._deadline = self._loop.call_later(self._limits.rate_window, self._check_rate)

    def _finish(self) -> None:
        assert self._opener is not None and self._owner is not None and self._incoming is not None
        head, payload = self._lengths
        view, lengths, middle = self._view, self._small[: LENGTHS.size], LENGTHS.size + head + TAG
        opened = self._opener.decrypt(self._nonce(self._opened), view[LENGTHS.size : middle], lengths)
        target = self._pool.lend(payload) if payload else memoryview(b"")
        if payload:
            self._opener.decrypt_into(self._nonce(self._opened + 1), view[middle : self._need], lengths, target)
        else:
            self._opener.decrypt(self._nonce(self._opened + 1), view[middle : self._need], lengths)
        self._opened += 2
        surplus = self._have - self._need
        self._small[:surplus] = view[self._need : self._have]
        self._pool.give(self._incoming)
        self._incoming, self._view = None, self._small
        self._have, self._need, self._room = surplus, LENGTHS.size, LENGTHS.size
        self._owner.arrived(opened, target)

    def _check_rate(self) -> None:
        self._deadline = None
        if self._incoming is None:
            return
        limits = self._limits
        old = self._loop.time() - self._began >= limits.rate_window
        if old and not self._paused and self.down - self._mark < limits.rate * limits.rate_window:
            self.fail(f"slower than {limits.rate} bytes/s")
            return
        self._mark = self.down
        self._deadline = self._loop.call_later(limits.rate_window, self._check_rate)

    @staticmethod
    def _nonce(count: int) -> bytes:
        return count.to_bytes(12, "big")
