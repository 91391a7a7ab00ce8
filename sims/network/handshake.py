"""Handshakes of simulated peers: connections, requests for admission (Hello), and the answers to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Protocol, cast

import msgspec
from thinwire.collectives.transport.circuits.circuits import GATE, DialRoute
from thinwire.collectives.transport.circuits.limits import CircuitLimits
from thinwire.collectives.transport.interface import Admit, Contact
from thinwire.sims.network.circuits import CircuitFabric, Connection, RelayTransport
from thinwire.sims.network.partitions import Partitions
from thinwire.sims.network.translator import Translator
from thinwire.swarm import frame as frames
from thinwire.swarm.identity.address import split_address
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord, RecordError
from thinwire.swarm.messages.registry import VERSION, Hello, Message, PeerId, Refuse, Welcome

_encode = msgspec.msgpack.Encoder().encode


def finish(future: asyncio.Future[None]) -> None:
    """Set the result of a future, unless it has one or was cancelled."""
    if not future.done():
        future.set_result(None)


class Network(CircuitFabric, Protocol):
    """The network as a transport uses it."""

    circuits: CircuitLimits | None
    """Limits of circuits; None: there are none."""
    encode: bool
    payload_factor: float
    """Bytes on the links for each byte of a payload."""
    deadline: float
    """Seconds after which a Hello without an answer is given up."""
    holds: Partitions

    @property
    def places(self) -> Mapping[str, AddressedTransport]:
        """Transports by address."""
        ...

    def wall(self) -> int:
        """Return the wall time in seconds since 1970."""
        ...

    def delay(self, sender: PeerId, receiver: PeerId) -> float:
        """Return the one-way seconds of one packet, drawn at random."""
        ...

    def draw(self, count: int) -> bytes:
        """Return the random bytes of a token."""
        ...


class AddressedTransport(RelayTransport, Protocol):
    """Transport of a peer at an address, behind a translator or not (None)."""

    alive: bool
    banned: dict[PeerId, str]
    translator: Translator | None
    handshakes: Handshakes

    def wall(self) -> int: ...

    def learn(self, record: PeerRecord) -> None: ...

    def connect(self, host: AddressedTransport, circuit: tuple[Connection, Connection] | None) -> None:
        """Open a link, over a circuit or directly (None)."""
        ...


class Handshakes:
    """Handshakes of one transport. `hello`: shown at gates."""

    def __init__(
        self,
        net: Network,
        own: AddressedTransport,
        identity: Identity,
        admit: Admit,
        address: str,
        hello: Callable[[], Hello],
    ) -> None:
        self._net, self._own, self._identity = net, own, identity
        self._admit, self._address, self._hello = admit, address, hello

    # --- at the gates of others

    async def dial(self, record: PeerRecord) -> Welcome | Refuse:
        """Send a Hello to the addresses of a peer until one admits us; return the last answer."""
        answer: Welcome | Refuse = Refuse("unreachable", "no address")
        for address in record.addresses:
            answer = await self.send_hello(Contact(address, record.transport_key), self._hello())
            if isinstance(answer, Welcome):
                break
        return answer

    async def send_hello(self, contact: Contact, hello: Hello) -> Welcome | Refuse:
        """Send a Hello to a gate and open a link, within the network's deadline."""
        try:
            async with asyncio.timeout(self._net.deadline):
                host = await self.connect(contact.address)
                if isinstance(host, Refuse):
                    return host
                return await self._greeted(contact, hello, host, None)
        except TimeoutError:
            return Refuse("unreachable", f"{contact.address} did not answer")

    async def send_hello_over(self, record: PeerRecord, name: str, route: DialRoute) -> Welcome | Refuse:
        """Send a Hello over a circuit and open a link; `name` of the relay is for messages."""
        try:
            near, _ = await route.open(asyncio.Protocol, GATE)
        except OSError as error:
            return Refuse("unreachable", f"{name}: {error}")
        assert isinstance(near, Connection)
        far = near.end.splice.other(near.end)
        assert far is not None and isinstance(far.transport, Connection)
        host = cast(AddressedTransport, far.transport.visitor)
        try:
            contact = Contact(name, record.transport_key)
            return await self._greeted(contact, self._hello(), host, (near, far.transport))
        finally:
            if near.link is None:
                near.leave()

    async def connect(self, address: str) -> AddressedTransport | Refuse:
        """Connect to an address, as TCP does; return the transport that listens there."""
        net, own = self._net, self._own
        host = net.places.get(address)
        if host is None:
            await asyncio.sleep(net.deadline)
            return Refuse("unreachable", f"no process listens at {address}")
        outside = host.translator is None or host.translator is not own.translator
        if outside and own.translator is not None:
            own.translator.send(address)
        await self._cross((own, host))
        if net.holds.refused(own.peer_id, host.peer_id):
            return Refuse("refused", f"a firewall refused the connection to {address}")
        if outside and host.translator is not None and not host.translator.admits(self._address):
            if host.translator.kind == "refusing":
                return Refuse("refused", f"{address} refused the connection")
            await asyncio.sleep(net.deadline)
            return Refuse("unreachable", f"{address} did not answer")
        await self._cross((host, own))
        host = net.places[address]  # a cut may have held the packets until another process listened there
        return host if host.alive else Refuse("refused", f"{address} refused the connection")

    async def _greeted(
        self,
        contact: Contact,
        hello: Hello,
        host: AddressedTransport,
        circuit: tuple[Connection, Connection] | None,
    ) -> Welcome | Refuse:
        """Exchange Hello and Welcome with a peer, over a circuit or directly (None), and open a link."""
        own = self._own
        path: tuple[RelayTransport, ...] = (own, host) if circuit is None else (own, circuit[0].relay, host)
        await self._cross(path, hello)
        await host.awake.wait()
        source = split_address(self._address)[0] if circuit is None else ""
        answer = host.handshakes.answer_hello(hello, self._identity.transport_public, source)
        await self._cross(path[::-1], answer)
        if isinstance(answer, Refuse):
            return answer
        try:
            record = PeerRecord.parse(answer.record, run_id=own.run_id, now=own.wall())
        except RecordError as error:
            return Refuse("unreachable", str(error))
        if record.transport_key != contact.transport_key or record.peer_id in own.banned:
            return Refuse("unreachable", f"{contact.address} is another peer than expected")
        broken = (
            not all(connection.up for connection in circuit)
            if circuit is not None
            else self._net.holds.refused(own.peer_id, host.peer_id)
        )
        if broken or not (own.alive and host.alive):
            return Refuse("unreachable", f"{contact.address} closed the connection")
        own.learn(record)
        own.connect(host, circuit)
        return answer

    async def _cross(self, path: Sequence[RelayTransport], message: Message | None = None) -> None:
        """Let one packet of a handshake travel along a path; a cut holds it."""
        size, net = frames.HEADER_BYTES + len(_encode(message)) if message else 0, self._net
        for source, sink in pairwise(path):
            source.traffic.control_up += size
            # As asyncio.sleep, which takes longer because it is a coroutine: there are half a million handshakes.
            arrived = net.loop.create_future()
            net.loop.call_later(net.delay(source.peer_id, sink.peer_id), finish, arrived)
            await arrived
            while net.holds.pairs and net.holds.cut(source.peer_id, sink.peer_id):
                await asyncio.sleep(0.1)
            sink.traffic.control_down += size
            if sink is not path[-1]:
                await sink.awake.wait()

    # --- at the own gate

    def answer_hello(self, hello: Hello, transport_key: bytes, source: str) -> Welcome | Refuse:
        """Answer the request of an unknown peer for admission. `source`: see Admit."""
        own = self._own
        if hello.version != VERSION:
            return Refuse("version", f"we use version {VERSION}, you use {hello.version}")
        if hello.run_id != own.run_id:
            return Refuse("run", "we are another run")
        try:
            record = PeerRecord.parse(hello.record, run_id=own.run_id, now=own.wall())
        except RecordError as error:
            return Refuse("signature", str(error))
        if record.transport_key != transport_key or record.peer_id == own.peer_id:
            return Refuse("signature", "the record does not fit the transport key")
        if record.peer_id in own.banned:
            return Refuse("banned", own.banned[record.peer_id])
        answer = self._admit(hello, record, source)
        if isinstance(answer, Refuse):
            return answer
        own.learn(record)
        return msgspec.structs.replace(answer, endpoint=self._address, bulk=self._address)
