"""The sealed streams of one link: some for bulk, whose frames are dealt to whichever is free, and one for words of rounds."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from thinwire.swarm import frame as frames
from thinwire.swarm.frame import HEADER_BYTES, Frame, FrameError, UnknownType

from .control import Station
from .sealing import EXPRESS, MAX_STREAMS
from .streams import Stream

GRACE = 0.25
"""Seconds by which the news of a broken stream may overtake the goodbye that explains it."""


class Bundle:
    """`deliver(frame, size)` gets the bulk that arrives, and `heard(head)` the words; `broken(reason)` is called when any
    stream ends, and `express` when there is a stream for words, which is read once `listen` says so.

    What a dead stream held is lost without a word, so the link that owns the bundle is lost with it.
    """

    def __init__(
        self,
        station: Station,
        secret: bytes,
        *,
        deliver: Callable[[Frame, int], None],
        heard: Callable[[bytes], None],
        express: Callable[[], None],
        broken: Callable[[str], None],
    ) -> None:
        self.express: Stream | None = None
        """The stream for words, as soon as there is one."""
        self._station, self._secret, self._deliver, self._broken = station, secret, deliver, broken
        self._heard, self._tell_express = heard, express
        self._streams: dict[int, Stream] = {}
        self._speakers: deque[asyncio.Future[None]] = deque()
        self._idle: deque[Stream] = deque()
        self._waiters: deque[asyncio.Future[Stream | None]] = deque()
        self._closed = self._given_up = False
        self._loop = asyncio.get_running_loop()

    async def dial(self, host: str, port: int, count: int) -> None:
        """Open the stream for words and `count` others; those that cannot be opened are done without."""
        numbers = (EXPRESS, *range(min(count, MAX_STREAMS)))
        await asyncio.gather(*(self._dial(host, port, number) for number in numbers))

    async def _dial(self, host: str, port: int, number: int) -> None:
        station = self._station
        try:
            async with asyncio.timeout(station.limits.handshake):
                _, stream = await self._loop.create_connection(lambda: Stream(station.pool, station.limits), host, port)
        except OSError:
            return
        if self._closed:
            stream.fail("the link is gone")
        elif not stream.reason:
            stream.open(self, self._secret, number)

    async def send(self, frame: Frame) -> bool:
        """Hand a frame to a stream as soon as one is free; False when there is none any more."""
        head = frames.encode(frame, None, self._station.run_id)
        await self._station.pacer.wait(len(head) + memoryview(frame.payload).nbytes)
        stream = await self._free()
        if stream is None:
            return False
        stream.write(head, frame.payload)
        return not self._closed

    def offer(self, frame: Frame) -> bool:
        """`send`, if a stream is free now and nobody else waits for one."""
        if self._closed or self._waiters or self._station.pacer.rate:
            return False
        while self._idle:
            stream = self._idle.popleft()
            if stream.idle:
                stream.write(frames.encode(frame, None, self._station.run_id), frame.payload)
                return True
        return False

    def post(self, head: bytes) -> bool:
        """Send a word, if that can be done at once."""
        express = self.express
        if self._closed or express is None or express.reason or express.crowded:
            return False
        express.post(head)
        return True

    async def say(self, head: bytes) -> bool:
        """Send a word as soon as the stream takes it; False when it has ended."""
        while not self.post(head):
            if self._closed or self.express is None or self.express.reason:
                return False
            self._speakers.append(self._loop.create_future())
            await self._speakers[-1]
        return True

    def listen(self, listens: bool) -> None:
        """Read words, or leave them with who says them."""
        if self.express is not None:
            self.express.pause(not listens)

    async def _free(self) -> Stream | None:
        while not self._closed and not self._given_up:
            while self._idle:
                stream = self._idle.popleft()
                if stream.idle:
                    return stream
            waiter: asyncio.Future[Stream | None] = self._loop.create_future()
            self._waiters.append(waiter)
            try:
                given = await waiter
            except asyncio.CancelledError:
                # It may have been given a stream in the same turn: the next one in the queue gets it.
                if waiter.done() and not waiter.cancelled() and (given := waiter.result()) is not None:
                    self.flushed(given)
                raise
            if given is not None and given.idle:
                return given
        return None

    def give_up(self) -> None:
        """If no stream came about, bulk is blocked on the way: sends fail instead of waiting for ever."""
        if not self._streams:
            self._given_up = True
            self._release()

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

    def traffic(self) -> tuple[int, int]:
        """Bytes up and down."""
        streams = self._streams.values()
        return sum(stream.up for stream in streams), sum(stream.down for stream in streams)

    def waiting(self) -> int:
        """Bytes up that are still on their way."""
        return sum(stream.waiting for stream in self._streams.values())

    def _release(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
        self._speak()

    def _speak(self) -> None:
        for speaker in self._speakers:
            if not speaker.done():
                speaker.set_result(None)
        self._speakers.clear()

    # --- called by streams

    def joined(self, stream: Stream, number: int) -> None:
        """A stream has proved the secret."""
        if number == EXPRESS and self.express is None and not self._closed:
            self.express = stream
            stream.pause(True)
            self._tell_express()
            return
        if self._closed or number in self._streams or number >= MAX_STREAMS:
            raise ValueError("a stream that is not awaited")
        self._streams[number] = stream
        if self._station.pacer.rate:
            stream.pace(self._station.pacer.rate)
        self._given_up = False
        stream.pause(self._station.inbox.bulk.full)

    def flushed(self, stream: Stream) -> None:
        """A stream takes the next frame."""
        if stream is self.express:
            self._speak()
            return
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(stream)
                return
        self._idle.append(stream)

    def arrived(self, stream: Stream, head: bytes, payload: memoryview) -> None:
        """A record came in."""
        if self._closed:
            return
        if stream is self.express:
            self._heard(head)
            return
        try:
            header = frames.parse_header(head[:HEADER_BYTES])
            if not header.kind.payload or header.kind.signed:
                raise FrameError(f"{header.kind.__name__} does not belong on a stream")
            frame = frames.decode(header, head[HEADER_BYTES:], payload, public_key=None, run_id=self._station.run_id)
        except UnknownType as error:
            if error.optional:
                return
            raise
        self._deliver(frame, payload.nbytes + len(head))

    def broken(self, stream: Stream, reason: str) -> None:
        """A stream ended."""
        self._speak()
        if stream.by_peer and not self._closed:
            self._loop.call_later(GRACE, self._broken, reason)
        else:
            self._broken(reason)
