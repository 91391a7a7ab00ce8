"""The gate: the one port that strangers know.

A visit is one Hello and one answer on a separate encrypted connection.

The stranger's signed record must contain the transport key that the handshake proved; the caller decides about
admission. Members pass here too: a link begins with a knock at the peer's gate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from thinwire.collectives.transport.interface import Contact
from thinwire.collectives.transport.zeromq.control_connection import ControlConnection, SharedSockets, SocketLimits
from thinwire.collectives.transport.zeromq.limits import TokenBuckets
from thinwire.collectives.transport.zeromq.listener import HalfOpen, listen
from thinwire.swarm import frame
from thinwire.swarm.frame import HEADER_BYTES, Frame, FrameError, VersionError
from thinwire.swarm.identity.address import split_address
from thinwire.swarm.identity.peer_record import PeerRecord, RecordError
from thinwire.swarm.messages.registry import VERSION, Hello, Message, Refuse, Welcome

_DOMAIN = b"gate"
_VISITOR = SocketLimits(messages=2, size=HEADER_BYTES + Hello.limit, window=16 << 10, strict=True)
_HOST = SocketLimits(messages=2, size=HEADER_BYTES + Welcome.limit, window=128 << 10, strict=True)

Judge = Callable[[Hello, PeerRecord], Awaitable[Welcome | Refuse]]
Wall = Callable[[], int]


class AdmissionPort:
    """Listens for strangers. `refused` counts failed visits by reason; `banned` holds transport keys."""

    def __init__(self, station: SharedSockets, judge: Judge, wall: Wall) -> None:
        self.banned: set[bytes] = set()
        self.refused: dict[str, int] = {}
        limits, clock = station.limits, asyncio.get_running_loop().time
        addresses = TokenBuckets(limits.address_burst, limits.address_rate)
        keys = TokenBuckets(limits.key_burst, limits.key_rate)
        self._station, self._judge, self._wall = station, judge, wall
        self._crowd = HalfOpen(limits.visits, lambda source: addresses.take(source, clock()))
        self._visits: set[ControlConnection] = set()
        self._tasks: dict[ControlConnection, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None
        station.gatekeeper.allow(_DOMAIN, lambda key: key not in self.banned and keys.take(key, clock()))

    async def open(self, host: str, port: int) -> int:
        """Listen; return the port, a free one if `port` is 0. Raises PortTaken."""
        self._server, port = await listen(self._visit, host, range(port, port + 1))
        return port

    async def close(self) -> None:
        """Close the port and end all visits."""
        self._station.gatekeeper.forbid(_DOMAIN)
        if self._server is not None:
            self._server.close()
        for control in list(self._visits):
            control.close("the gate is closed")
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _visit(self) -> asyncio.Protocol:
        control = ControlConnection(self._station, _VISITOR, self._hear, self._left, domain=_DOMAIN, crowd=self._crowd)
        self._visits.add(control)
        return control.tcp_relay.outer

    def _left(self, control: ControlConnection, reason: str) -> None:
        self._visits.discard(control)
        task = self._tasks.get(control)
        if task is None:
            self._count(reason)
        else:
            task.cancel()

    def _count(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def _hear(self, control: ControlConnection, key: bytes, parts: list[memoryview]) -> None:
        if control in self._tasks or len(parts) != 1:
            control.close("said too much")
            return
        limits = self._station.limits
        control.expire(limits.knock + limits.handshake, "stayed too long")
        task = asyncio.get_running_loop().create_task(self._answer(control, key, parts[0]))
        self._tasks[control] = task
        task.add_done_callback(lambda _: self._tasks.pop(control, None))

    async def _answer(self, control: ControlConnection, key: bytes, data: memoryview) -> None:
        try:
            answer = await self._examine(key, data)
        except FrameError as error:
            self._count("malformed")
            control.close(str(error))
            return
        if isinstance(answer, Refuse):
            self._count(answer.code)
        control.post([frame.encode(Frame(answer), None, self._station.run_id)])
        # Wait: the visitor closes the connection when it has read the answer.
        await asyncio.sleep(self._station.limits.handshake)
        control.close("answered")

    async def _examine(self, key: bytes, data: memoryview) -> Welcome | Refuse:
        run_id = self._station.run_id
        try:
            hello = _parse(data, run_id, Hello)
        except VersionError as error:
            return _version(error.theirs)
        assert isinstance(hello, Hello)
        if hello.version != VERSION:
            return _version(hello.version)
        if hello.run_id != run_id:
            return Refuse("run", "this is another run")
        try:
            record = PeerRecord.parse(hello.record, run_id=run_id, now=self._wall())
        except RecordError as error:
            return Refuse("signature", str(error)[:256])
        if record.transport_key != key:
            return Refuse("signature", "the record has another transport key")
        return await self._judge(hello, record)


def _version(theirs: int) -> Refuse:
    return Refuse("version", f"we speak protocol version {VERSION}, you speak {theirs}")


def _parse(data: memoryview, run_id: bytes, *kinds: type[Message]) -> Message:
    header = frame.parse_header(data[:HEADER_BYTES])
    if header.kind not in kinds:
        raise FrameError(f"{header.kind.__name__} does not belong at a gate")
    return frame.decode(header, data[HEADER_BYTES:], b"", public_key=None, run_id=run_id).message


async def knock(
    station: SharedSockets, contact: Contact, hello: Hello, wall: Wall
) -> tuple[Welcome, PeerRecord] | Refuse:
    """Visit a gate; return its Refuse, or its Welcome with the record, checked against the expected key.

    A local failure returns a Refuse with the code "unreachable", or "refused" if the machine answers but nothing
    listens there.
    """
    try:
        host, port = split_address(contact.address)
    except ValueError as error:
        return Refuse("unreachable", str(error)[:256])
    loop = asyncio.get_running_loop()
    done: asyncio.Future[bytes | str] = loop.create_future()

    def on_message(control: ControlConnection, key: bytes, parts: list[memoryview]) -> None:
        if not done.done():
            done.set_result(bytes(parts[0]) if len(parts) == 1 else "it said too much")

    def ended(control: ControlConnection, reason: str) -> None:
        if not done.done():
            done.set_result(f"closed without an answer ({reason})")

    control = ControlConnection(station, _HOST, on_message, ended, server_key=contact.transport_key)
    control.post([frame.encode(Frame(hello), None, hello.run_id)])
    try:
        async with asyncio.timeout(station.limits.knock):
            await loop.create_connection(lambda: control.tcp_relay.outer, host, port)
            control.settle()
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
        message = _parse(memoryview(answer), hello.run_id, Welcome, Refuse)
        if isinstance(message, Refuse):
            return message
        assert isinstance(message, Welcome)
        record = PeerRecord.parse(message.record, run_id=hello.run_id, now=wall())
    except (FrameError, RecordError) as error:
        return Refuse("unreachable", f"{contact.address}: {error}"[:256])
    if record.transport_key != contact.transport_key:
        return Refuse("unreachable", f"{contact.address} is not who was expected")
    return message, record
