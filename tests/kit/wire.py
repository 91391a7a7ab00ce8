"""Real transports on loopback, for the tests of the transport."""

import asyncio
import time

import uvloop
from thinwire.collectives.transport.interface import Contact
from thinwire.collectives.transport.zeromq.sockets.limits import Limits
from thinwire.collectives.transport.zeromq.streams.record_crypto import SHARED
from thinwire.collectives.transport.zeromq.transport import ListenAddress, ZmqTransport
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import VERSION, Chunk, Hello, Ping, Refuse, Welcome

RUN = b"r" * 32


LISTEN = {"host", "port", "ports", "advertise"}


class Peer:
    """A transport with its identity and record; `admit` may be replaced. `options` have the fields of its ListenAddress."""

    def __init__(self, seed, *, identity=None, run_id=RUN, limits=None, wall=lambda: int(time.time()), **options):
        self.identity = identity or Identity.generate(bytes([seed]) * 32)
        self.run_id = run_id
        self.verdict = None
        self.hellos, self.sources = [], []
        self.limits = limits or Limits()
        self.transport = ZmqTransport(
            self.identity,
            run_id=run_id,
            admit=self.admit,
            wall=wall,
            listen=ListenAddress(**{key: options.pop(key) for key in LISTEN.intersection(options)}),
            limits=self.limits,
            **options,
        )
        self.id = self.identity.peer_id
        self.record = None

    def admit(self, hello, record, source):
        self.hellos.append(hello)
        self.sources.append(source)
        if self.verdict is not None:
            return self.verdict
        return Welcome(self.record.wire, b"the manifest", bytes(32), bytes(64), (), "", "", bytes(32))

    async def open(self, *, reachable=True, sequence=1):
        await self.transport.open()
        self.record = PeerRecord.create(
            self.identity,
            run_id=self.run_id,
            addresses=self.transport.addresses() if reachable else (),
            sequence=sequence,
            issued=int(time.time()),
        )
        self.transport.learn(self.record)
        return self

    async def open_again(self):
        """Publish a newer record, with the addresses at which this peer listens."""
        self.record = PeerRecord.create(
            self.identity,
            run_id=self.run_id,
            addresses=self.transport.addresses(),
            sequence=self.record.sequence + 1,
            issued=int(time.time()),
        )
        self.transport.learn(self.record)

    @property
    def contact(self):
        return Contact(self.transport.addresses()[0], self.identity.transport_public)

    @property
    def hello(self):
        return Hello(VERSION, self.run_id, self.record.wire)

    @property
    def port(self):
        return int(self.transport.addresses()[0].rpartition(":")[2])

    # --- the only accesses of tests to private parts of the transport

    @property
    def links(self):
        """Return the open links by peer."""
        return self.transport._connections.links

    def link(self, other):
        """Return the link to another peer."""
        return self.links[other.id]

    def control_connection(self, other):
        """Return the ZeroMQ connection of a link."""
        return self.link(other)._control

    def streams(self, other):
        """Return the bulk streams of a link by number."""
        return self.link(other).stream_pool._streams

    def reset_streams(self, other):
        """Reset the connections of all bulk streams of a link, as the network might."""
        for stream in self.streams(other).values():
            stream._transport.abort()

    @property
    def sockets(self):
        """Return the shared parts of this peer's links: receive queue, buffer pool, limits, identity."""
        return self.transport._sockets

    @property
    def offers(self):
        """Return connections that were offered and not taken yet."""
        return self.transport._connections._offers

    @property
    def refused(self):
        """Return how many handshakes were refused."""
        return self.transport._gatekeeper.refused

    @property
    def strangers(self):
        """Return how many connections have not proved themselves, and how many visits the gate remembers."""
        return len(self.transport._crowd), len(self.transport._gate._visits)

    @property
    def bulk_port(self):
        return self.transport._connections.bulk_port

    async def check_connections(self):
        """No connection stays half open, and the dialled links are the only ones without a session."""
        connections = self.transport._connections
        async with asyncio.timeout(20):  # a dial may continue after the other peer has opened the link
            while connections._offers or connections._dials or connections._leaving or connections._awaited:
                await asyncio.sleep(0.01)
        assert set(connections._sessions.values()) == {link for link in self.links.values() if not link.dialled}

    def close_bulk_port(self):
        """Stop listening for streams."""
        self.transport._bulk.close()

    def advertise(self, *addresses):
        """Publish these addresses."""
        self.transport._advertise = addresses

    # ---

    def post_shared(self, other, head, place):
        """Send a record on the stream of the shared memory, also an invalid one."""
        self.streams(other)[SHARED].writer.append(head, place)

    async def meet(self, other):
        return await self.transport.meet(other.contact, self.hello)

    async def ping(self, other, number=0):
        return await self.transport.send(other.id, Frame(Ping(number, 0, ())))

    async def chunk(self, other, payload, index=0):
        return await self.transport.send(other.id, Frame(Chunk(1, 0, 1, index), payload))

    async def recv(self):
        return await asyncio.wait_for(self.transport.recv(), 20)

    async def bulk(self, count):
        """Return the next bulk frames, without other arrivals."""
        found = []
        while len(found) < count:
            arrival = await self.recv()
            assert arrival.frame is not None, arrival.reason
            if arrival.frame.digest:
                found.append(arrival.frame)
        return found


class Wire:
    """Network for tests: `peer(seed)` makes peers, which are closed at the end."""

    Peer, Refuse, Welcome, RUN = Peer, Refuse, Welcome, RUN

    def __init__(self):
        self.made = []

    async def peer(self, seed, *, reachable=True, sequence=1, **options):
        peer = Peer(seed, **options)
        self.made.append(peer)
        return await peer.open(reachable=reachable, sequence=sequence)

    async def pair(self, **options):
        """Two linked peers; the first one dialled."""
        first, second = await self.peer(1, **options), await self.peer(2, **options)
        answer = await first.meet(second)
        assert isinstance(answer, Welcome), answer
        return first, second

    async def settled(self, first, second):
        """Return when words of rounds go by their stream both ways."""
        ends = [one.link(other) for one, other in ((first, second), (second, first))]
        async with asyncio.timeout(20):
            while not all(end.sends_express and end.reads_express for end in ends):
                await asyncio.sleep(0.001)
        return ends

    def short(self, **changes):
        """Return limits with deadlines that are short enough for tests."""
        quick = {"handshake": 0.5, "rate_window": 0.3, "young": 0.0, "retry_first": 0.01}
        return Limits(**{**quick, **changes})

    def run(self, work, *, loop=uvloop.run):
        async def whole():
            try:
                async with asyncio.timeout(60):
                    await work()
            finally:
                for peer in self.made:
                    await peer.transport.close()

        loop(whole())


async def until(condition, seconds=10.0):
    """Wait until a condition holds; generous, because the machine may be busy."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
