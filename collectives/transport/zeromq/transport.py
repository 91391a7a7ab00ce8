"""Transport over real sockets.

Control uses libzmq with CURVE, bulk data sealed TCP streams, all on one event loop.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import zmq
from thinwire.collectives.blocking_work import Workers
from thinwire.collectives.transport.addresses.name_resolver import NameResolver
from thinwire.collectives.transport.addresses.observed_addresses import Sighting
from thinwire.collectives.transport.circuits.circuits import Circuits
from thinwire.collectives.transport.circuits.ticket import enter
from thinwire.collectives.transport.interface import RELAY_STUCK, Admit, Arrival, Contact, Lent, Loan
from thinwire.collectives.transport.rate_limit import RateLimit, TokenBuckets
from thinwire.collectives.transport.receive_queue import ReceiveQueue
from thinwire.collectives.transport.shared_memory.local_sockets import LocalConnection, LocalSockets, socket_name
from thinwire.collectives.transport.zeromq.admission import AdmissionPort, observe
from thinwire.collectives.transport.zeromq.connections import Connections
from thinwire.collectives.transport.zeromq.sockets.control_connection import Context, SharedSockets
from thinwire.collectives.transport.zeromq.sockets.limits import Limits
from thinwire.collectives.transport.zeromq.sockets.listener import HalfOpen, PortTaken, bindable, listen, own_addresses
from thinwire.collectives.transport.zeromq.sockets.zmq_socket import ZapHandler
from thinwire.collectives.transport.zeromq.streams.shared_memory_stream import SharedMemoryStream
from thinwire.collectives.transport.zeromq.streams.stream import Stream
from thinwire.collectives.transport.zeromq.streams.stream_pool import Traffic
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.address import join_address
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import Hello, PeerId, Refuse, Welcome

THREADS = 4
"""Most threads of a transport for bulk data."""

FEWEST_CORES = 3
"""Fewest cores with which bulk data is handled in threads.

On two cores they took a tenth to a fifth more CPU, and no less time.
"""


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Statistics of one peer: bytes since the start.

    If linked, also the peer that relays (b"": none), whether we share memory, round-trip time and silence in seconds.
    """

    traffic: Traffic
    linked: bool
    dialled: bool = False
    relay: PeerId = b""
    shared: bool = False
    rtt: float | None = None
    silent: float | None = None


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Addresses at which a peer listens, and those that it announces.

    - `host`, `port`: of the gate (port 0: any).
    - `ports`: range for bulk and member ports (None: any); peers dial them at the host of the gate.
    - `advertise`: addresses of the gate to announce instead.
    """

    host: str = "127.0.0.1"
    port: int = 0
    ports: range | None = None
    advertise: tuple[str, ...] = ()


LOOPBACK = ListenAddress()


class ZmqTransport:
    """Implementation of `Transport`. Create and open it inside a running event loop.

    - `wall`: unix time in seconds.
    - `streams`: bulk streams per link.
    - `up`: limit in bytes/s for outgoing bulk data (0: none).
    - `loan`: terms of relaying between peers that cannot reach each other.
    - `shared`: folder in which peers of this user and machine find each other, to share memory (None, or with `up`: they use
      TCP, too).
    - `workers`: threads in which bulk data is sealed, opened and hashed (None: as many threads of our own as there are
      cores, at most THREADS; none on a machine with fewer than FEWEST_CORES).
    """

    def __init__(
        self,
        identity: Identity,
        *,
        run_id: bytes,
        admit: Admit,
        wall: Callable[[], int],
        listen: ListenAddress = LOOPBACK,
        streams: int = 2,
        limits: Limits | None = None,
        up: int = 0,
        loan: Loan | None = None,
        shared: Path | None = None,
        workers: Workers | None = None,
    ) -> None:
        self._identity, self._wall = identity, wall
        self._host, self._port, self._advertise = listen.host, listen.port, listen.advertise
        self._ports, self._limits = listen.ports or range(0, 1), limits or Limits()
        self._context: Context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 16384)
        # The ZAP handler exists before any socket is bound, so no key is ever admitted without a check.
        self._gatekeeper = ZapHandler(self._context)
        receive_queue = ReceiveQueue(self._limits.receive_queue, self._read_or_wait, self._read_or_wait)
        rate_limit = RateLimit(up)
        cores = os.cpu_count() or 1
        own = workers is None and cores >= FEWEST_CORES
        self._own_workers = ThreadPoolExecutor(min(THREADS, cores), "bulk data") if own else None
        resolver = NameResolver()
        self._circuits = Circuits(
            identity.peer_id,
            self._limits.circuits,
            loan or Loan(),
            rate_limit,
            secrets.token_bytes,
            enter=partial(enter, resolver),
        )
        self._sockets = SharedSockets(
            identity,
            run_id,
            self._limits,
            self._context,
            self._gatekeeper,
            receive_queue,
            self._circuits,
            LocalSockets(None if up else shared, self._limits.shared, wall),
            resolver,
            rate_limit=rate_limit,
            workers=workers or self._own_workers,
        )
        self._connections = Connections(self._sockets, admit, wall, ports=self._ports, streams=streams)
        self._gate = AdmissionPort(self._sockets, self._connections.decide, wall)
        clock = asyncio.get_running_loop().time
        sources = TokenBuckets(self._limits.address_burst * streams, self._limits.address_rate * streams)
        self._crowd = HalfOpen(self._limits.half_open, lambda source: sources.take(source, clock()))
        self._bulk: asyncio.Server | None = None
        self._closed = False

    async def open(self) -> None:
        """Listen. Raises PortTaken, after which the transport is closed."""
        try:
            self._connections.host = host = await bindable(self._sockets.resolver, self._host)
            self._port = await self._gate.open(host, self._port)
            self._bulk, self._connections.bulk_port = await listen(self._stream, host, self._ports)
            self._circuits.listeners[self._connections.bulk_port] = lambda relay: self._stream()
        except PortTaken:
            await self.close()
            raise
        name = socket_name(self._sockets.run_id, self.peer_id, self._connections.bulk_port)
        self._sockets.local_sockets.listen(name, self._shared_memory_stream)
        self.addresses()

    @property
    def peer_id(self) -> PeerId:
        """Own peer id."""
        return self._identity.peer_id

    @property
    def up_limit(self) -> int:
        return self._sockets.rate_limit.rate

    @property
    def port(self) -> int:
        """Port of the gate."""
        return self._port

    def addresses(self) -> tuple[str, ...]:
        """Return the gate addresses to announce: the given ones, or those that this machine has now."""
        if self._advertise:
            self._connections.addresses = self._advertise
        else:
            with suppress(OSError):  # Descriptors are short; the last addresses stay.
                found = own_addresses(self._host)
                self._connections.addresses = tuple(join_address(one, self._port) for one in found)
        return self._connections.addresses

    async def meet(self, contact: Contact, hello: Hello) -> Welcome | Refuse:
        """Knock at a stranger's gate. A Welcome means that the link is up."""
        return await self._connections.meet(contact, hello)

    async def observe(self, contacts: Sequence[Contact], *, port: int = 0, size: int = 0) -> list[Sighting | Refuse]:
        """Ask gates from which address they see us, all from one port of ours, see Transport."""
        try:
            with socket.socket(socket.AF_INET6 if ":" in self._connections.host else socket.AF_INET) as free:
                free.bind(("", 0))
                source = free.getsockname()[1]
        except OSError as error:  # no file descriptors, for example
            return [Refuse("unreachable", str(error.strerror)) for _ in contacts]
        gate = self._port if port == 0 else max(port, 0)
        asked = (observe(self._sockets, one, port=gate, size=size, source=source) for one in contacts)
        return list(await asyncio.gather(*asked))

    def learn(self, record: PeerRecord) -> None:
        """Store the addresses of a peer."""
        self._connections.learn(record)

    async def send(self, to: PeerId, frame: Frame) -> bool:
        """Hand a frame to the link to a peer; open the link if necessary."""
        link = self._connections.links.get(to) or await self._connections.reach(to)
        return link is not None and await link.send(frame)

    def offer(self, to: PeerId, frame: Frame) -> bool:
        """Hand a frame to the link to a peer if that is possible at once."""
        link = self._connections.links.get(to)
        return link is not None and link.send_now(frame)

    async def recv(self) -> Arrival:
        """Return the next arrival. Raises RuntimeError if the transport is closed."""
        return await self._sockets.receive_queue.get()

    def drop(self, peer: PeerId, reason: str, *, ban: bool = False) -> None:
        """Close the link to a peer and drop everything received from the peer."""
        key = self._connections.drop(peer, reason)
        if ban:
            self._connections.banned.add(peer)
            if key is not None:
                self._gate.banned[key] = peer
        self._sockets.receive_queue.forget(peer)

    def allow(self, peer: PeerId) -> None:
        """Accept the keys of a banned peer again."""
        self._connections.banned.discard(peer)
        for key in [key for key, owner in self._gate.banned.items() if owner == peer]:
            del self._gate.banned[key]

    async def close(self) -> None:
        """Close every link and socket. Sends a goodbye on every link, which takes at most about a second."""
        if self._closed:
            return
        self._closed = True
        self._sockets.receive_queue.close()
        if self._bulk is not None:
            self._bulk.close()
        self._sockets.local_sockets.stop()
        await self._gate.close()
        await self._circuits.close()
        await self._connections.close()
        self._sockets.local_sockets.close()
        self._crowd.clear()
        self._gatekeeper.close()
        if self._own_workers is not None:
            self._own_workers.shutdown()  # waits for the last records, about a millisecond each
        # asyncio closes aborted connections in the next turn of the loop.
        await asyncio.sleep(0)
        self._context.term()

    def stats(self) -> dict[PeerId, LinkStats]:
        """Return the statistics of every peer that ever had a link; FORGOTTEN: of many former ones together."""
        now, links = asyncio.get_running_loop().time(), self._connections.links
        found = {}
        for peer, traffic in self._connections.traffic().items():
            link = links.get(peer)
            found[peer] = (
                LinkStats(traffic, False)
                if link is None
                else LinkStats(
                    traffic,
                    True,
                    link.dialled,
                    link.relay,
                    link.stream_pool.shared,
                    link.rtt,
                    now - link.last_arrival_at,
                )
            )
        return found

    def totals(self) -> tuple[int, int]:
        """Return acknowledged sent bytes and received bytes of all links, with those that we relay."""
        found = self._connections.traffic().values()
        relayed = self._circuits.relay.carried
        in_flight = sum(link.stream_pool.waiting() for link in self._connections.links.values())
        return (
            sum(traffic.control_up + traffic.bulk_up for traffic in found) - in_flight + relayed,
            sum(traffic.control_down + traffic.bulk_down for traffic in found) + relayed,
        )

    def inside(self) -> tuple[int, int]:
        """Return the bytes sent and received through shared memory, which `totals` does not count."""
        found = self._connections.traffic().values()
        return sum(traffic.shared_up for traffic in found), sum(traffic.shared_down for traffic in found)

    def shares(self, peer: PeerId) -> bool:
        """Return True if bulk data to a peer goes through shared memory."""
        link = self._connections.links.get(peer)
        return link is not None and link.stream_pool.shared

    def no_sharing(self) -> str:
        """Return why this peer shares no memory with other peers of its machine; empty if it can."""
        sockets = self._sockets
        return "the uplink has a limit" if self.up_limit else sockets.local_sockets.obstacle

    def rest(self) -> None:
        """Free buffers, and shared memory without payloads."""
        self._sockets.pool.free()
        self._sockets.local_sockets.free_gaps()

    def lent(self) -> Lent:
        """Return the use that other peers make of us as their relay."""
        relay = self._circuits.relay
        return Lent(len(relay), relay.carried, relay.left, dict(relay.refused))

    def relay_of(self, peer: PeerId) -> PeerId | None:
        """Return the peer that relays between us and a peer; None if the link is direct or there is none."""
        link = self._connections.links.get(peer)
        return (link.relay or None) if link is not None else None

    def leave_relay(self, relay: PeerId) -> None:
        """End the links that a peer relays, because it is dead. `recv` returns each loss."""
        self._connections.leave_relay(relay)

    def leave_circuit(self, peer: PeerId) -> None:
        """End the link to a peer if it has a relay, because bulk data does not pass it, see Transport."""
        link = self._connections.links.get(peer)
        if link is not None and link.relay:
            link.close(RELAY_STUCK)

    def obstacle(self, peer: PeerId) -> str:
        """Return why the last attempt to open a link to a peer failed; empty if there is a link."""
        return self._connections.obstacle(peer)

    def by_peer(self) -> dict[PeerId, tuple[int, int]]:
        """Return the bytes sent to and received from each peer that ever had a link."""
        found = self._connections.traffic().items()
        return {
            peer: (one.control_up + one.bulk_up + one.shared_up, one.control_down + one.bulk_down + one.shared_down)
            for peer, one in found
        }

    def pauses(self) -> dict[PeerId, int]:
        """Return how often each peer was not read for a while because it sent too many small frames."""
        return dict(self._sockets.frame_limit.pauses)

    def bulk_received(self, peer: PeerId) -> int:
        """Return the bulk bytes received over the link to a peer."""
        link = self._connections.links.get(peer)
        return sum(link.stream_pool.traffic()[1::2]) if link is not None else 0

    def delivered(self, peer: PeerId) -> tuple[int, int]:
        """Return the bulk bytes that the link to a peer has taken, and those that were acknowledged."""
        link = self._connections.links.get(peer)
        if link is None:
            return 0, 0
        taken = sum(link.stream_pool.traffic()[::2])
        return taken, taken - link.stream_pool.waiting()

    def refusals(self) -> dict[str, int]:
        """Return the number of failed visits to the gate, by reason."""
        return dict(self._gate.refused)

    def _stream(self) -> Stream:
        return Stream(self._sockets.pool, self._limits, self._connections.owner_of, self._crowd, self._sockets.workers)

    def _shared_memory_stream(self, connection: LocalConnection) -> SharedMemoryStream:
        sockets, find_owner = self._sockets, self._connections.owner_of
        return SharedMemoryStream(sockets.pool, self._limits, connection, find_owner, sockets.workers)

    def _read_or_wait(self, _: bool) -> None:
        for link in list(self._connections.links.values()):
            link.read_or_wait()
