"""Transport of simulations: implements collectives/transport/interface.py on a SimNet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
from thinwire.collectives.transport.interface import REFUSED, Admit, Arrival, Contact, Lent
from thinwire.collectives.transport.observed_addresses import Sighting
from thinwire.sims.network.link import Downlink, Fabric, Gateway, Link, LinkTraffic, Pipe, Uplink
from thinwire.sims.network.packets import Packer
from thinwire.sims.network.partitions import Partitions
from thinwire.swarm import frame as frames
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord, RecordError
from thinwire.swarm.membership.gossip_items import announce
from thinwire.swarm.messages.registry import NUMBERS, VERSION, Gossip, Hello, Message, PeerId, Refuse, Welcome

BULK = frozenset(kind for kind in NUMBERS if kind.payload > 0 and not kind.signed)
"""Types of messages that travel on the bulk stream."""


class Network(Fabric, Protocol):
    """The network as a transport uses it."""

    encode: bool
    deadline: float
    """Seconds after which a knock at a gate is given up."""
    holds: Partitions

    @property
    def places(self) -> Mapping[str, SimTransport]:
        """Transports by address."""
        ...

    def wall(self) -> int:
        """Return the wall time in seconds since 1970."""
        ...

    def delay(self, sender: PeerId, receiver: PeerId) -> float:
        """Return the one-way seconds of one packet, drawn at random."""
        ...


class SimTransport:
    """Transport of one peer.

    `uplink.rate` and `downlink.rate` are bytes/s (None: unlimited), `traffic` counts its bytes. `loss` and `jitter` are
    those of its own link, `wall` is its clock in unix seconds. The record shown at the gates of others is the last own
    record given to `learn`, else that of the last `meet`.
    """

    def __init__(
        self, net: Network, identity: Identity, run_id: bytes, admit: Admit, address: str, bandwidth: float | None
    ) -> None:
        self.peer_id, self.run_id = identity.peer_id, run_id
        self.uplink = Uplink(net, bandwidth)
        self.downlink = Downlink(net, bandwidth)
        self.gateway: Gateway | None = None
        """Gateway to all peers that are not behind the same one; must be set before there are links."""
        self.loss = self.jitter = 0.0
        self.wall = net.wall
        self.traffic = LinkTraffic()
        self.peaks = [0, 0]
        """Maximum number of control frames, and of bulk frames, in flight at one time in one pipe."""
        self.alive = True
        self.awake = asyncio.Event()
        self.awake.set()
        self.known: dict[PeerId, PeerRecord] = {}
        self.links: dict[PeerId, Link] = {}
        self._net, self._identity, self._admit, self._address = net, identity, admit, address
        self._record: PeerRecord | None = None
        self._hello: Hello | None = None
        self.banned: dict[PeerId, str] = {}
        self._opening: dict[PeerId, asyncio.Future[None]] = {}
        self._closed = False
        self._came: dict[PeerId, tuple[float, float]] = {}
        self._mail: asyncio.Future[None] | None = None
        self._packer = Packer(identity, run_id, encode=net.encode)
        self._control: deque[tuple[Arrival, Pipe | None]] = deque()
        self._bulk: deque[tuple[Arrival, Pipe | None]] = deque()

    # --- the Transport interface

    def addresses(self) -> tuple[str, ...]:
        return (self._address,)

    async def meet(self, contact: Contact, hello: Hello) -> Welcome | Refuse:
        self._hello = hello
        return await self._knock(contact, hello)

    async def observe(self, contacts: Sequence[Contact], *, port: int = 0, size: int = 0) -> list[Sighting | Refuse]:
        return []  # no peer of a simulation is behind an address translator

    def learn(self, record: PeerRecord) -> None:
        if record.peer_id == self.peer_id:
            if self._record is None or record.sequence > self._record.sequence:
                self._record = record
        elif record.peer_id not in self.banned:
            old = self.known.get(record.peer_id)
            if old is None or record.sequence > old.sequence:
                self.known[record.peer_id] = record

    async def send(self, to: PeerId, frame: Frame) -> bool:
        if not self.awake.is_set():
            await self.awake.wait()
        self._check()
        if to not in self.links:
            await self._open(to)
        link = self.links.get(to)
        if link is None:
            return False
        pipe, packet = link.pipe(self, type(frame.message) in BULK), self._packer.pack(frame)
        if not await pipe.room():
            return False
        pipe.uplink.send(pipe, packet)
        return True

    def offer(self, to: PeerId, frame: Frame) -> bool:
        link = self.links.get(to)
        if link is None or self._closed or not self.awake.is_set():
            return False
        pipe = link.pipe(self, type(frame.message) in BULK)
        if pipe.waiters or pipe.used >= pipe.limit:
            return False
        pipe.take()
        pipe.uplink.send(pipe, self._packer.pack(frame))
        return True

    async def recv(self) -> Arrival:
        while True:
            if not self.awake.is_set():
                await self.awake.wait()
            self._check()
            if receive_queue := self._control or self._bulk:
                arrival, pipe = receive_queue.popleft()
                if pipe is not None:
                    pipe.release()
                return arrival
            self._mail = self._net.loop.create_future()
            await self._mail

    def relay_of(self, peer: PeerId) -> PeerId | None:
        return None  # no peer of a simulation is behind an address translator

    def no_sharing(self) -> str:
        return ""  # every peer of a simulation is a machine

    def obstacle(self, peer: PeerId) -> str:
        return ""

    def lent(self) -> Lent:
        return Lent()

    def drop(self, peer: PeerId, reason: str, *, ban: bool = False) -> None:
        if ban:
            self.banned[peer] = reason
        self.known.pop(peer, None)
        for receive_queue in (self._control, self._bulk):
            kept = [entry for entry in receive_queue if entry[0].peer != peer]
            receive_queue.clear()
            receive_queue.extend(kept)
        if peer in self.links:
            self._hang_up(self.links[peer], "closed by the peer")

    def allow(self, peer: PeerId) -> None:
        self.banned.pop(peer, None)

    def totals(self) -> tuple[int, int]:
        traffic = self.traffic
        return traffic.control_up + traffic.bulk_up, traffic.control_down + traffic.bulk_down

    def inside(self) -> tuple[int, int]:
        return 0, 0

    def shares(self, peer: PeerId) -> bool:
        return False  # all traffic of a simulation goes through its network

    def by_peer(self) -> dict[PeerId, tuple[int, int]]:
        return {}  # a simulation counts the bytes of a peer, not those of its links

    def came(self, peer: PeerId) -> int:
        link = self.links.get(peer)
        if link is None:
            return 0
        # Packets arrive whole; for one in flight, its share of the uplink's capacity is estimated.
        pipe, now = link.pipe(link.other(self), bulk=True), self._net.loop.now
        came, then = self._came.get(peer, (0.0, now))
        # Packets in flight have not arrived; while one is retransmitted after a loss, those behind it wait too.
        moving = pipe.waiting or pipe.arrived or (pipe.queue and not pipe.flying)
        busy = moving and not self._net.holds.held(peer, self.peer_id)
        if busy and pipe.uplink.rate:
            came += (now - then) * pipe.uplink.rate / max(1, pipe.uplink.flows)
        self._came[peer] = (came, now)
        return int(came)

    async def close(self) -> None:
        if self.alive:
            self._closed = True
            self._end("closed by the peer")
            self._wake()

    def _wake(self) -> None:
        """Wake up a waiting `recv`."""
        if self._mail is not None and not self._mail.done():
            self._mail.set_result(None)

    # --- called by the network

    def has(self, link: Link) -> bool:
        """Return True if this end still holds the link."""
        return self.links.get(link.other(self).peer_id) is link

    def accept(self, arrival: Arrival, pipe: Pipe) -> None:
        (self._bulk if pipe.bulk else self._control).append((arrival, pipe))
        self._wake()

    def lose(self, link: Link, reason: str) -> None:
        """Note that the link broke; this end knows it from now on."""
        if self.has(link):
            peer = link.other(self).peer_id
            self._release(link)
            self._net.loop.record(b"lost", self.peer_id, peer, reason.encode())
            self._control.append((Arrival(peer, None, reason), None))
            self._wake()

    def replace(self, link: Link, record: PeerRecord | None) -> None:
        """Note that the other end has a link to another process with our key, whose record it shows."""
        if self.has(link):
            if record is not None:
                self._control.append((Arrival(link.other(self).peer_id, Frame(Gossip((announce(record),)))), None))
            self.lose(link, "closed by the peer")

    def vanish(self) -> None:
        """Stop everything, because the process was killed."""
        self.awake.clear()
        self._end("reset")

    # --- links

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("the transport is closed")

    def _end(self, reason: str) -> None:
        self.alive = False
        for link in list(self.links.values()):
            self._hang_up(link, reason)
        self._control.clear()
        self._bulk.clear()

    def _hang_up(self, link: Link, reason: str) -> None:
        """Give up a link; the other end notices one latency later.

        After a reset it notices at once, otherwise after the frames already sent.
        """
        other = link.other(self)
        self._release(link)
        when = self._net.loop.now + self._net.latency(self.peer_id, other.peer_id)
        if reason != "reset":
            when = max([when, *(pipe.last + 1e-6 for pipe in link.pipes if pipe.source is self)])
        self._net.at(when, other.lose, link, reason)

    def _release(self, link: Link) -> None:
        del self.links[link.other(self).peer_id]
        for pipe in link.pipes:
            if pipe.source is self:
                pipe.queue.clear()
                pipe.wake(len(pipe.waiters))

    async def _open(self, to: PeerId) -> None:
        """Try to open a link. Concurrent calls for the same peer wait for the first one."""
        record = self.known.get(to)
        if record is None or not record.addresses:
            return
        if to in self._opening:
            await asyncio.shield(self._opening[to])
            return
        self._opening[to] = done = self._net.loop.create_future()
        try:
            for address in record.addresses:
                answer = await self._knock(Contact(address, record.transport_key), self._own_hello())
                if isinstance(answer, Welcome):
                    return
                if answer.code == "refused":
                    self._control.append((Arrival(to, None, REFUSED), None))
                    self._wake()
        finally:
            del self._opening[to]
            done.set_result(None)

    def _own_hello(self) -> Hello:
        record = self._record.wire if self._record else self._hello.record if self._hello else None
        if record is None:
            issued = self.wall()
            record = PeerRecord.create(
                self._identity, run_id=self.run_id, addresses=self.addresses(), sequence=1, issued=issued
            ).wire
        return Hello(VERSION, self.run_id, record)

    async def _knock(self, contact: Contact, hello: Hello) -> Welcome | Refuse:
        try:
            async with asyncio.timeout(self._net.deadline):
                return await self._handshake(contact, hello)
        except TimeoutError:
            return Refuse("unreachable", f"{contact.address} did not answer")

    async def _handshake(self, contact: Contact, hello: Hello) -> Welcome | Refuse:
        host = self._net.places.get(contact.address)
        if host is None:
            await asyncio.sleep(self._net.deadline)
            return Refuse("unreachable", f"no process listens at {contact.address}")
        await self._cross(self, host)
        if self._net.holds.refused(self.peer_id, host.peer_id):
            return Refuse("refused", f"a firewall refused the connection to {contact.address}")
        await self._cross(host, self)
        host = self._net.places[contact.address]  # a cut may have held the packets until another process listened there
        if not host.alive:
            return Refuse("refused", f"{contact.address} refused the connection")
        await self._cross(self, host, hello)
        await host.awake.wait()
        answer = host._greet(hello, self._identity.transport_public)
        await self._cross(host, self, answer)
        if isinstance(answer, Refuse):
            return answer
        try:
            record = PeerRecord.parse(answer.record, run_id=self.run_id, now=self.wall())
        except RecordError as error:
            return Refuse("unreachable", str(error))
        if record.transport_key != contact.transport_key or record.peer_id in self.banned:
            return Refuse("unreachable", f"{contact.address} is not who was expected")
        if not (self.alive and host.alive) or self._net.holds.refused(self.peer_id, host.peer_id):
            return Refuse("unreachable", f"{contact.address} closed the connection")
        self.learn(record)
        self._connect(host)
        return answer

    async def _cross(self, source: SimTransport, sink: SimTransport, message: Message | None = None) -> None:
        """Let one packet of a handshake travel; a cut holds it."""
        size = frames.HEADER_BYTES + len(msgspec.msgpack.encode(message)) if message else 0
        source.traffic.control_up += size
        await asyncio.sleep(self._net.delay(source.peer_id, sink.peer_id))
        while self._net.holds.cut(source.peer_id, sink.peer_id):
            await asyncio.sleep(0.1)
        sink.traffic.control_down += size

    def _greet(self, hello: Hello, transport_key: bytes) -> Welcome | Refuse:
        """Judge a stranger at the gate."""
        if hello.version != VERSION:
            return Refuse("version", f"we speak version {VERSION}, you speak {hello.version}")
        if hello.run_id != self.run_id:
            return Refuse("run", "we are another run")
        try:
            record = PeerRecord.parse(hello.record, run_id=self.run_id, now=self.wall())
        except RecordError as error:
            return Refuse("signature", str(error))
        if record.transport_key != transport_key or record.peer_id == self.peer_id:
            return Refuse("signature", "the record does not fit the transport key")
        if record.peer_id in self.banned:
            return Refuse("banned", self.banned[record.peer_id])
        answer = self._admit(hello, record)
        if isinstance(answer, Refuse):
            return answer
        self.learn(record)
        return msgspec.structs.replace(answer, endpoint=self._address, bulk=self._address)

    def _connect(self, host: SimTransport) -> None:
        """Open the link for both ends; it replaces a link to an earlier process of either peer."""
        for end, other in ((self, host), (host, self)):
            old = end.links.get(other.peer_id)
            if old is not None:
                if old.other(end) is other and other.has(old):
                    return  # both dialled at the same time
                end.lose(old, "replaced")
                # An earlier process with the same key that still runs is informed and disconnected.
                when = self._net.loop.now + self._net.latency(end.peer_id, other.peer_id)
                self._net.at(when, old.other(end).replace, old, end.known.get(other.peer_id))
        link = Link(self._net, self, host)
        self.links[host.peer_id] = host.links[self.peer_id] = link
