"""The gate: the one port that strangers know.

A visit is one question (Hello, or Observe) and one answer on a separate encrypted connection. The stranger's signed record
must contain the transport key that the handshake proved; the caller decides about admission. A link to a member begins with
such a visit, too: a Hello at its gate (`knock`).
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from thinwire.collectives.transport.addresses.observed_addresses import Sighting
from thinwire.collectives.transport.circuits.circuits import GATE, DialRoute
from thinwire.collectives.transport.interface import Contact
from thinwire.collectives.transport.rate_limit import TokenBuckets
from thinwire.collectives.transport.zeromq.sockets.control_connection import (
    ControlConnection,
    SharedSockets,
    SocketLimits,
)
from thinwire.collectives.transport.zeromq.sockets.limits import Limits
from thinwire.collectives.transport.zeromq.sockets.listener import HalfOpen, listen
from thinwire.collectives.transport.zeromq.sockets.tcp_relay import CIRCUIT
from thinwire.swarm import frame
from thinwire.swarm.frame import HEADER_BYTES, Frame, FrameError, VersionError
from thinwire.swarm.identity.address import join_address, split_address
from thinwire.swarm.identity.peer_record import PeerRecord, RecordError
from thinwire.swarm.messages.registry import (
    BALLAST,
    PIECE,
    VERSION,
    Hello,
    Message,
    Observe,
    Observed,
    PeerId,
    Refuse,
    Welcome,
)

_DOMAIN = b"gate"
_VISITOR = SocketLimits(messages=2, size=HEADER_BYTES + Hello.limit, window=16 << 10, strict=True)
_OBSERVER = SocketLimits(
    messages=2, size=HEADER_BYTES + Observed.limit, window=Observed.limit + (64 << 10), strict=True
)
_HOST = SocketLimits(messages=2, size=HEADER_BYTES + Welcome.limit, window=128 << 10, strict=True)

Decide = Callable[[Hello, PeerRecord, str], Awaitable[Welcome | Refuse]]
UnixClock = Callable[[], int]


class AdmissionPort:
    """Listens for strangers. `refused` counts failed visits by reason; `banned`: peers by transport key."""

    def __init__(self, sockets: SharedSockets, decide: Decide, wall: UnixClock) -> None:
        self.banned: dict[bytes, PeerId] = {}
        self.refused: dict[str, int] = {}
        limits, clock = sockets.limits, asyncio.get_running_loop().time
        addresses = TokenBuckets(limits.address_burst, limits.address_rate)
        keys = TokenBuckets(limits.key_burst, limits.key_rate)
        self._sockets, self._decide, self._wall = sockets, decide, wall
        self._ballast = TokenBuckets(limits.ballast_burst, limits.ballast_rate)
        self._returned = 0  # visits in return that have not ended
        self._crowd = HalfOpen(
            limits.visits, lambda source: addresses.take(source, clock()), handshakes=fair_visits(limits, clock)
        )
        self._visits: dict[ControlConnection, bool] = {}
        """Visits, and whether they come over a relay, whose address they show."""
        self._tasks: dict[ControlConnection, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None
        sockets.gatekeeper.allow(_DOMAIN, lambda key: key not in self.banned and keys.take(key, clock()))

    async def open(self, host: str, port: int) -> int:
        """Listen; return the port, a free one if `port` is 0. Raises PortTaken."""
        self._server, port = await listen(self._visit, host, range(port, port + 1))
        self._sockets.circuits.listeners[GATE] = lambda relay: self._visit(relayed=True)
        return port

    async def close(self) -> None:
        """Close the port and end all visits."""
        self._sockets.gatekeeper.forbid(_DOMAIN)
        if self._server is not None:
            self._server.close()
        for control in list(self._visits):
            control.close("the gate is closed")
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _visit(self, *, relayed: bool = False) -> asyncio.Protocol:
        control = ControlConnection(
            self._sockets,
            _VISITOR,
            self._on_message,
            self._left,
            domain=_DOMAIN,
            crowd=self._crowd,
            divert=self._sockets.circuits.relay.enter,
        )
        self._visits[control] = relayed
        return control.tcp_relay.outer

    def _left(self, control: ControlConnection, reason: str) -> None:
        self._visits.pop(control, None)
        task = self._tasks.get(control)
        if task is None:
            if reason != CIRCUIT:
                self._count(reason)
        else:
            task.cancel()

    def _count(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def _on_message(self, control: ControlConnection, key: bytes, parts: list[memoryview]) -> None:
        if control in self._tasks or len(parts) != 1:
            control.close("sent too much")
            return
        limits = self._sockets.limits
        control.expire(limits.knock + limits.handshake, "stayed too long")
        task = asyncio.get_running_loop().create_task(self._answer(control, key, parts[0]))
        self._tasks[control] = task
        task.add_done_callback(lambda _: self._tasks.pop(control, None))

    async def _answer(self, control: ControlConnection, key: bytes, data: memoryview) -> None:
        try:
            answer = await self._examine(control, key, data)
        except FrameError as error:
            self._count("malformed")
            control.close(str(error))
            return
        if isinstance(answer, Refuse):
            self._count(answer.code)
        control.post([frame.encode(Frame(answer), None, self._sockets.run_id)])
        # Wait: the visitor closes the connection when it has read the answer.
        await asyncio.sleep(self._sockets.limits.handshake)
        control.close("answered")

    async def _examine(self, control: ControlConnection, key: bytes, data: memoryview) -> Welcome | Observed | Refuse:
        run_id = self._sockets.run_id
        try:
            hello = _parse(data, run_id, Hello, Observe)
        except VersionError as error:
            return _version(error.theirs)
        assert isinstance(hello, Hello | Observe)
        if hello.version != VERSION:
            return _version(hello.version)
        if hello.run_id != run_id:
            return Refuse("run", "this is another run")
        if isinstance(hello, Observe):
            return await self._observed(control.tcp_relay.ends[1], key, hello)
        try:
            record = PeerRecord.parse(hello.record, run_id=run_id, now=self._wall())
        except RecordError as error:
            return Refuse("signature", str(error)[:256])
        if record.transport_key != key:
            return Refuse("signature", "the record has another transport key")
        source = "" if self._visits.get(control, True) else control.tcp_relay.source
        return await self._decide(hello, record, source)

    async def _observed(self, seen: str, key: bytes, question: Observe) -> Observed:
        """Answer a visitor with its address, and whether its gate answers there; no other address is visited."""
        limits, clock = self._sockets.limits, asyncio.get_running_loop().time
        reached = None
        if question.port and self._returned < limits.returned:
            self._returned += 1
            try:
                contact = Contact(join_address(split_address(seen)[0], question.port), key)
                answer = await observe(self._sockets, contact, port=0, seconds=limits.handshake)
                reached = isinstance(answer, Sighting)
            except ValueError:
                reached = None
            finally:
                self._returned -= 1
        size = min(question.size, BALLAST)
        pieces = size // PIECE if size >= PIECE and self._ballast.take("", clock()) else 0
        ballast = (bytes(PIECE),) * pieces
        return Observed(seen, self._wall(), reached, ballast)


def fair_visits(limits: Limits, clock: Callable[[], float]) -> Callable[[str], bool]:
    """Return a function that returns True if a visit from a network may begin a handshake now.

    All visits together have a limit. A network with many visits leaves half of it to the others, so that a flood from a few
    networks does not keep out honest visitors. clock: seconds, monotonic.
    """
    visits = TokenBuckets(limits.visit_burst, limits.visit_rate)
    networks = TokenBuckets(limits.network_burst, limits.network_rate)

    def may_begin(network: str) -> bool:
        modest = networks.take(network, clock())
        return visits.take("", clock(), leave=0.0 if modest else limits.visit_burst / 2)

    return may_begin


def _version(theirs: int) -> Refuse:
    return Refuse("version", f"we use protocol version {VERSION}, you use {theirs}")


def _parse(data: memoryview, run_id: bytes, *kinds: type[Message]) -> Message:
    header = frame.parse_header(data[:HEADER_BYTES])
    if header.kind not in kinds:
        raise FrameError(f"{header.kind.__name__} does not belong at a gate")
    return frame.decode(header, data[HEADER_BYTES:], b"", public_key=None, run_id=run_id).message


async def knock(
    sockets: SharedSockets, contact: Contact, hello: Hello, wall: UnixClock, route: DialRoute | None = None
) -> tuple[Welcome, PeerRecord] | Refuse:
    """Visit a gate; return its Refuse, or its Welcome with the record, checked against the expected key.

    A failure returns a Refuse with the code "unreachable", "refused" if the machine answers but nothing listens there,
    "version" if the gate has another version, or "signature" if the record is not valid here and now.
    """
    answer = await _visit(sockets, contact, hello, Welcome, _HOST, route=route)
    if isinstance(answer, Refuse):
        return answer
    message = answer.message
    assert isinstance(message, Welcome)
    try:
        record = PeerRecord.parse(message.record, run_id=hello.run_id, now=wall())
    except RecordError as error:
        return Refuse("signature", str(error)[:256])  # Usually one of both clocks is wrong.
    if record.transport_key != contact.transport_key:
        return Refuse("unreachable", f"{contact.address} is another peer than expected")
    return message, record


async def observe(
    sockets: SharedSockets, contact: Contact, *, port: int, size: int = 0, source: int = 0, seconds: float = math.inf
) -> Sighting | Refuse:
    """Ask a gate from which address it sees us. Return its claim, or a Refuse as `knock` does.

    `port`, `size`: see Observe. `source`: our own port, shared by questions to several gates; 0: any. `seconds`: limit
    of the whole visit, if shorter than that of a knock.
    """
    question = Observe(VERSION, sockets.run_id, port, size)
    answer = await _visit(sockets, contact, question, Observed, _OBSERVER, source=source, seconds=seconds)
    if isinstance(answer, Refuse):
        return answer
    observed = answer.message
    assert isinstance(observed, Observed)
    rate = PIECE * len(observed.ballast) / max(answer.seconds, 1e-6)
    return Sighting(answer.theirs, answer.ours, observed.address, observed.reached, port, observed.wall, rate)


@dataclass(frozen=True, slots=True)
class _Answer:
    """Answer of a gate, both ends of the connection, and the seconds from its first to its last byte."""

    message: Message
    ours: str
    theirs: str
    seconds: float


async def _visit(
    sockets: SharedSockets,
    contact: Contact,
    question: Hello | Observe,
    wanted: type[Message],
    bounds: SocketLimits,
    *,
    route: DialRoute | None = None,
    source: int = 0,
    seconds: float = math.inf,
) -> _Answer | Refuse:
    """Put one question to a gate; return its answer of the type `wanted`, or a Refuse.

    `route`: None for a direct one from our port `source`.
    """
    try:
        host, port = split_address(contact.address) if route is None or not route.relay else ("", GATE)
    except ValueError as error:
        return Refuse("unreachable", str(error)[:256])
    loop = asyncio.get_running_loop()
    done: asyncio.Future[bytes | str] = loop.create_future()

    def on_message(control: ControlConnection, key: bytes, parts: list[memoryview]) -> None:
        if not done.done():
            done.set_result(bytes(parts[0]) if len(parts) == 1 else "it sent too much")

    def ended(control: ControlConnection, reason: str) -> None:
        if not done.done():
            done.set_result(f"closed without an answer ({reason})")

    control = ControlConnection(sockets, bounds, on_message, ended, server_key=contact.transport_key)
    control.post([frame.encode(Frame(question), None, question.run_id)])
    relay = control.tcp_relay
    try:
        async with asyncio.timeout(min(sockets.limits.knock, seconds)):
            if route is not None:
                await route.open(lambda: relay.outer, port)
            else:
                sock = await _connected((await sockets.resolver.numeric(host))[0], port, source)
                await loop.create_connection(lambda: relay.outer, sock=sock)
            ours, theirs = relay.ends
            control.mark_authenticated()
            answer = await done
    except ConnectionRefusedError:
        return Refuse("refused", f"no process listens at {contact.address}")
    except TimeoutError:
        return Refuse("unreachable", f"{contact.address} did not answer")
    except OSError as error:
        return Refuse("unreachable", f"{contact.address}: {error.strerror or error}"[:256])
    finally:
        control.close("visit over")
    if isinstance(answer, str):
        return Refuse("unreachable", f"{contact.address}: {answer}"[:256])
    try:
        message = _parse(memoryview(answer), question.run_id, wanted, Refuse)
    except VersionError as error:  # A gate of another version also refuses in frames of that version.
        return Refuse("version", str(error))
    except FrameError as error:
        return Refuse("unreachable", f"{contact.address}: {error}"[:256])
    if isinstance(message, Refuse):
        return message
    return _Answer(message, ours, theirs, relay.receiving)


async def _connected(host: str, port: int, source: int) -> socket.socket:
    """Return a TCP connection to a numeric address from our port `source`. Raises OSError.

    Connections to several peers may share the port: a translator that maps by source port shows them one address.
    """
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", source))
        await loop.sock_connect(sock, (host, port))
    except BaseException:
        sock.close()
        raise
    return sock
