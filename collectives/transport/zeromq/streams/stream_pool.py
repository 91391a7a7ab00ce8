"""Sealed streams of one link.

Bulk streams share the frames, and an express stream carries round messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from thinwire.collectives.transport.circuits.circuits import DialRoute
from thinwire.collectives.transport.shared_memory.local_sockets import socket_name
from thinwire.collectives.transport.zeromq.sockets.control_connection import SharedSockets
from thinwire.collectives.transport.zeromq.streams.record_crypto import EXPRESS, MAX_STREAMS, SHARED
from thinwire.collectives.transport.zeromq.streams.record_writer import RecordWriter
from thinwire.collectives.transport.zeromq.streams.shared_memory_stream import SharedMemoryStream
from thinwire.collectives.transport.zeromq.streams.stream import Stream
from thinwire.swarm import frame as frames
from thinwire.swarm.frame import HEADER_BYTES, Frame, FrameError, UnknownType
from thinwire.swarm.messages.registry import PeerId

GRACE = 0.25
"""Seconds by which a broken stream may be noticed before the goodbye that explains it."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes on the wire to and from a peer, for control and bulk, and bytes inside this machine."""

    control_up: int = 0
    control_down: int = 0
    bulk_up: int = 0
    bulk_down: int = 0
    shared_up: int = 0
    shared_down: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.control_up + other.control_up,
            self.control_down + other.control_down,
            self.bulk_up + other.bulk_up,
            self.bulk_down + other.bulk_down,
            self.shared_up + other.shared_up,
            self.shared_down + other.shared_down,
        )


class StreamPool:
    """Streams of one link.

    Data in a dead stream is lost silently, so the link that owns the pool is lost with it.

    - `arrived`: called for each incoming frame, before it is delivered, with the size of its payload.
    - `deliver`: gets bulk frames with their sizes.
    - `round_message`: gets round messages, once `read_express` allows it.
    - `express`: called when the express stream is up.
    - `broken`: called with the reason when any stream ends.
    """

    def __init__(
        self,
        sockets: SharedSockets,
        secret: bytes,
        *,
        arrived: Callable[[int], None],
        deliver: Callable[[Frame, int], None],
        round_message: Callable[[bytes], None],
        express: Callable[[], None],
        broken: Callable[[str], None],
    ) -> None:
        self.express: Stream | None = None
        """The stream for round messages, once it is up."""
        self._sockets, self._secret, self._broken = sockets, secret, broken
        self._tell_arrived, self._deliver = arrived, deliver
        self._round_message, self._tell_express = round_message, express
        self._streams: dict[int, Stream] = {}
        self._express_waiters: deque[asyncio.Future[None]] = deque()
        self._idle: deque[Stream] = deque()
        self._waiters: deque[asyncio.Future[Stream | None]] = deque()
        self._closed = self._given_up = False
        self._loop = asyncio.get_running_loop()

    async def dial(self, peer: PeerId, route: DialRoute, port: int, count: int) -> None:
        """Open the express stream and, if we share no memory, `count` bulk streams; tolerate failures."""

        async def bulk() -> None:
            if route.relay or not await self._share(peer, port):
                await asyncio.gather(*(self._dial(route, port, number) for number in range(min(count, MAX_STREAMS))))

        await asyncio.gather(self._dial(route, port, EXPRESS), bulk())

    async def _share(self, peer: PeerId, port: int) -> bool:
        """Open the stream of peers that share memory; return whether there is one."""
        sockets = self._sockets
        connection = await sockets.local_sockets.dial(socket_name(sockets.run_id, peer, port))
        if connection is None:
            return False
        try:
            stream = await connection.connect(
                lambda: SharedMemoryStream(sockets.pool, sockets.limits, connection, workers=sockets.workers)
            )
        except OSError:
            return False
        if self._closed:
            stream.fail("the link has ended")
        elif stream.state == "open":
            stream.open(self, self._secret, SHARED)
        return self.shared

    async def _dial(self, route: DialRoute, port: int, number: int) -> None:
        sockets = self._sockets
        try:
            async with asyncio.timeout(sockets.limits.handshake):
                _, stream = await route.open(
                    lambda: Stream(sockets.pool, sockets.limits, workers=sockets.workers), port
                )
        except OSError:
            return
        if self._closed:
            stream.fail("the link has ended")
        elif stream.state == "open":
            stream.open(self, self._secret, number)

    def idle(self, size: int) -> RecordWriter | None:
        """Return the writer of a stream for a payload of `size` bytes, if one is free and takes it at once.

        None, too, if frames wait for one.
        """
        if self._closed or self._waiters or self._sockets.rate_limit.rate:
            return None
        stream = self._first_idle()
        if stream is None:
            return None
        if not stream.writer.takes_now(size):
            self._idle.appendleft(stream)
            return None
        return stream.writer

    def express_writer(self) -> RecordWriter | None:
        """Return the writer of the express stream if it takes a round message at once."""
        express = self.express
        if self._closed or express is None or express.state != "open" or express.writer.crowded:
            return None
        return express.writer

    async def express_writer_in_turn(self) -> RecordWriter | None:
        """Return the writer of the express stream as soon as it takes a round message; None if it has ended."""
        while (writer := self.express_writer()) is None:
            if self._closed or self.express is None or self.express.state != "open":
                return None
            self._express_waiters.append(self._loop.create_future())
            await self._express_waiters[-1]
        return writer

    def read_express(self, reads: bool) -> None:
        """Read round messages, or leave them at the sender."""
        if self.express is not None:
            self.express.pause(not reads)

    def _first_idle(self) -> Stream | None:
        while self._idle:
            stream = self._idle.popleft()
            if stream.writer.idle:
                return stream
        return None

    async def idle_in_turn(self, nbytes: int) -> RecordWriter | None:
        """Return the writer of a stream as soon as one is free for a frame; None if no stream is left."""
        await self._sockets.rate_limit.wait(nbytes)
        while not self._closed and not self._given_up:
            if (stream := self._first_idle()) is not None:
                return stream.writer
            waiter: asyncio.Future[Stream | None] = self._loop.create_future()
            self._waiters.append(waiter)
            try:
                given = await waiter
            except asyncio.CancelledError:
                # The waiter may have been given a stream in the same turn of the loop: pass it to the next one.
                if waiter.done() and not waiter.cancelled() and (given := waiter.result()) is not None:
                    self.flushed(given)
                raise
            if given is not None and given.writer.idle:
                return given.writer
        return None

    def give_up(self) -> bool:
        """Make sends fail if no stream came up: the path blocks bulk data, and they would wait for ever.

        Return True if no stream came up.
        """
        if not self._streams:
            self._given_up = True
            self._release()
        return self._given_up

    def pause(self, paused: bool) -> None:
        """Stop or resume reading."""
        for stream in self._streams.values():
            stream.pause(paused)

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        self._release()
        for stream in self._streams.values():
            stream.fail("the link is closed")
        if self.express is not None:
            self.express.fail("the link is closed", flush=True)

    def retire(self) -> None:
        """Take no more frames; the streams stay open until `close`."""
        self._closed = True
        self._release()

    @property
    def shared(self) -> bool:
        """True if bulk data goes through shared memory."""
        return SHARED in self._streams

    def traffic(self) -> tuple[int, int, int, int]:
        """Return bulk bytes: up and down on the wire, up and down through shared memory."""
        streams = self._streams.values()
        found = sum(stream.writer.up for stream in streams), sum(stream.down for stream in streams)
        return (0, 0, *found) if self.shared else (*found, 0, 0)

    def waiting(self) -> int:
        """Return sent bytes that are not acknowledged yet."""
        return sum(stream.writer.unconfirmed for stream in self._streams.values())

    def _release(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
        self._wake_express_waiters()

    def _wake_express_waiters(self) -> None:
        for waiter in self._express_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._express_waiters.clear()

    # --- called by streams

    def joined(self, stream: Stream, number: int) -> None:
        """Add a stream that has proved the secret."""
        if number == EXPRESS and self.express is None and not self._closed:
            self.express = stream
            stream.pause(True)
            self._tell_express()
            return
        known = number == SHARED if stream.shared else number < MAX_STREAMS
        if self._closed or number in self._streams or not known:
            raise ValueError("a stream that is not awaited")
        self._streams[number] = stream
        if self._sockets.rate_limit.rate:
            stream.writer.pace(self._sockets.rate_limit.rate)
        self._given_up = False
        stream.pause(self._sockets.receive_queue.bulk.full)

    def flushed(self, stream: Stream) -> None:
        """Give a free stream the next frame."""
        if stream is self.express:
            self._wake_express_waiters()
            return
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(stream)
                return
        self._idle.append(stream)

    def arrived(self, stream: Stream, head: bytes, payload: memoryview, digest: bytes) -> None:
        """Handle a received record. digest: blake3 of the payload."""
        if self._closed:
            return
        self._tell_arrived(payload.nbytes)
        if stream is self.express:
            self._round_message(head)
            return
        try:
            header = frames.parse_header(head[:HEADER_BYTES])
            if not header.kind.payload or header.kind.signed:
                raise FrameError(f"{header.kind.__name__} does not belong on a stream")
            rest, run_id = head[HEADER_BYTES:], self._sockets.run_id
            frame = frames.decode(header, rest, payload, public_key=None, run_id=run_id, digest=digest)
        except UnknownType as error:
            if error.optional:
                return
            raise
        self._deliver(frame, payload.nbytes + len(head))

    def broken(self, stream: Stream, reason: str) -> None:
        """Report the end of a stream."""
        self._wake_express_waiters()
        if stream.by_peer and not self._closed:
            self._loop.call_later(GRACE, self._broken, reason)
        else:
            self._broken(reason)
