"""The Transport of life: control over libzmq with CURVE, bulk over sealed TCP streams, all on the one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from thinwire.swarm.address import join_address
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity import Identity
from thinwire.swarm.protocol import Hello, PeerId, Refuse, Welcome
from thinwire.swarm.record import PeerRecord

from .channel import Gatekeeper
from .control import Context, Station
from .gate import Gate
from .inbox import Inbox
from .limits import Buckets, Limits
from .pacing import Pacer
from .peering import Peering
from .ports import HalfOpen, PortTaken, listen, own_address
from .streams import Stream
from .traffic import Traffic
from .transport import Admit, Arrival, Contact


@dataclass(frozen=True, slots=True)
class LinkStats:
    """One peer: bytes on the wire since the start, and of its link, when one is up: round trip and silence, seconds."""

    traffic: Traffic
    linked: bool
    dialled: bool = False
    rtt: float | None = None
    silent: float | None = None


class ZmqTransport:
    """See `Transport`. Made and opened inside a running event loop.

    `host`, `port`: where the gate listens (0: any port). `advertise`: gate addresses to announce instead. `ports`: where
    bulk and member ports are taken from (None: any); peers dial them at the host at which they found the gate. `wall`:
    unix time in seconds. `streams`: bulk streams per link; `token`: admission token shown at gates. `up`: bytes/s that bulk may
    take of our uplink (0: all of it).
    """

    def __init__(
        self,
        identity: Identity,
        *,
        run_id: bytes,
        admit: Admit,
        wall: Callable[[], int],
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: tuple[str, ...] | None = None,
        ports: range | None = None,
        streams: int = 2,
        token: bytes = b"",
        limits: Limits | None = None,
        up: int = 0,
    ) -> None:
        self._identity, self._wall = identity, wall
        self._host, self._port, self._advertise = host, port, advertise or ()
        self._ports, self._limits = ports or range(0, 1), limits or Limits()
        self._context: Context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 16384)
        # The ZAP handler is there before any socket is bound: at no moment is anyone let in unasked.
        self._gatekeeper = Gatekeeper(self._context)
        inbox = Inbox(self._limits.inbox, self._pause_control, self._pause_bulk)
        self._station = Station(identity, run_id, self._limits, self._context, self._gatekeeper, inbox, pacer=Pacer(up))
        self._peering = Peering(self._station, admit, wall, host=host, ports=self._ports, streams=streams, token=token)
        self._gate = Gate(self._station, self._peering.judge, wall)
        clock = asyncio.get_running_loop().time
        sources = Buckets(self._limits.address_burst * streams, self._limits.address_rate * streams)
        self._crowd = HalfOpen(self._limits.half_open, lambda source: sources.take(source, clock()))
        self._bulk: asyncio.Server | None = None
        self._closed = False

    async def open(self) -> None:
        """Listen. Raises PortTaken, after which the transport is closed."""
        try:
            self._port = await self._gate.open(self._host, self._port)
            self._bulk, self._peering.bulk_port = await listen(self._stream, self._host, self._ports)
        except PortTaken:
            await self.close()
            raise
        self._advertise = self._advertise or (join_address(own_address(self._host), self._port),)
        self._peering.addresses = self._advertise

    @property
    def peer_id(self) -> PeerId:
        """Who we are."""
        return self._identity.peer_id

    def addresses(self) -> tuple[str, ...]:
        """Gate addresses to announce."""
        return self._advertise

    async def meet(self, contact: Contact, hello: Hello) -> Welcome | Refuse:
        """See `Transport.meet`. A Welcome means that the link is up."""
        return await self._peering.meet(contact, hello)

    def learn(self, record: PeerRecord) -> None:
        """See `Transport.learn`."""
        self._peering.learn(record)

    async def send(self, to: PeerId, frame: Frame) -> bool:
        """See `Transport.send`."""
        link = self._peering.links.get(to) or await self._peering.reach(to)
        return link is not None and await link.send(frame)

    def offer(self, to: PeerId, frame: Frame) -> bool:
        """See `Transport.offer`."""
        link = self._peering.links.get(to)
        return link is not None and link.send_now(frame)

    async def recv(self) -> Arrival:
        """See `Transport.recv`. Raises RuntimeError when the transport is closed."""
        return await self._station.inbox.get()

    def drop(self, peer: PeerId, reason: str, *, ban: bool = False) -> None:
        """See `Transport.drop`. Nothing that came from the peer is delivered any more."""
        key = self._peering.drop(peer, reason)
        if ban:
            self._peering.banned.add(peer)
            if key is not None:
                self._gate.banned.add(key)
        self._station.inbox.forget(peer)

    async def close(self) -> None:
        """See `Transport.close`. Says goodbye on every link, which takes at most about a second."""
        if self._closed:
            return
        self._closed = True
        self._station.inbox.close()
        if self._bulk is not None:
            self._bulk.close()
        await self._gate.close()
        await self._peering.close()
        self._crowd.clear()
        self._gatekeeper.close()
        # Aborted connections are closed in the next turn of the loop.
        await asyncio.sleep(0)
        self._context.term()

    def stats(self) -> dict[PeerId, LinkStats]:
        """Every peer ever linked."""
        now, links = asyncio.get_running_loop().time(), self._peering.links
        found = {}
        for peer, traffic in self._peering.traffic().items():
            link = links.get(peer)
            found[peer] = (
                LinkStats(traffic, False)
                if link is None
                else LinkStats(traffic, True, link.dialled, link.rtt, now - link.heard)
            )
        return found

    def totals(self) -> tuple[int, int]:
        """See `Transport.totals`."""
        found = self._peering.traffic().values()
        on_its_way = sum(link.bundle.waiting() for link in self._peering.links.values())
        return (
            sum(traffic.control_up + traffic.bulk_up for traffic in found) - on_its_way,
            sum(traffic.control_down + traffic.bulk_down for traffic in found),
        )

    def came(self, peer: PeerId) -> int:
        """See `Transport.came`."""
        link = self._peering.links.get(peer)
        return link.bundle.traffic()[1] if link is not None else 0

    def refusals(self) -> dict[str, int]:
        """Visits to the gate that led to nothing, by reason."""
        return dict(self._gate.refused)

    def _stream(self) -> Stream:
        return Stream(self._station.pool, self._limits, self._peering.claim, self._crowd)

    def _pause_control(self, paused: bool) -> None:
        for link in list(self._peering.links.values()):
            link.pause_control(paused)

    def _pause_bulk(self, paused: bool) -> None:
        for link in list(self._peering.links.values()):
            link.bundle.pause(paused)
