"""Transport of simulations: implements collectives/transport/interface.py on a SimNet."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any

from thinwire.collectives.transport.addresses.observed_addresses import Sighting
from thinwire.collectives.transport.interface import REFUSED, RELAY_DEAD, RELAY_STUCK, Admit, Arrival, Contact, Lent
from thinwire.sims.network.bulk_progress import BulkProgress
from thinwire.sims.network.circuits import Connection, RelayedLink, circuits_of
from thinwire.sims.network.handshake import Handshakes, Network, finish
from thinwire.sims.network.inbox import Inbox
from thinwire.sims.network.link import Downlink, Endpoint, Gateway, LinkTraffic, Pipe, SimLink, Uplink
from thinwire.sims.network.packets import Packer
from thinwire.sims.network.translator import Translator
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import NUMBERS, VERSION, Gossip, Hello, PeerId, Refuse, Welcome

BULK = frozenset(kind for kind in NUMBERS if kind.payload > 0 and not kind.signed)
"""Types of messages that travel on the bulk stream."""


class SimTransport:
    """Transport of one peer.

    `uplink.rate` and `downlink.rate` are bytes/s (None: unlimited), `traffic` counts its bytes. `loss` and `jitter` are
    those of its own link, `wall` is its clock in unix seconds. The record shown at the gates of others is the last own
    record given to `learn`, else that of the last `meet`. `circuits`: None if the network has none.
    """

    def __init__(
        self, net: Network, identity: Identity, run_id: bytes, admit: Admit, address: str, bandwidth: float | None
    ) -> None:
        self.peer_id, self.run_id = identity.peer_id, run_id
        self.uplink = Uplink(net, bandwidth)
        self.downlink = Downlink(net, bandwidth)
        self.gateway: Gateway | None = None
        """Gateway to all peers that are not behind the same one; must be set before there are links."""
        self.translator: Translator | None = None
        self.loss = self.jitter = 0.0
        self.wall = net.wall
        self.traffic = LinkTraffic()
        self.peaks = [0, 0]
        """Maximum number of control frames, and of bulk frames, in flight in one pipe, see `Endpoint`."""
        self.alive = True
        self.awake = asyncio.Event()
        self.awake.set()
        self.known: dict[PeerId, PeerRecord] = {}
        self.links: dict[PeerId, SimLink] = {}
        self.handshakes = Handshakes(net, self, identity, admit, address, self._own_hello)
        connect, limits = self.handshakes.connect, net.circuits
        self.circuits = None if limits is None else circuits_of(net, self, limits, connect, net.draw)
        self._net, self._identity, self._address = net, identity, address
        self._context = copy_context()
        self._tries: set[asyncio.Task[object]] = set()
        self._obstacles: dict[PeerId, str] = {}
        self._record: PeerRecord | None = None
        self._hello: Hello | None = None
        self.banned: dict[PeerId, str] = {}
        self._opening: dict[PeerId, asyncio.Future[None]] = {}
        self._closed = False
        self._progress = BulkProgress(net)
        self._packer = Packer(identity, run_id, encode=net.encode, payload_factor=net.payload_factor)
        self._inbox = Inbox(net)

    # --- the Transport interface

    @property
    def up_limit(self) -> int:
        return 0  # a simulated link has a rate, and no owner who limits it further

    def addresses(self) -> tuple[str, ...]:
        return (self._address,)

    async def meet(self, contact: Contact, hello: Hello) -> Welcome | Refuse:
        self._hello = hello
        return await self.handshakes.send_hello(contact, hello)

    async def observe(self, contacts: Sequence[Contact], *, port: int = 0, size: int = 0) -> list[Sighting | Refuse]:
        return []  # a peer of a simulation has one address, behind a translator or not

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
        return link is not None and await self.send_over(link, frame)

    async def send_over(self, link: SimLink, frame: Frame) -> bool:
        """Send a frame over a link; return False if the link is lost."""
        pipe, packet = link.pipe(self, type(frame.message) in BULK), self._packer.pack(frame)
        if not await pipe.room(packet.size):
            return False
        self._inbox.sent(link.other(self).peer_id, frame.message)
        pipe.uplink.send(pipe, packet)
        return True

    def offer(self, to: PeerId, frame: Frame) -> bool:
        link = self.links.get(to)
        if link is None or self._closed or not self.awake.is_set():
            return False
        pipe = link.pipe(self, type(frame.message) in BULK)
        if pipe.waiters or pipe.full:
            return False
        packet = self._packer.pack(frame)
        self._inbox.sent(to, frame.message)
        pipe.take(packet.size)
        pipe.uplink.send(pipe, packet)
        return True

    async def recv(self) -> Arrival:
        while True:
            if not self.awake.is_set():
                await self.awake.wait()
            self._check()
            arrival = self._inbox.take()
            if arrival is None:
                await self._inbox.wait()
            elif self.circuits is None or arrival.frame is None:
                return arrival
            elif not self.circuits.takes(arrival.peer, arrival.frame.message):
                return arrival

    def relay_of(self, peer: PeerId) -> PeerId | None:
        link = self.links.get(peer)
        return (link.relay or None) if link is not None else None

    def leave_relay(self, relay: PeerId) -> None:
        for link in [one for one in self.links.values() if one.relay == relay]:
            self.lose(link, RELAY_DEAD)

    def leave_circuit(self, peer: PeerId) -> None:
        link = self.links.get(peer)
        if link is not None and link.relay:
            self.lose(link, RELAY_STUCK)

    def no_sharing(self) -> str:
        return ""  # every peer of a simulation is a machine

    def rest(self) -> None:
        pass

    def obstacle(self, peer: PeerId) -> str:
        return "" if peer in self.links else self._obstacles.get(peer, "")

    def lent(self) -> Lent:
        if self.circuits is None:
            return Lent()
        relay = self.circuits.relay
        return Lent(len(relay), relay.carried, relay.left, dict(relay.refused))

    def drop(self, peer: PeerId, reason: str, *, ban: bool = False) -> None:
        if ban:
            self.banned[peer] = reason
        self.known.pop(peer, None)
        if self.circuits is not None:
            self.circuits.relay.forget(peer)
        self._inbox.forget(peer)
        if peer in self.links:
            self._hang_up(self.links[peer], "closed by the peer")

    def allow(self, peer: PeerId) -> None:
        self.banned.pop(peer, None)

    def totals(self) -> tuple[int, int]:
        traffic = self.traffic
        # Packets count when they begin to leave. Those with a payload factor may take seconds.
        leaving = self.uplink.leaving if self._net.payload_factor > 1 else 0
        return traffic.control_up + traffic.bulk_up - leaving, traffic.control_down + traffic.bulk_down

    def inside(self) -> tuple[int, int]:
        return 0, 0

    def shares(self, peer: PeerId) -> bool:
        return False  # all traffic of a simulation goes through its network

    def by_peer(self) -> dict[PeerId, tuple[int, int]]:
        return {}  # a simulation counts the bytes of a peer, not those of its links

    def pauses(self) -> Mapping[PeerId, int]:
        return self._inbox.pauses

    def bulk_received(self, peer: PeerId) -> int:
        link = self.links.get(peer)
        return 0 if link is None else self._progress.received(peer, link.pipe(link.other(self), bulk=True))

    def delivered(self, peer: PeerId) -> tuple[int, int]:
        link = self.links.get(peer)
        return (0, 0) if link is None else self._progress.delivered(link.pipe(self, bulk=True))

    async def close(self) -> None:
        if self.alive:
            self._closed = True
            self._end("closed by the peer")
            self._inbox.wake()

    # --- called by the network

    def has(self, link: SimLink) -> bool:
        """Return True if this end still holds the link."""
        return self.links.get(link.other(self).peer_id) is link

    def accept(self, arrival: Arrival, pipe: Pipe, size: int) -> None:
        self._inbox.accept(arrival, pipe, size)

    def lose(self, link: SimLink, reason: str) -> None:
        """Note that the link broke; this end knows it from now on."""
        if self.has(link):
            peer = link.other(self).peer_id
            self._release(link, reason)
            if self.circuits is not None:
                self.circuits.relay.forget(peer, waiting=True)
                if link.relay and reason == RELAY_STUCK:
                    self.circuits.avoid(link.relay, peer)
            self._net.loop.record(b"lost", self.peer_id, peer, reason.encode())
            self._inbox.put(Arrival(peer, None, reason, link.relay))
            self._inbox.wake()

    def replace(self, link: SimLink, record: PeerRecord | None) -> None:
        """Note that the other end has a link to another process with our key, whose record it shows."""
        if self.has(link):
            if record is not None:
                self._inbox.put(Arrival(link.other(self).peer_id, Frame(Gossip((record.item,)))))
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
        if self.circuits is not None:
            self.circuits.abort()
        for task in self._tries:
            task.cancel()
        for link in list(self.links.values()):
            self._hang_up(link, reason)
        self._inbox.clear()

    def _hang_up(self, link: SimLink, reason: str) -> None:
        """Give up a link; the other end notices one latency later.

        After a reset it notices at once, otherwise after the frames already sent.
        """
        other, when = link.other(self), self._net.loop.now
        if reason != "reset":
            when = max([when, *(pipe.last + 1e-6 for pipe in link.pipes if pipe.source is self)])
        self._release(link, reason, when)
        if not link.relay:
            self._net.at(
                max(when, self._net.loop.now + self._net.latency(self.peer_id, other.peer_id)), other.lose, link, reason
            )

    def _release(self, link: SimLink, reason: str, when: float = 0.0) -> None:
        peer = link.other(self).peer_id
        del self.links[peer]
        self._inbox.forget_unread(peer)
        link.release(self, when, reason)

    async def _open(self, to: PeerId) -> None:
        """Try to open a link. Concurrent calls for the same peer wait for the first one."""
        record = self.known.get(to)
        if record is None or not record.addresses:
            return
        if to not in self._opening:
            self._opening[to] = self._net.loop.create_future()
            if self.circuits is None:
                await self._dial(record)
                return
            self._start(self._dial(record))  # The peer may dial us meanwhile, see `connect`.
        await asyncio.shield(self._opening[to])

    async def _dial(self, record: PeerRecord) -> None:
        peer, dial = record.peer_id, self.handshakes.dial
        try:
            if self.circuits is None:
                answer = await dial(record)
                refused = isinstance(answer, Refuse) and answer.code == "refused"
            else:
                over = partial(self.handshakes.send_hello_over, record)
                answer, refused = await self.circuits.dial(peer, lambda: dial(record), over)
            if refused and (self.circuits is None or peer not in self.links):
                self._inbox.put(Arrival(peer, None, REFUSED))
                self._inbox.wake()
            self._obstacles[peer] = "" if isinstance(answer, Welcome) else answer.detail
        finally:
            finish(self._opening.pop(peer))

    def _try_directly(self, link: SimLink) -> None:
        """Dial the peer of a link over a circuit, now and then; a direct link replaces it."""
        record = self.known.get(peer := link.other(self).peer_id)
        if self.links.get(peer) is not link:
            return
        if record is not None and peer not in self._opening:
            self._start(self.handshakes.dial(record))
        self._try_later(link)

    def _try_later(self, link: SimLink) -> None:
        assert self._net.circuits is not None
        pause = self._net.circuits.again * (0.5 + self._net.draw(1)[0] / 512)
        self._net.loop.call_later(pause, self._try_directly, link, context=self._context)

    def _start(self, work: Coroutine[Any, Any, object]) -> None:
        task = self._net.loop.create_task(work, context=self._context)
        self._tries.add(task)
        task.add_done_callback(self._tries.discard)

    def _own_hello(self) -> Hello:
        record = self._record.wire if self._record else self._hello.record if self._hello else None
        if record is None:
            issued = self.wall()
            record = PeerRecord.create(
                self._identity, run_id=self.run_id, addresses=self.addresses(), sequence=1, issued=issued
            ).wire
        return Hello(VERSION, self.run_id, record)

    def connect(self, host: Endpoint, circuit: tuple[Connection, Connection] | None) -> None:
        """Open the link for both ends.

        It replaces a link over a circuit, and one to an earlier process of either peer.
        """
        assert isinstance(host, SimTransport)
        for end, other in ((self, host), (host, self)):
            old = end.links.get(other.peer_id)
            if old is not None:
                if old.other(end) is other and other.has(old) and (circuit or not old.relay):
                    return  # both dialled at the same time
                end.lose(old, "replaced")
                # An earlier process with the same key that still runs is informed and disconnected.
                when = self._net.loop.now + self._net.latency(end.peer_id, other.peer_id)
                self._net.at(when, old.other(end).replace, old, end.known.get(other.peer_id))
        link = RelayedLink(self._net, *circuit) if circuit else SimLink(self._net, self, host)
        self.links[host.peer_id] = host.links[self.peer_id] = link
        for end, other in ((self, host), (host, self)) if self.circuits is not None else ():
            if other.peer_id in end._opening:
                finish(end._opening[other.peer_id])
            if circuit:
                end._try_later(link)
