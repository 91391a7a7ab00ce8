"""Real transports on loopback for the tests of the wire."""

import asyncio
import time

import pytest
import uvloop
from thinwire.collectives.limits import Limits
from thinwire.collectives.transport import Contact
from thinwire.collectives.wire import ZmqTransport
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity import Identity
from thinwire.swarm.protocol import VERSION, Chunk, Hello, Ping, Refuse, Welcome
from thinwire.swarm.record import PeerRecord

RUN = b"r" * 32


class Peer:
    """A transport with its identity and record; `admit` may be replaced."""

    def __init__(self, seed, *, run_id=RUN, limits=None, **options):
        self.identity = Identity.generate(bytes([seed]) * 32)
        self.run_id = run_id
        self.verdict = None
        self.hellos = []
        self.limits = limits or Limits()
        self.transport = ZmqTransport(
            self.identity, run_id=run_id, admit=self.admit, wall=lambda: int(time.time()), limits=self.limits, **options
        )
        self.id = self.identity.peer_id
        self.record = None

    def admit(self, hello, record):
        self.hellos.append(hello)
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

    @property
    def contact(self):
        return Contact(self.transport.addresses()[0], self.identity.transport_public)

    @property
    def hello(self):
        return Hello(VERSION, self.run_id, self.record.wire)

    @property
    def port(self):
        return int(self.transport.addresses()[0].rpartition(":")[2])

    @property
    def bulk_port(self):
        return self.transport._peering.bulk_port

    async def meet(self, other):
        return await self.transport.meet(other.contact, self.hello)

    async def ping(self, other, number=0):
        return await self.transport.send(other.id, Frame(Ping(number, 0, ())))

    async def chunk(self, other, payload, index=0):
        return await self.transport.send(other.id, Frame(Chunk(1, 0, 1, index), payload))

    async def recv(self):
        return await asyncio.wait_for(self.transport.recv(), 20)


class Wire:
    """What the tests use: `peer(seed)`, closed at the end."""

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
        ends = [one.transport._peering.links[other.id] for one, other in ((first, second), (second, first))]
        async with asyncio.timeout(20):
            while not all(end._speaks and end._listens for end in ends):
                await asyncio.sleep(0.001)
        return ends

    def short(self, **changes):
        """Limits with deadlines that a test can wait for."""
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


@pytest.fixture
def wire():
    return Wire()


async def until(condition, seconds=10.0):
    """Wait for something that must come true; generous, because the machine may be busy."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def eventually():
    return until
