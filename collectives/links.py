"""A link: all that joins us to one peer. One control connection, a few bulk streams, one life: it is lost as a whole.

The side that was dialled offers a port for that peer alone, for a few seconds; the first connection that proves the
peer's transport key is the link, the others are closed, and so is the port.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection
from itertools import count
from typing import TypeAlias

from thinwire.swarm import frame as frames
from thinwire.swarm.frame import HEADER_BYTES, Frame, FrameError, UnknownType, verify_message
from thinwire.swarm.protocol import CHUNK_BYTES, TYPES, Gossip, Hello, Message, PeerId, Refuse, Vote, Welcome
from thinwire.swarm.record import PeerRecord
from thinwire.swarm.rumor import announce

from .bundle import Bundle
from .control import Bounds, Control, Station
from .ports import HalfOpen, listen
from .sealing import WORDS, session_of
from .transport import Arrival

BOUNDS = Bounds(messages=64, size=CHUNK_BYTES + 4096, window=4 << 20)
READY = b""
"""First message each way: the handshake is over."""
SWITCH = b"\1"
"""From here on the words of rounds come by the sealed stream for them: they are not read there before, so all stay in order."""

BYE = b"\0"
"""First byte of the last message, a reason follows: whoever closes in order says so, a dead process does not."""

_CONTROL = [
    kind for kind in TYPES.values() if kind not in (Hello, Welcome, Refuse) and not (kind.payload and not kind.signed)
]
assert max(kind.limit for kind in _CONTROL) + 128 <= BOUNDS.size
_domains = count(1)
Up: TypeAlias = "Callable[[Link], None]"
Lost: TypeAlias = "Callable[[Link, str], None]"


class Link:
    """Tells its owner: `up(link)` when it is ready, `lost(link, reason)` once, `gone(link)` when all is closed."""

    def __init__(
        self, station: Station, record: PeerRecord, secret: bytes, dialled: bool, *, up: Up, lost: Lost, gone: Up
    ) -> None:
        self.peer: PeerId = record.peer_id
        self.transport_key = record.transport_key
        self.dialled = dialled
        self.session = session_of(secret)
        self.secret = secret
        self.reason = ""
        """Why it is lost; "" while it lives."""
        self.heard = self.since = asyncio.get_running_loop().time()
        """Monotonic seconds of the last frame, and since when the link is ready."""
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._station, self._record = station, record
        self._tell_up, self._tell_lost, self._tell_gone = up, lost, gone
        self._loop = asyncio.get_running_loop()
        self._control: Control | None = None
        self._candidates: set[Control] = set()
        self._domain = b"link %d" % next(_domains)
        self._server: asyncio.Server | None = None
        self.bundle = Bundle(
            station,
            secret,
            deliver=self._deliver_bulk,
            heard=self._hear_word,
            express=self._switch,
            broken=self.close,
        )
        self._speaks = self._listens = False  # by the stream for words
        self._bye = ""
        self._task: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(station.limits.handshake, self.close, "not taken in time")

    # --- how it begins

    @classmethod
    async def offer(
        cls, station: Station, record: PeerRecord, host: str, ports: range, *, up: Up, lost: Lost, gone: Up
    ) -> tuple[Link, int]:
        """A link that waits to be taken by the peer of `record`; the port where. Raises PortTaken."""
        link = cls(station, record, secrets.token_bytes(32), False, up=up, lost=lost, gone=gone)
        crowd = HalfOpen(8)
        key = record.transport_key

        def candidate() -> asyncio.Protocol:
            control = Control(station, BOUNDS, link._hear, link._ended, domain=link._domain, crowd=crowd)
            link._candidates.add(control)
            return control.passage.outer

        try:
            link._server, port = await listen(candidate, host, ports)
        except BaseException:
            link.close("no port")
            raise
        if link.reason:
            link._server.close()
        else:
            station.gatekeeper.allow(link._domain, lambda candidate: candidate == key)
        return link, port

    @classmethod
    async def take(
        cls,
        station: Station,
        record: PeerRecord,
        welcome: Welcome,
        host: str,
        streams: int,
        *,
        up: Up,
        lost: Lost,
        gone: Up,
    ) -> Link:
        """Take the link that a gate at `host` offers; await `ready` to know whether it works."""
        link = cls(station, record, welcome.secret, True, up=up, lost=lost, gone=gone)
        control = Control(station, BOUNDS, link._hear, link._ended, server_key=record.transport_key)
        link._candidates.add(control)
        control.post([READY])
        try:
            port, bulk = port_of(welcome.endpoint), port_of(welcome.bulk)
            async with asyncio.timeout(station.limits.handshake):
                await link._loop.create_connection(lambda: control.passage.outer, host, port)
                if await asyncio.shield(link.ready):
                    link._task = link._loop.create_task(link.bundle.dial(host, bulk, streams))
        except (OSError, ValueError) as error:
            link.close(f"cannot connect: {error}")
        except asyncio.CancelledError:
            link.close("given up")
            raise
        return link

    def _up(self, control: Control) -> None:
        self._control = control
        control.settle()
        control.pause(self._station.inbox.control.full)
        self._candidates.discard(control)
        self._dismiss("another connection was taken")
        self._timer.cancel()
        # Bulk may be blocked on the way where control is not; then sends of it fail instead of waiting for ever.
        self._timer = self._loop.call_later(self._station.limits.handshake, self.bundle.give_up)
        if not self.dialled:
            control.post([READY])
        self._switch()
        self.heard = self.since = self._loop.time()
        self._tell_up(self)
        if not self.ready.done():
            self.ready.set_result(True)

    def _switch(self) -> None:
        """Words go by their stream as soon as there is one, and no sooner than what was said before it."""
        if self._control is not None and self.bundle.express is not None and not self._speaks:
            self._control.post([SWITCH])
            self._speaks = True
            self.bundle.listen(self._listens and not self._station.inbox.control.full)

    def _dismiss(self, reason: str) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self._station.gatekeeper.forbid(self._domain)
        for control in list(self._candidates):
            control.close(reason)

    # --- how it ends

    def close(self, reason: str) -> None:
        """End the link for `reason`; the peer is told the same."""
        if self.reason:
            return
        self.reason = reason
        self._timer.cancel()
        self._dismiss(reason)
        if self._task is not None:
            self._task.cancel()
        self.bundle.retire()
        if not self.ready.done():
            self.ready.set_result(False)
        if self._control is not None and not self._control.passage.reason:
            self._control.leave(BYE + reason.encode()[:64])
        else:
            self.bundle.close()
        self._tell_lost(self, reason)
        self._check_gone()

    @property
    def took(self) -> bool:
        """Whether it was ever ready."""
        return self._control is not None

    @property
    def over(self) -> bool:
        """Whether nothing of it is open any more."""
        control = self._control
        return bool(self.reason) and not self._candidates and (control is None or bool(control.passage.reason))

    def _ended(self, control: Control, reason: str) -> None:
        self._candidates.discard(control)
        if control is self._control:
            self.close(self._bye or reason)
            self.bundle.close()
        elif self.dialled:
            self.close(reason)
        self._check_gone()

    def _check_gone(self) -> None:
        if self.over:
            self._tell_gone(self)

    # --- control

    async def send(self, frame: Frame) -> bool:
        """Hand a frame to the link; False when it is lost."""
        kind = type(frame.message)
        if kind.payload and not kind.signed:
            return await self.bundle.send(frame)
        if kind in WORDS and self._speaks:
            return await self.bundle.say(self._station.head(frame))
        control = self._control
        if self.reason or control is None:
            return False
        head = self._station.head(frame)
        parts = [head, bytes(memoryview(frame.payload))] if len(frame.payload) else [head]
        if not control.post(parts):
            await control.flushed()
        return not self.reason

    def send_now(self, frame: Frame) -> bool:
        """`send` without waiting: False when that cannot be."""
        kind = type(frame.message)
        if self.reason:
            return False
        if kind.payload and not kind.signed:
            return self.bundle.offer(frame)
        if kind not in WORDS or not self._speaks:
            return False
        return self.bundle.post(self._station.head(frame))

    def show(self, record: PeerRecord | None) -> None:
        """Send the peer a record in its own name that may be news to it, as a last word: nothing waits for it."""
        control = self._control
        if record is None or record.wire == self._record.wire or control is None or control.passage.reason:
            return
        station = self._station
        control.post([frames.encode(Frame(Gossip((announce(record),))), station.identity, station.run_id)])

    def _hear(self, control: Control, key: bytes, parts: list[memoryview]) -> None:
        if key != self._record.transport_key or self.reason:
            control.close("not the peer this port is for")
            return
        if self._control is None:
            self._up(control)
        if control is not self._control or self.reason or len(parts[0]) == 0:
            return
        if parts[0] == SWITCH and not self._listens:
            self._listens = True
            self.bundle.listen(not self._station.inbox.control.full)
            return
        if parts[0][:1] == BYE:
            text = bytes(parts[0][1:65]).decode("utf-8", "replace")
            self._bye = f"closed by the peer: {text}" if text.isprintable() else "closed by the peer"
            return
        self._take(parts[0], parts[1] if len(parts) == 2 else memoryview(b""), len(parts) < 3, _CONTROL)

    def _hear_word(self, head: bytes) -> None:
        """A word of rounds. That the peer has said it its stream proves. A signature is there to be shown to others, which is
        done with votes alone; with the others it is checked when what waits for the word has been done.
        """
        frame = self._take(memoryview(head), memoryview(b""), True, WORDS, later=True)
        if frame is not None:
            self._loop.call_soon(self._check, frame)

    def _check(self, frame: Frame) -> None:
        public_key, run_id = self._record.public_key, self._station.run_id
        if not verify_message(frame.message, frame.signature, public_key, run_id):
            self.close(f"bad signature of {type(frame.message).__name__}")

    def _take(
        self,
        data: memoryview,
        payload: memoryview,
        whole: bool,
        kinds: Collection[type[Message]],
        *,
        later: bool = False,
    ) -> Frame | None:
        """Check a control frame, one of these `kinds`, and pass it on; the frame if its signature is to be checked `later`."""
        if self.reason:
            return None
        try:
            header = frames.parse_header(data[:HEADER_BYTES])
            if header.kind not in kinds or not whole:
                raise FrameError(f"{header.kind.__name__} does not belong on this channel")
            public_key, run_id = self._record.public_key, self._station.run_id
            later = later and header.kind is not Vote
            frame = frames.decode(
                header, data[HEADER_BYTES:], payload, public_key=public_key, run_id=run_id, later=later
            )
        except UnknownType as error:
            if not error.optional:
                self.close(str(error))
        except FrameError as error:
            self.close(str(error))
        else:
            self._deliver(frame, data.nbytes + payload.nbytes, bulk=False)
            return frame if later else None
        return None

    def _deliver(self, frame: Frame, size: int, *, bulk: bool) -> None:
        self.heard = self._loop.time()
        self._station.inbox.put(Arrival(self.peer, frame), size, bulk=bulk)

    def _deliver_bulk(self, frame: Frame, size: int) -> None:
        self._deliver(frame, size, bulk=True)

    # --- for the transport

    def pause_control(self, paused: bool) -> None:
        """Stop or resume reading control."""
        if self._control is not None:
            self._control.pause(paused)
        self.bundle.listen(self._listens and not paused)

    def traffic(self) -> tuple[int, int, int, int]:
        """Bytes on the wire so far: control up, control down, bulk up, bulk down."""
        passage, express = self._control.passage if self._control else None, self.bundle.express
        up, down = (passage.up, passage.down) if passage else (0, 0)
        if express is not None:
            up, down = up + express.up, down + express.down
        return (up, down, *self.bundle.traffic())

    @property
    def rtt(self) -> float | None:
        """Round-trip time in seconds."""
        return self._control.passage.rtt if self._control else None


def port_of(endpoint: str) -> int:
    """The port of ":port", which means: at the gate's own host. Raises ValueError."""
    digits = endpoint[1:]
    if endpoint[:1] != ":" or not digits.isascii() or not digits.isdigit() or not 0 < int(digits[:6]) < 65536:
        raise ValueError(f"not an endpoint: {endpoint!r}")
    return int(digits)
