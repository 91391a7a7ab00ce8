"""Links to peers and how they are established: dials, offers, duplicates, replacements, back-off.

Both sides may dial at once. If the dials cross, the side with the smaller transport key goes first: its gate holds the
other's Hello until its own dial has finished, and then answers that there is a link already. If two links come up
nevertheless, the same order decides between them.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeAlias

import msgspec
from thinwire.collectives.transport.circuits.circuits import TRANSIENT, DialRoute, Factory
from thinwire.collectives.transport.interface import (
    OWN_GATE,
    REFUSED,
    RELAY_DEAD,
    RELAY_STUCK,
    SAME_KEY,
    Admit,
    Arrival,
    Contact,
)
from thinwire.collectives.transport.zeromq.admission import UnixClock, knock
from thinwire.collectives.transport.zeromq.link import Link, LinkEvents
from thinwire.collectives.transport.zeromq.sockets.control_connection import SharedSockets
from thinwire.collectives.transport.zeromq.sockets.limits import Retry
from thinwire.collectives.transport.zeromq.sockets.listener import PortTaken
from thinwire.collectives.transport.zeromq.streams.stream_pool import StreamPool, Traffic
from thinwire.swarm.identity.address import source_of, split_address
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import VERSION, Hello, PeerId, Refuse, Welcome

FORGOTTEN = b""
"""In place of the id: all peers whose traffic is not counted separately any more."""

SHOWN = 16
"""Most records of ours that are remembered after they were shown at a gate."""

HERE = ""
"""Endpoint of a Welcome to a peer that already has a link."""

_Dial: TypeAlias = "asyncio.Task[Welcome | Refuse]"


class Connections:
    """Establishes and replaces links. `links` holds those that are up.

    `ports`: ports of links. `streams`: number of bulk streams of a link that we dial.
    """

    def __init__(self, sockets: SharedSockets, admit: Admit, wall: UnixClock, *, ports: range, streams: int) -> None:
        self.links: dict[PeerId, Link] = {}
        self.banned: set[PeerId] = set()
        self.own = b""
        """Our record as shown at gates, in bytes."""
        self.addresses: tuple[str, ...] = ()
        self.bulk_port = 0
        """Port of bulk streams, which a Welcome names."""
        self.host = ""
        """Address to bind for links."""
        self._sockets, self._admit, self._wall = sockets, admit, wall
        self._ports, self._streams = ports, streams
        self._events = LinkEvents(self._up, self._lost, self._gone)
        self._records: dict[PeerId, PeerRecord] = {}
        self._offers: dict[PeerId, Link] = {}
        self._leaving: set[Link] = set()
        self._dials: dict[bytes, _Dial] = {}
        self._retries: dict[PeerId, Retry] = {}
        self._awaited: dict[PeerId, asyncio.Future[None]] = {}
        self._sessions: dict[bytes, Link] = {}
        self._traffic: dict[PeerId, Traffic] = {}
        """Traffic of links that have ended."""
        self._loop = asyncio.get_running_loop()
        self._random = random.SystemRandom()
        self._shown = deque[bytes](maxlen=SHOWN)
        """Records that we have shown at gates last: an invite or a router may lead to our own gate."""
        self._quiet = asyncio.Event()
        self._closed = False
        sockets.circuits.links = self.links

    # --- records of peers

    def learn(self, record: PeerRecord) -> None:
        """Store a peer's record, or our own; an older one does not replace a newer one."""
        peer = record.peer_id
        if peer == self._sockets.identity.peer_id:
            self.own = record.wire
            return
        if peer in self.banned:
            return
        old = self._records.pop(peer, None)
        if old is not None and old.sequence >= record.sequence:
            record = old
        else:
            self._retries.pop(peer, None)
        self._records[peer] = record
        if len(self._records) > self._sockets.limits.peers:
            oldest = next((known for known in self._records if known not in self.links), peer)
            del self._records[oldest]
            self._retries.pop(oldest, None)

    def drop(self, peer: PeerId, reason: str) -> bytes | None:
        """Close the link to a peer without an Arrival and forget the peer; return its transport key if known."""
        self._sockets.circuits.relay.forget(peer)
        self._retries.pop(peer, None)
        record = self._records.pop(peer, None)
        key = record.transport_key if record is not None else None
        for links in (self.links, self._offers):
            link = links.pop(peer, None)
            if link is not None:
                key = link.transport_key
                link.close(reason)
        if key is not None and key in self._dials:
            self._dials[key].cancel()
        return key

    def leave_relay(self, relay: PeerId) -> None:
        """Close the links over circuits of a relay."""
        for link in [one for one in self.links.values() if one.relay == relay]:
            link.close(RELAY_DEAD)

    def traffic(self) -> dict[PeerId, Traffic]:
        """Return the bytes to and from every peer since the start."""
        total = dict(self._traffic)
        for peer, link in self.links.items():
            total[peer] = total.get(peer, Traffic()) + link.traffic()
        return total

    def obstacle(self, peer: PeerId) -> str:
        """Return why the last dial of a peer failed; empty if there is a link or none failed."""
        retry = self._retries.get(peer)
        return "" if retry is None or peer in self.links else retry.reason

    def owner_of(self, session: bytes) -> tuple[StreamPool, bytes] | None:
        """Return the stream pool and secret of the link with this session, or None."""
        link = self._sessions.get(session)
        return None if link is None or link.reason else (link.stream_pool, link.secret)

    async def close(self) -> None:
        """Cancel dials, send a goodbye on every link, and wait until all links are closed."""
        self._closed = True
        dials = list(self._dials.values())
        for dial in dials:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)
        for link in [*self.links.values(), *self._offers.values()]:
            self._traffic.setdefault(link.peer, Traffic())
            link.close("leaving")
        while self._leaving:
            self._quiet.clear()
            await self._quiet.wait()

    # --- links open and close

    def _up(self, link: Link) -> None:
        peer = link.peer
        if self._offers.get(peer) is link:
            del self._offers[peer]
        if self._closed or peer in self.banned:
            link.close("not wanted here")
            return
        old = self.links.get(peer)
        if old is not None:
            young = self._loop.time() - old.since < self._sockets.limits.young
            if young and old.dialled != link.dialled and link.dialled != self._first(link.transport_key):
                link.close("there is another link already")
                return
            del self.links[peer]
            # If the new link is another process with the same key, the older process would otherwise keep dialling
            # until gossip reached it, and both would vote as one member.
            old.send_record(self._records.get(peer))
            old.close("replaced by a newer link")
            self._sockets.receive_queue.put(Arrival(peer, None, "replaced by a newer link", old.relay), 0)
        self.links[peer] = link
        self._retries.pop(peer, None)
        if (awaited := self._awaited.pop(peer, None)) is not None:
            awaited.set_result(None)
        if link.relay:
            self._later(link)

    def _later(self, link: Link) -> None:
        pause = self._sockets.limits.circuits.again * self._random.uniform(0.5, 1.0)
        self._loop.call_later(pause, self._try_direct, link)

    def _try_direct(self, link: Link) -> None:
        """Dial the peer of a link over a circuit; a direct link replaces this one."""
        if self._closed or self.links.get(link.peer) is not link:
            return
        record = self._records.get(link.peer)
        if record is not None and record.transport_key not in self._dials:
            self._start(record.transport_key, self._dial_directly(record, self._hello()))
        self._later(link)

    def _lost(self, link: Link, reason: str) -> None:
        peer = link.peer
        self._sessions.pop(link.session, None)
        if self._offers.get(peer) is link:
            del self._offers[peer]
        if not link.all_closed:
            self._leaving.add(link)
        if link.relay and RELAY_STUCK in reason:
            self._sockets.circuits.avoid(link.relay, peer)
        if link.was_ready:
            self._count(peer, link.traffic())
        if self.links.get(peer) is link:
            del self.links[peer]
            self._sockets.circuits.relay.forget(peer, waiting=True)
            if not self._closed:
                self._sockets.receive_queue.put(Arrival(peer, None, reason, link.relay), 0)

    def _count(self, peer: PeerId, traffic: Traffic) -> None:
        """Add the traffic of a link that has ended; that of the oldest of too many peers becomes one sum."""
        self._traffic[peer] = self._traffic.get(peer, Traffic()) + traffic
        if len(self._traffic) > self._sockets.limits.peers:
            oldest = next((one for one in self._traffic if one and one not in self.links), peer)
            self._traffic[FORGOTTEN] = self._traffic.get(FORGOTTEN, Traffic()) + self._traffic.pop(oldest)

    def _gone(self, link: Link) -> None:
        self._leaving.discard(link)
        self._quiet.set()

    def _first(self, transport_key: bytes) -> bool:
        """Return True if our dial goes before the other side's."""
        return self._sockets.identity.transport_public < transport_key

    async def decide(self, hello: Hello, record: PeerRecord, source: str) -> Welcome | Refuse:
        """Answer the Hello of a peer whose record and key were checked at the gate. `source`: see Admit."""
        peer, limits = record.peer_id, self._sockets.limits
        if peer == self._sockets.identity.peer_id:
            return Refuse("busy", OWN_GATE if hello.record in self._shown else SAME_KEY)
        if peer in self.banned:
            return Refuse("banned", "this identity was excluded")
        dial = self._dials.get(record.transport_key)
        if dial is not None and self._first(record.transport_key):
            await asyncio.wait({dial}, timeout=limits.hold)
        answer = self._admit(hello, record, source)
        if isinstance(answer, Refuse):
            return answer
        self.learn(record)
        link = self.links.get(peer)
        if link is not None and self._loop.time() - link.since < limits.young:
            return msgspec.structs.replace(answer, endpoint=HERE, bulk=HERE, secret=bytes(32))
        if len(self._offers) >= limits.slots:
            return Refuse("busy", "too many links are being opened")
        try:
            link, port = await Link.offer(self._sockets, record, self.host, self._ports, self._events)
        except PortTaken as error:
            return Refuse("busy", str(error)[:256])
        if self._closed or link.reason:
            link.close("leaving")
            return Refuse("busy", "leaving")
        if peer in self._offers:
            self._offers[peer].close("asked again")
        self._offers[peer] = link
        self._sessions[link.session] = link
        return msgspec.structs.replace(answer, endpoint=f":{port}", bulk=f":{self.bulk_port}", secret=link.secret)

    # --- dialling

    async def meet(self, contact: Contact, hello: Hello) -> Welcome | Refuse:
        """Knock at a stranger's gate and, if welcome, open a link; one dial per transport key at a time."""
        self.own = hello.record
        self._shown.append(hello.record)
        while (dial := self._dials.get(contact.transport_key)) is not None:
            await asyncio.wait({dial})
        if self._closed:
            return Refuse("unreachable", "we are leaving")
        dial = self._start(contact.transport_key, self._visit(contact, hello, None))
        try:
            await asyncio.wait({dial})
        except asyncio.CancelledError:
            dial.cancel()
            raise
        return Refuse("unreachable", "given up") if dial.cancelled() else dial.result()

    async def reach(self, to: PeerId) -> Link | None:
        """Return the link to a peer, opened if necessary; None if that is not possible now."""
        while not self._closed:
            if (link := self.links.get(to)) is not None:
                return link
            if (offer := self._offers.get(to)) is not None:
                await asyncio.shield(offer.ready)
                continue
            record = self._records.get(to)
            if record is None or not (record.addresses or self._sockets.circuits.relays(to)):
                return None
            dial = self._dials.get(record.transport_key)
            if dial is None:
                retry = self._retries.get(to)
                if retry is not None and self._loop.time() < retry.at:
                    return None
                dial = self._start(record.transport_key, self._dial(record))
            # The peer may dial us meanwhile: one behind an address translator cannot be dialled.
            awaited = self._awaited.setdefault(to, self._loop.create_future())
            dial.add_done_callback(lambda _: self._awaited.pop(to, None))
            either: set[asyncio.Future[Any]] = {dial, awaited}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if to not in self.links and to not in self._offers:
                return None
        return None

    def _start(self, key: bytes, work: Coroutine[Any, Any, Welcome | Refuse]) -> _Dial:
        dial = self._loop.create_task(work)
        self._dials[key] = dial
        dial.add_done_callback(lambda _: self._dials.pop(key))
        return dial

    async def _dial(self, record: PeerRecord) -> Welcome | Refuse:
        peer, limits, hello = record.peer_id, self._sockets.limits, self._hello()

        async def over(relay: str, route: DialRoute) -> Welcome | Refuse:
            return await self._visit(Contact(relay, record.transport_key), hello, peer, route)

        answer, refused = await self._sockets.circuits.dial(peer, lambda: self._dial_directly(record, hello), over)
        if isinstance(answer, Welcome) or peer in self.links:
            return answer
        retry = self._retries.setdefault(peer, Retry())
        final = answer.code not in TRANSIENT
        retry.failed(self._loop.time(), limits, self._random.uniform(0.5, 1.0), final=final)
        retry.reason = answer.detail
        if refused and peer not in self._offers:
            self._sockets.receive_queue.put(Arrival(peer, None, REFUSED), 0)
        return answer

    async def _dial_directly(self, record: PeerRecord, hello: Hello) -> Welcome | Refuse:
        """Visit the addresses of a peer; "refused" if no process listens at any of them."""
        last, refused = Refuse("unreachable", "no address"), bool(record.addresses)
        for address in sorted(record.addresses, key=self._far):
            answer = await self._visit(Contact(address, record.transport_key), hello, record.peer_id)
            if isinstance(answer, Welcome) or answer.code not in TRANSIENT:
                return answer
            # one of the addresses may belong to another process of this machine
            last, refused = answer, refused and answer.code == "refused"
        return last if refused or last.code == "busy" else Refuse("unreachable", last.detail)

    def _far(self, address: str) -> bool:
        """Return True if an address is outside of our subnets.

        Those inside are tried first: a router may not lead its own outside address back.
        """
        places = {source_of(own) for own in self.addresses}
        return source_of(address) not in places

    async def _visit(
        self, contact: Contact, hello: Hello, expected: PeerId | None, route: DialRoute | None = None
    ) -> Welcome | Refuse:
        route = route or self._direct(contact.address)
        answer = await knock(self._sockets, contact, hello, self._wall, route)
        if isinstance(answer, Refuse):
            return answer
        welcome, record = answer
        if record.peer_id in self.banned or expected not in (None, record.peer_id):
            return Refuse("unreachable", f"{contact.address} is another peer than expected")
        self.learn(record)
        if welcome.endpoint == HERE:
            link = self.links.get(record.peer_id) or self._offers.get(record.peer_id)
            if link is not None and await asyncio.shield(link.ready):
                return welcome
            return Refuse("busy", "the other side has not noticed yet that our link has ended")
        link = await Link.take(self._sockets, record, welcome, route, self._streams, self._events)
        if link.reason and self.links.get(record.peer_id) is None:
            return Refuse("unreachable", f"{contact.address}: {link.reason}"[:256])
        return welcome

    def _direct(self, gate: str) -> DialRoute:
        async def opened(factory: Factory, port: int) -> tuple[asyncio.BaseTransport, Any]:
            return await self._sockets.resolver.connect(factory, split_address(gate)[0], port)

        return DialRoute(opened, gate)

    def _hello(self) -> Hello:
        if not self.own:
            identity, run_id = self._sockets.identity, self._sockets.run_id
            self.own = PeerRecord.create(
                identity, run_id=run_id, addresses=self.addresses, sequence=1, issued=self._wall()
            ).wire
        return Hello(VERSION, self._sockets.run_id, self.own)
