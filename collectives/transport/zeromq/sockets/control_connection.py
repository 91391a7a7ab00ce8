"""One encrypted control connection.

It uses a separate libzmq socket behind a TCP relay, so that it can be closed on its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import zmq
from thinwire.collectives.blocking_work import Workers
from thinwire.collectives.transport.addresses.name_resolver import NameResolver
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.collectives.transport.circuits.circuits import Circuits
from thinwire.collectives.transport.frame_limit import FrameLimit
from thinwire.collectives.transport.interface import RESET
from thinwire.collectives.transport.rate_limit import RateLimit
from thinwire.collectives.transport.receive_queue import ReceiveQueue
from thinwire.collectives.transport.shared_memory.local_sockets import LocalSockets
from thinwire.collectives.transport.zeromq.sockets.limits import Limits
from thinwire.collectives.transport.zeromq.sockets.listener import HalfOpen, descriptors_left
from thinwire.collectives.transport.zeromq.sockets.tcp_relay import Divert, TcpRelay
from thinwire.collectives.transport.zeromq.sockets.zmq_socket import (
    Parts,
    ZapHandler,
    ZmqSocket,
    as_client,
    as_server,
    bind,
    bounded,
    sender_key,
)
from thinwire.swarm.frame import Frame, encode, nbytes
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.messages.registry import Message, PeerId

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

DESCRIPTORS = 8
"""Descriptors that one connection may take.

They are the libzmq socket's own, its listener and those it opens temporarily, and two ends of a loopback connection.
"""


@dataclass(slots=True)
class SharedSockets:
    """Objects that all connections of one transport share."""

    identity: Identity
    run_id: bytes
    limits: Limits
    context: Context
    gatekeeper: ZapHandler
    receive_queue: ReceiveQueue
    circuits: Circuits
    local_sockets: LocalSockets
    resolver: NameResolver
    pool: BufferPool = field(default_factory=BufferPool)
    rate_limit: RateLimit = field(default_factory=RateLimit)
    workers: Workers | None = None
    frame_limit: FrameLimit = field(init=False)
    _last: tuple[Message, bytes] | None = None

    def __post_init__(self) -> None:
        self.frame_limit = FrameLimit(self.limits.frames)

    def head(self, frame: Frame) -> bytes:
        """Return a signed control frame without its payload. A broadcast frame is signed once."""
        if self._last is not None and self._last[0] is frame.message and not nbytes(frame.payload):
            return self._last[1]
        head = encode(frame, self.identity, self.run_id)
        if not nbytes(frame.payload):
            self._last = frame.message, head
        return head


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """Limits of one socket: messages queued each way, bytes per part, bytes of an unfinished message.

    `strict`: `window` limits the bytes of all messages together.
    """

    messages: int
    size: int
    window: int
    strict: bool = False


class ControlConnection:
    """Connection for control messages, encrypted by CURVE.

    - `received`: gets the connection and each message, with the transport key that the handshake proved.
    - `closed`: called once, at the end, with the connection and the reason.
    - `server_key`: transport key of the peer that we dial; b"": the peer has dialled us.
    - `domain`: ZAP domain that decides which keys may connect, if the peer has dialled us.
    - `crowd`: half-open connections among which this one counts until `mark_authenticated`.
    - `relay`: peer that splices it to the other side, if any.
    - `divert`: see TcpRelay.
    """

    def __init__(
        self,
        sockets: SharedSockets,
        bounds: SocketLimits,
        received: Callable[[ControlConnection, bytes, list[memoryview]], None],
        closed: Callable[[ControlConnection, str], None],
        *,
        server_key: bytes = b"",
        domain: bytes = b"",
        crowd: HalfOpen | None = None,
        divert: Divert | None = None,
        relay: PeerId = b"",
    ) -> None:
        self._sockets, self._bounds, self._received, self._closed = sockets, bounds, received, closed
        self._server_key, self._domain, self._crowd, self.relay = server_key, domain, crowd, relay
        self._channel: ZmqSocket | None = None
        self._early: list[Parts] = []
        self._source = ""
        self._timer: asyncio.TimerHandle | None = None
        self.tcp_relay = TcpRelay(
            bounds.window,
            self._open,
            self._ended,
            accepted=not server_key,
            strict=bounds.strict,
            met=self._meet,
            divert=divert,
        )

    def post(self, parts: Parts) -> bool:
        """Send a message; return True if libzmq took it, else await `flushed` before the next one."""
        if self._channel is None:
            self._early.append(parts)
            return False
        return self._channel.post(parts)

    async def flushed(self) -> None:
        """Return when nothing waits to be sent, or the connection is closed."""
        if self._channel is not None:
            await self._channel.flushed()

    def pause(self, paused: bool) -> None:
        """Stop or resume reading."""
        if self._channel is not None:
            self._channel.pause(paused)

    def mark_authenticated(self) -> None:
        """Mark the connection as authenticated.

        Cancel its deadline and remove it from the half-open connections.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._crowd is not None:
            self._crowd.remove(self._source, self._crowded_out)
            self._crowd = None

    def close(self, reason: str) -> None:
        """Close at once."""
        self.tcp_relay.close(reason)

    def leave(self, last: bytes) -> None:
        """Send a last message and close once it is sent, or after one second."""
        if self._channel is None or self.tcp_relay.reason:
            self.close("closed here")
            return
        self.mark_authenticated()
        self._timer = asyncio.get_running_loop().call_later(1.0, self.close, "closed here")
        self._channel.finish(last, 1000)

    def expire(self, seconds: float, reason: str) -> None:
        """Close after `seconds`, unless authenticated or given a new deadline before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.close, reason)

    def _meet(self) -> None:
        self.expire(self._sockets.limits.handshake, "no handshake in time")
        if self._crowd is not None:
            self._source = self.tcp_relay.source
            if not self._crowd.add(self._source, self._crowded_out):
                self.close("too many connections from there")

    def _crowded_out(self) -> None:
        self.close("too many strangers")

    def _open(self) -> None:
        bounds, identity = self._bounds, self._sockets.identity
        if self._crowd is not None and not self._crowd.may_begin(self._source):
            self.close("too many handshakes")
            return
        if not descriptors_left(DESCRIPTORS):
            self.close("no more descriptors")
            return
        try:
            sock = self._sockets.context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            self.close(f"no more sockets: {error}")
            return
        bounded(sock, self._sockets.limits, messages=bounds.messages, size=bounds.size)
        if self._server_key:
            as_client(sock, identity, self._server_key)
        else:
            as_server(sock, identity, self._domain)
        try:
            port = bind(sock)
        except zmq.ZMQError as error:
            sock.close(linger=0)
            self.close(f"no local socket: {error}")
            return
        self._channel = ZmqSocket(sock, self._receive)
        for parts in self._early:
            self._channel.post(parts)
        self._early.clear()
        self.tcp_relay.join(port)

    def _receive(self, frames: list[zmq.Frame]) -> None:
        self.tcp_relay.progress()
        # As a client, CURVE itself pins the server's key; as a server, the ZAP handler vouches for the key.
        key = self._server_key or sender_key(frames)
        self._received(self, key, [frame.buffer for frame in frames])

    def _ended(self, reason: str) -> None:
        self.mark_authenticated()
        if self._channel is not None:
            if reason == RESET:
                # Messages that arrived before the end still count.
                self._channel.drain()
            self._channel.close()
        self._closed(self, reason)
