"""One encrypted control connection: a libzmq socket of its own behind a passage, so that it can be closed by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import zmq
from thinwire.swarm.frame import Frame, encode, nbytes
from thinwire.swarm.identity import Identity
from thinwire.swarm.protocol import Message

from .buffers import Pool
from .channel import Channel, Gatekeeper, Parts, as_client, as_server, bind, bounded, speaker
from .inbox import Inbox
from .limits import Limits
from .pacing import Pacer
from .passage import Passage
from .ports import HalfOpen, descriptors_left
from .transport import RESET

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

DESCRIPTORS = 8
"""Descriptors that one connection may take: a libzmq socket's own, its listener and what it asks for on the way, two ends of a
connection on loopback."""


@dataclass(slots=True)
class Station:
    """What all connections of one transport share."""

    identity: Identity
    run_id: bytes
    limits: Limits
    context: Context
    gatekeeper: Gatekeeper
    inbox: Inbox
    pool: Pool = field(default_factory=Pool)
    pacer: Pacer = field(default_factory=Pacer)
    _last: tuple[Message, bytes] | None = None

    def head(self, frame: Frame) -> bytes:
        """A control frame without its payload, signed. What all are told is signed once."""
        if self._last is not None and self._last[0] is frame.message and not nbytes(frame.payload):
            return self._last[1]
        head = encode(frame, self.identity, self.run_id)
        if not nbytes(frame.payload):
            self._last = frame.message, head
        return head


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one socket: messages queued each way, bytes of a part, bytes of an unfinished message; `strict`: in all."""

    messages: int
    size: int
    window: int
    strict: bool = False


class Control:
    """`received(self, key, parts)` gets each message with the transport key that the handshake proved."""

    def __init__(
        self,
        station: Station,
        bounds: Bounds,
        received: Callable[[Control, bytes, list[memoryview]], None],
        closed: Callable[[Control, str], None],
        *,
        server_key: bytes = b"",
        domain: bytes = b"",
        crowd: HalfOpen | None = None,
    ) -> None:
        self._station, self._bounds, self._received, self._closed = station, bounds, received, closed
        self._server_key, self._domain, self._crowd = server_key, domain, crowd
        self._channel: Channel | None = None
        self._early: list[Parts] = []
        self._source = ""
        self._timer: asyncio.TimerHandle | None = None
        self.passage = Passage(
            bounds.window, self._open, self._ended, accepted=not server_key, strict=bounds.strict, met=self._meet
        )

    def post(self, parts: Parts) -> bool:
        """Send a message; True when libzmq has it, else await `flushed` before the next."""
        if self._channel is None:
            self._early.append(parts)
            return False
        return self._channel.post(parts)

    async def flushed(self) -> None:
        """Return when nothing waits to be sent, or all is over."""
        if self._channel is not None:
            await self._channel.flushed()

    def pause(self, paused: bool) -> None:
        """Stop or resume reading."""
        if self._channel is not None:
            self._channel.pause(paused)

    def settle(self) -> None:
        """It has proved itself: no deadline, no place in the crowd of strangers."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._crowd is not None:
            self._crowd.remove(self._source, self._crowded_out)
            self._crowd = None

    def close(self, reason: str) -> None:
        """Close at once."""
        self.passage.close(reason)

    def leave(self, last: bytes) -> None:
        """Send a last message and close when it is out, or after a second."""
        if self._channel is None or self.passage.reason:
            self.close("closed here")
            return
        self.settle()
        self._timer = asyncio.get_running_loop().call_later(1.0, self.close, "closed here")
        self._channel.finish(last, 1000)

    def expire(self, seconds: float, reason: str) -> None:
        """Close after so many seconds, unless settled or told otherwise before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.close, reason)

    def _meet(self) -> None:
        self.expire(self._station.limits.handshake, "no handshake in time")
        if self._crowd is not None:
            self._source = self.passage.source
            if not self._crowd.add(self._source, self._crowded_out):
                self.close("too many connections from there")

    def _crowded_out(self) -> None:
        self.close("too many strangers")

    def _open(self) -> None:
        bounds, identity = self._bounds, self._station.identity
        if not descriptors_left(DESCRIPTORS):
            self.close("no more descriptors")
            return
        try:
            sock = self._station.context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            self.close(f"no more sockets: {error}")
            return
        bounded(sock, self._station.limits, messages=bounds.messages, size=bounds.size)
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
        self._channel = Channel(sock, self._receive)
        for parts in self._early:
            self._channel.post(parts)
        self._early.clear()
        self.passage.join(port)

    def _receive(self, frames: list[zmq.Frame]) -> None:
        self.passage.progress()
        # As a client the server's key is pinned by CURVE itself; as a server the ZAP handler's word counts.
        key = self._server_key or speaker(frames)
        self._received(self, key, [frame.buffer for frame in frames])

    def _ended(self, reason: str) -> None:
        self.settle()
        if self._channel is not None:
            if reason == RESET:
                # What arrived before the end still counts.
                self._channel.drain()
            self._channel.close()
        self._closed(self, reason)
