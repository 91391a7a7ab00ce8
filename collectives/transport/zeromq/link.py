"""A link to one peer: one control connection and a few bulk streams, which are lost together.

The dialled side offers a port for that peer alone, for a few seconds; the first connection that proves the peer's
transport key becomes the link. The other connections and the port are closed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from thinwire.collectives.transport.circuits.circuits import DialRoute
from thinwire.collectives.transport.interface import RELAY_STUCK, Arrival
from thinwire.collectives.transport.receive_queue import BoundedQueue
from thinwire.collectives.transport.zeromq.control_frames import CONTROL_KINDS, PROOFS, ControlFrames
from thinwire.collectives.transport.zeromq.offered_port import OfferedPort
from thinwire.collectives.transport.zeromq.sockets.control_connection import (
    ControlConnection,
    SharedSockets,
    SocketLimits,
)
from thinwire.collectives.transport.zeromq.sockets.listener import port_of
from thinwire.collectives.transport.zeromq.streams.record_crypto import EXPRESS_KINDS, session_of
from thinwire.collectives.transport.zeromq.streams.stream_pool import StreamPool, Traffic
from thinwire.swarm import frame as frames
from thinwire.swarm.frame import Frame, FrameError, UnknownType, nbytes
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import Gossip, PeerId, Welcome

READY = b""
"""First message each way: the handshake is over."""
SWITCH = b"\1"
"""From here on, messages of rounds use the express stream.

They are not read there before this marker, so order is preserved.
"""

BYE = b"\0"
"""First byte of the last message, followed by a reason.

It is sent on an orderly close, so a dead process sends none.
"""

_LARGEST = max(kind.limit + kind.payload for kind in CONTROL_KINDS) + 4096
BOUNDS = SocketLimits(messages=64, size=_LARGEST, window=max(4 << 20, _LARGEST))


@dataclass(frozen=True, slots=True)
class LinkEvents:
    """Receivers of the events of a link.

    - `up`: called when the link is ready. `lost`: called once, with the reason. `gone`: called when all is closed.
    """

    up: Callable[[Link], None]
    lost: Callable[[Link, str], None]
    gone: Callable[[Link], None]


class Link:
    """Link to one peer."""

    def __init__(
        self, sockets: SharedSockets, record: PeerRecord, secret: bytes, dialled: bool, events: LinkEvents
    ) -> None:
        self.peer: PeerId = record.peer_id
        self.transport_key = record.transport_key
        self.dialled = dialled
        self.relay: PeerId = b""
        """The peer that splices our connections to this one; b"": they are direct."""
        self._gate = ""
        self.session = session_of(secret)
        self.secret = secret
        self.reason = ""
        """Why the link was lost; "" while it is up."""
        self.last_arrival_at = self.since = asyncio.get_running_loop().time()
        """Monotonic seconds of the last frame, and of the time when the link became ready."""
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._sockets, self._record, self._events = sockets, record, events
        self._frames = ControlFrames(record.public_key, sockets.run_id)
        self._loop = asyncio.get_running_loop()
        self._control: ControlConnection | None = None
        self._candidates: set[ControlConnection] = set()
        self._offered: OfferedPort | None = None
        self.stream_pool = StreamPool(
            sockets,
            secret,
            arrived=self._count,
            deliver=self._deliver_bulk,
            round_message=self._on_round_message,
            express=self._switch,
            broken=self.close,
        )
        self.sends_express = self.reads_express = False
        """True if we send, and read, control messages of rounds on the express stream."""
        self._bye = ""
        self._task: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(sockets.limits.handshake, self.close, "not taken in time")
        self._pause: asyncio.TimerHandle | None = None
        """End of the pause in which the link is not read; None: it is read."""

    # --- opening

    @classmethod
    async def offer(
        cls, sockets: SharedSockets, record: PeerRecord, host: str, ports: range, events: LinkEvents
    ) -> tuple[Link, int]:
        """Return a link that waits to be taken by the peer of `record`, and its port. Raises PortTaken."""
        link = cls(sockets, record, secrets.token_bytes(32), False, events)
        offered = OfferedPort(sockets, record.transport_key)

        def candidate(relay: PeerId) -> asyncio.Protocol:
            received, crowd = link._on_control, offered.crowd
            control = ControlConnection(
                sockets, BOUNDS, received, link._ended, domain=offered.domain, crowd=crowd, relay=relay
            )
            link._candidates.add(control)
            return control.tcp_relay.outer

        try:
            port = await offered.open(candidate, host, ports)
        except BaseException:
            link.close("no port")
            raise
        link._offered = offered
        if link.reason:  # It was closed meanwhile.
            offered.close()
        return link, port

    @classmethod
    async def take(
        cls,
        sockets: SharedSockets,
        record: PeerRecord,
        welcome: Welcome,
        route: DialRoute,
        streams: int,
        events: LinkEvents,
    ) -> Link:
        """Take the link that a gate offers; await `ready` to learn whether it works."""
        link = cls(sockets, record, welcome.secret, True, events)
        control = ControlConnection(sockets, BOUNDS, link._on_control, link._ended, server_key=record.transport_key)
        link._candidates.add(control)
        link._gate, link.relay = route.gate, route.relay
        control.post([READY])
        try:
            port, bulk = port_of(welcome.endpoint), port_of(welcome.bulk)
            async with asyncio.timeout(sockets.limits.handshake):
                await route.open(lambda: control.tcp_relay.outer, port)
                if await asyncio.shield(link.ready):
                    link._task = link._loop.create_task(link.stream_pool.dial(link.peer, route, bulk, streams))
        except (OSError, ValueError) as error:
            link.close(f"cannot connect: {error}")
        except asyncio.CancelledError:
            link.close("given up")
            raise
        return link

    def _up(self, control: ControlConnection) -> None:
        self._control = control
        self.relay = self.relay or control.relay
        control.mark_authenticated()
        self.read_or_wait()
        self._candidates.discard(control)
        self._stop_accepting("another connection was taken")
        self._timer.cancel()
        # Bulk data may be blocked on the path while control is not; then sends must fail instead of waiting for ever.
        self._timer = self._loop.call_later(self._sockets.limits.handshake, self._give_up_bulk)
        if not self.dialled:
            control.post([READY])
        self._switch()
        self.last_arrival_at = self.since = self._loop.time()
        self._events.up(self)
        if not self.ready.done():
            self.ready.set_result(True)

    def _give_up_bulk(self) -> None:
        """Make sends of bulk data fail if no stream came up; end the link if it has a relay.

        Another relay may pass on such data.
        """
        if self.stream_pool.give_up() and self.relay:
            self.close(RELAY_STUCK)

    def _switch(self) -> None:
        """Move round messages to the express stream once there is one, but not before earlier ones are sent."""
        if self._control is not None and self.stream_pool.express is not None and not self.sends_express:
            self._control.post([SWITCH])
            self.sends_express = True
            self.read_or_wait()

    def _stop_accepting(self, reason: str) -> None:
        if self._offered is not None:
            self._offered.close()
        for control in list(self._candidates):
            control.close(reason)

    # --- closing

    def close(self, reason: str) -> None:
        """Close the link and send `reason` to the peer."""
        if self.reason:
            return
        self.reason = reason
        self._timer.cancel()
        if self._pause is not None:
            self._pause.cancel()
        self._stop_accepting(reason)
        if self._task is not None:
            self._task.cancel()
        self.stream_pool.retire()
        if not self.ready.done():
            self.ready.set_result(False)
        if self._control is not None and not self._control.tcp_relay.reason:
            self._control.leave(BYE + reason.encode()[:64])
        else:
            self.stream_pool.close()
        self._events.lost(self, reason)
        self._check_gone()

    @property
    def gates(self) -> tuple[str, ...]:
        """Addresses of the peer's gate, the one that we dialled first."""
        return tuple(address for address in dict.fromkeys((self._gate, *self._record.addresses)) if address)

    @property
    def was_ready(self) -> bool:
        """True if the link was ever ready."""
        return self._control is not None

    @property
    def all_closed(self) -> bool:
        """True if all of the link's connections are closed."""
        control = self._control
        return bool(self.reason) and not self._candidates and (control is None or bool(control.tcp_relay.reason))

    def _ended(self, control: ControlConnection, reason: str) -> None:
        self._candidates.discard(control)
        if control is self._control:
            self.close(self._bye or reason)
            self.stream_pool.close()
        elif self.dialled:
            self.close(reason)
        self._check_gone()

    def _check_gone(self) -> None:
        if self.all_closed:
            self._events.gone(self)

    # --- control

    async def send(self, frame: Frame) -> bool:
        """Hand a frame to the link; return False if the link is lost."""
        kind = type(frame.message)
        self._sockets.frame_limit.sent(self.peer, frame.message)
        if kind.payload and not kind.signed:
            head = frames.encode(frame, None, self._sockets.run_id)
            writer = await self.stream_pool.idle_in_turn(len(head) + memoryview(frame.payload).nbytes)
            if writer is not None:
                await writer.write_in_turn(head, frame.payload)
            return writer is not None and not self.reason
        if kind in EXPRESS_KINDS and self.sends_express:
            head = self._sockets.head(frame)
            writer = await self.stream_pool.express_writer_in_turn()
            if writer is not None:
                writer.post(head)
            return writer is not None
        control = self._control
        if self.reason or control is None:
            return False
        head = self._sockets.head(frame)
        parts = [head, bytes(memoryview(frame.payload))] if len(frame.payload) else [head]
        if not control.post(parts):
            await control.flushed()
        return not self.reason

    def send_now(self, frame: Frame) -> bool:
        """Send without waiting; return False if that is not possible."""
        kind = type(frame.message)
        if self.reason:
            return False
        if kind.payload and not kind.signed:
            if (writer := self.stream_pool.idle(nbytes(frame.payload))) is not None:
                self._sockets.frame_limit.sent(self.peer, frame.message)
                writer.write(frames.encode(frame, None, self._sockets.run_id), frame.payload)
            return writer is not None
        if kind not in EXPRESS_KINDS or not self.sends_express:
            return False
        if (writer := self.stream_pool.express_writer()) is not None:
            self._sockets.frame_limit.sent(self.peer, frame.message)
            writer.post(self._sockets.head(frame))
        return writer is not None

    def send_record(self, record: PeerRecord | None) -> None:
        """Send the peer a newer record in its own name as a last message, without waiting."""
        control = self._control
        if record is None or record.wire == self._record.wire or control is None or control.tcp_relay.reason:
            return
        sockets = self._sockets
        control.post([frames.encode(Frame(Gossip((record.item,))), sockets.identity, sockets.run_id)])

    def _on_control(self, control: ControlConnection, key: bytes, parts: list[memoryview]) -> None:
        if key != self._record.transport_key or self.reason:
            control.close("not the peer this port is for")
            return
        if self._control is None:
            self._up(control)
        if control is not self._control or self.reason:
            return
        self._count()
        if len(parts[0]) == 0:
            return
        if parts[0] == SWITCH and not self.reads_express:
            self.reads_express = True
            self.read_or_wait()
            return
        if parts[0][:1] == BYE:
            text = bytes(parts[0][1:65]).decode("utf-8", "replace")
            self._bye = f"closed by the peer: {text}" if text.isprintable() else "closed by the peer"
            return
        self._take(partial(self._frames.from_control, parts), sum(part.nbytes for part in parts))

    def _on_round_message(self, head: bytes) -> None:
        """Deliver a message from the express stream; unless it is a proof, check its signature afterwards."""
        frame = self._take(partial(self._frames.from_express, head), len(head))
        if frame is not None and type(frame.message) not in PROOFS:
            self._loop.call_soon(self._check_signature, frame)

    def _check_signature(self, frame: Frame) -> None:
        if not self._frames.signature_fits(frame):
            self.close(f"bad signature of {type(frame.message).__name__}")

    def _take(self, checked: Callable[[], Frame], size: int) -> Frame | None:
        """Deliver and return a frame of `size` bytes that is `checked`; close the link if it has a fault."""
        if self.reason:
            return None
        try:
            frame = checked()
        except UnknownType as error:
            if not error.optional:
                self.close(str(error))
        except FrameError as error:
            self.close(str(error))
        else:
            if not self._sockets.circuits.takes(self.peer, frame.message):
                self._deliver(frame, size, bulk=False)
            return frame
        return None

    def _deliver(self, frame: Frame, size: int, *, bulk: bool) -> None:
        self.last_arrival_at = self._loop.time()
        self._sockets.receive_queue.put(Arrival(self.peer, frame), size, bulk=bulk)

    def _deliver_bulk(self, frame: Frame, size: int) -> None:
        self._deliver(frame, size, bulk=True)

    def _count(self, payload: int = 0) -> None:
        """Count a frame; read no more for a while if it is one too many. `payload`: bytes of its payload."""
        sockets = self._sockets
        if sockets.frame_limit.admits(self.peer, self._loop.time(), payload=payload) or self.reason:
            return
        if self._pause is None:
            sockets.frame_limit.pauses[self.peer] += 1
            self._pause = self._loop.call_later(sockets.limits.frames.pause, self._end_pause)
        self.read_or_wait()  # A stream may have come up during the pause.

    def _end_pause(self) -> None:
        self._pause = None
        self.read_or_wait()

    # --- for the transport

    def read_or_wait(self) -> None:
        """Read frames, except during a pause, and of a kind for which the queue has no room."""
        receive_queue = self._sockets.receive_queue
        # `_reads` is called again for each of them: a connection that is read again may begin a pause at once.
        if self._control is not None:
            self._control.pause(not self._reads(receive_queue.control))
        self.stream_pool.read_express(self.reads_express and self._reads(receive_queue.control))
        self.stream_pool.pause(not self._reads(receive_queue.bulk))

    def _reads(self, queue: BoundedQueue) -> bool:
        return self._pause is None and not queue.full

    def traffic(self) -> Traffic:
        """Return the bytes so far."""
        tcp_relay, express = self._control.tcp_relay if self._control else None, self.stream_pool.express
        up, down = (tcp_relay.up, tcp_relay.down) if tcp_relay else (0, 0)
        if express is not None:
            up, down = up + express.writer.up, down + express.down
        return Traffic(up, down, *self.stream_pool.traffic())

    @property
    def rtt(self) -> float | None:
        """Round-trip time in seconds."""
        return self._control.tcp_relay.rtt if self._control else None
