"""Rosters on the simulated transport: signed frames over links that open, fill up and break."""

import asyncio
import random

import pytest
from thinwire.collectives.transport.interface import Contact
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network.network import SimNet
from thinwire.sims.network.transport import SimTransport
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.membership.presets import LOCAL
from thinwire.swarm.membership.probe import Outgoing
from thinwire.swarm.membership.swim import Roster
from thinwire.swarm.messages.registry import VERSION, Hello, PeerId, Refuse, Welcome

RUN = b"r" * 32


class Peer:
    """Minimal daemon around a roster: a reader, a timer, and sends that do not block."""

    def __init__(self, net: SimNet, index: int, life: int = 1) -> None:
        self.net, self.index = net, index
        identity = Identity.generate(bytes([index]) * 32)
        address = f"10.0.0.{index + 1}:4000"
        record = PeerRecord.create(identity, run_id=RUN, addresses=(address,), sequence=life, issued=net.wall())
        self.transport: SimTransport = net.transport(identity, RUN, self.admit, address)
        self.roster = Roster(
            identity,
            record,
            run_id=RUN,
            preset=LOCAL,
            rng=random.Random(100 * life + index),
            now=net.loop.time(),
            wall=net.wall,
        )
        self.transport.learn(record)
        self.tasks = [asyncio.create_task(self.read()), asyncio.create_task(self.watch())]
        self.kinds: list[tuple[str, PeerId]] = []

    @property
    def name(self) -> PeerId:
        return self.transport.peer_id

    def admit(self, hello: Hello, record: PeerRecord, source: str) -> Welcome | Refuse:
        self.roster.learn(record, self.net.loop.time())
        return Welcome(self.roster.record.wire, b"", bytes(32), bytes(64), (), "", "", bytes(32))

    async def join(self, other: "Peer") -> None:
        record = other.roster.record
        hello = Hello(VERSION, RUN, self.roster.record.wire)
        assert isinstance(await self.transport.meet(Contact(record.addresses[0], record.transport_key), hello), Welcome)
        self.roster.learn(record, self.net.loop.time())

    def post(self, messages: Outgoing) -> None:
        for event in self.roster.events:
            self.kinds.append((event.kind, event.peer))
            record = self.roster.peers.record_of(event.peer)
            if record is not None:
                self.transport.learn(record)
        self.roster.events.clear()
        self.transport.learn(self.roster.record)
        for to, message in messages:
            self.tasks.append(asyncio.create_task(self.deliver(to, Frame(message))))

    async def deliver(self, to: PeerId, frame: Frame) -> None:
        await self.transport.send(to, frame)

    async def read(self) -> None:
        while True:
            arrival = await self.transport.recv()
            now = self.net.loop.time()
            if arrival.frame is None:
                self.post(self.roster.on_link_down(arrival.peer, now))
            else:
                self.post(self.roster.handle(arrival.peer, arrival.frame.message, now))

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self.roster.next_deadline() - self.net.loop.time()))
            await self.transport.awake.wait()  # a stopped process has no timers
            await asyncio.sleep(0.001)  # after a stop, read first
            self.post(self.roster.tick(self.net.loop.time()))

    def kill(self) -> None:
        self.net.kill(self.name)
        for task in self.tasks:
            task.cancel()


def _agree(peers: list[Peer]) -> bool:
    names = tuple(sorted(peer.name for peer in peers))
    return all(peer.roster.peers.view.peers == names for peer in peers)


async def _until(peers: list[Peer], limit: float) -> float:
    start = peers[0].net.loop.time()
    while not _agree(peers):
        await asyncio.sleep(0.01)
        assert peers[0].net.loop.time() - start < limit
    return peers[0].net.loop.time() - start


async def _story() -> str:
    net = SimNet(5, latency=0.005, jitter=0.3)
    peers = [Peer(net, i) for i in range(6)]
    for peer in peers[1:]:
        await peer.join(peers[0])
    await _until(peers, 2.0)
    await asyncio.sleep(20.0)
    assert _agree(peers) and not any(kind == "suspect" for peer in peers for kind, _ in peer.kinds)

    victim = peers.pop(2)
    victim.kill()
    assert 1.0 < await _until(peers, 2.5)  # all learn it from the reset, and suspect for the shortest time

    net.pause(peers[2].name)
    others = peers[:2] + peers[3:]
    await _until(others, 4.0)
    await asyncio.sleep(5.0)
    net.resume(peers[2].name)
    await _until(peers, 5.0)
    assert peers[2].roster.record.sequence > 1

    again = Peer(net, victim.index, life=2)
    await again.join(peers[1])
    peers.append(again)
    await _until(peers, 2.0)

    goodbye = peers[3].roster.leave(net.loop.time())
    peers[3].post(goodbye)
    await asyncio.sleep(0)
    rest = peers[:3] + peers[4:]
    assert await _until(rest, 0.5) < 0.5
    return net.loop.trace


@pytest.mark.trial
def test_rosters_follow_joins_kills_stops_restarts_and_leaves() -> None:
    traces = [virtual_loop.run(_story(), seed=seed, limit=120.0) for seed in (1, 2, 3, 1)]
    assert traces[0] == traces[3] != traces[1] != traces[2]
