"""A libzmq socket on the event loop, and the options of all our sockets.

The options encrypt, limit queues, and refuse when in doubt. libzmq is open by default: without a ZAP handler it admits any key,
and it does not ask a handler without a domain. So each server socket names a domain and enforces it, and `ZapHandler` exists
before any socket is bound.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq
from thinwire.collectives.transport.zeromq.sockets.limits import Limits
from thinwire.swarm.identity.identity import Identity

Parts = Sequence["bytes | memoryview"]
Admits = Callable[[bytes], bool]
"""Return True if a raw transport key (32 bytes) is admitted to a domain."""

_SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
_MECHANISM = b"CURVE".ljust(20, b"\0")
GREETING = _SIGNATURE + b"\x03\x01" + _MECHANISM + bytes(32)
"""First bytes of libzmq on both sides: signature, version 3.1, mechanism, zeros (ZMTP 3.1, RFC 37)."""

_HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72)
"""First command of a CURVE client up to its short-term key: header, name, version, zeros (RFC 26)."""

OPENING = len(GREETING) + 202
"""Bytes of a CURVE client before the server has to compute anything: its greeting and HELLO."""

_TURN = 64
"""Messages handled before other tasks run."""


def begins_handshake(data: bytes | bytearray) -> bool:
    """Return True if a CURVE client's greeting and HELLO are complete.

    Raises ValueError if data is not their beginning.
    """
    wanted = ((0, _SIGNATURE[:1]), (9, _SIGNATURE[9:]), (12, _MECHANISM + b"\0"), (len(GREETING), _HELLO))
    for start, part in wanted:
        found = data[start : start + len(part)]
        if found != part[: len(found)]:
            raise ValueError("not the greeting of a CURVE client")
    if data[10:11] and data[10] < 3:
        raise ValueError(f"version {data[10]} of ZMTP")
    return len(data) >= OPENING


class ZmqSocket:
    """Reads and writes a socket without tasks and without polling.

    libzmq's descriptor is edge triggered and any call may swallow an edge. So the state is checked after every call
    until nothing is left to do.
    """

    def __init__(self, sock: zmq.Socket[bytes], receive: Callable[[list[zmq.Frame]], None]) -> None:
        self._sock, self._receive = sock, receive
        self._loop = asyncio.get_running_loop()
        self._send_queue: deque[Parts] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._paused = self._working = self._closed = False
        self._descriptor = int(sock.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._work)

    def post(self, parts: Parts) -> bool:
        """Queue a message; return True if libzmq took the whole queue.

        Otherwise await `flushed` before the next one.
        """
        self._send_queue.append(parts)
        self._work()
        return not self._send_queue

    async def flushed(self) -> None:
        """Return when the queue is empty or the socket is closed."""
        while self._send_queue and not self._closed:
            if self._waiter is None or self._waiter.done():
                self._waiter = self._loop.create_future()
            await asyncio.shield(self._waiter)

    def pause(self, paused: bool) -> None:
        """Stop or resume reading."""
        self._paused = paused
        if not paused:
            self._work()

    def drain(self) -> None:
        """Deliver everything that libzmq holds, even when paused."""
        self._paused = False
        while not self._closed and self._events() & zmq.POLLIN:
            self._receive(self._sock.recv_multipart(zmq.NOBLOCK, copy=False))

    def finish(self, last: bytes, linger: int) -> None:
        """Close after a last message, which has `linger` milliseconds to leave. Stop reading."""
        if not self._closed and self._events() & zmq.POLLOUT:
            with suppress(zmq.Again):  # no room is possible in the middle of a multipart message
                self._sock.send(last, zmq.NOBLOCK)
        self.close(linger=linger)

    def close(self, *, linger: int = 0) -> None:
        """Close the socket; messages in it may still leave for `linger` milliseconds."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        self._sock.close(linger=linger)
        self._send_queue.clear()
        self._wake()

    def _events(self) -> int:
        return int(self._sock.getsockopt(zmq.EVENTS))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _work(self) -> None:
        # `_receive` may post or close: do not recurse.
        if self._working or self._closed:
            return
        self._working = True
        try:
            for _ in range(_TURN):
                events = self._events()
                if self._send_queue and events & zmq.POLLOUT:
                    try:
                        self._sock.send_multipart(self._send_queue[0], zmq.NOBLOCK)
                    except zmq.Again:
                        break  # The connection was lost between two parts, and libzmq has taken the first ones back.
                    self._send_queue.popleft()
                elif events & zmq.POLLIN and not self._paused:
                    self._receive(self._sock.recv_multipart(zmq.NOBLOCK, copy=False))
                else:
                    break
                if self._closed:
                    return
            else:
                self._loop.call_soon(self._work)
        finally:
            self._working = False
        if not self._send_queue:
            self._wake()


def bounded(sock: zmq.Socket[bytes], limits: Limits, *, messages: int, size: int) -> None:
    """Set limits and heartbeats: at most `messages` each way, of at most `size` bytes per part."""
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, messages)
    sock.setsockopt(zmq.RCVHWM, messages)
    sock.setsockopt(zmq.MAXMSGSIZE, size)
    sock.setsockopt(zmq.HANDSHAKE_IVL, int(limits.handshake * 1000))
    sock.setsockopt(zmq.HEARTBEAT_IVL, int(limits.heartbeat * 1000))
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(limits.silence * 1000))
    sock.setsockopt(zmq.IMMEDIATE, 1)


def as_server(sock: zmq.Socket[bytes], identity: Identity, domain: bytes) -> None:
    """Encrypt as the dialled side; the handler of `domain` decides which keys are admitted."""
    sock.setsockopt(zmq.CURVE_SERVER, 1)
    sock.setsockopt(zmq.CURVE_SECRETKEY, identity.transport_secret)
    sock.setsockopt(zmq.ZAP_DOMAIN, domain)
    sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def as_client(sock: zmq.Socket[bytes], identity: Identity, server_key: bytes) -> None:
    """Encrypt as the dialling side; accept `server_key` only."""
    sock.setsockopt(zmq.CURVE_PUBLICKEY, identity.transport_public)
    sock.setsockopt(zmq.CURVE_SECRETKEY, identity.transport_secret)
    sock.setsockopt(zmq.CURVE_SERVERKEY, server_key)


def bind(sock: zmq.Socket[bytes]) -> int:
    """Bind on loopback, for a `TcpRelay` to connect to; return the port."""
    sock.bind("tcp://127.0.0.1:*")
    return int(sock.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


class ZapHandler:
    """ZAP handler (ZeroMQ RFC 27): answers libzmq whether a key is admitted to a domain.

    No key is admitted to an unknown domain.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._domains: dict[bytes, Admits] = {}
        self.refused = 0
        sock = context.socket(zmq.ROUTER)
        sock.setsockopt(zmq.LINGER, 0)
        sock.bind("inproc://zeromq.zap.01")
        self._channel = ZmqSocket(sock, self._answer)

    def allow(self, domain: bytes, admits: Admits) -> None:
        """Ask `admits` about every key that connects in `domain`."""
        self._domains[domain] = admits

    def forbid(self, domain: bytes) -> None:
        """Admit no key in `domain` from now on."""
        self._domains.pop(domain, None)

    def close(self) -> None:
        """Close the handler: every later handshake fails."""
        self._channel.close()

    def _answer(self, frames: list[zmq.Frame]) -> None:
        parts = [frame.bytes for frame in frames]
        # Routing id, delimiter, then version, request, domain, address, identity, mechanism, key.
        if len(parts) < 8 or parts[1]:
            return
        version, request, domain, mechanism = parts[2], parts[3], parts[4], parts[7]
        key = parts[8] if len(parts) == 9 else b""
        admits = self._domains.get(domain)
        good = version == b"1.0" and mechanism == b"CURVE" and len(key) == 32 and admits is not None and admits(key)
        status = (b"200", b"OK", key.hex().encode()) if good else (b"400", b"refused", b"")
        self.refused += not good
        self._channel.post([*parts[:2], b"1.0", request, *status, b""])


def sender_key(frames: list[zmq.Frame]) -> bytes:
    """Return the transport key of a message's sender, as the handshake proved it; b"" if there is none."""
    try:
        return bytes.fromhex(str(frames[0].get("User-Id")))
    except (zmq.ZMQError, ValueError):
        return b""
