"""Simulated address translators, and circuits of peers behind them: the product's code on a simulated network."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from thinwire.collectives.transport.interface import RELAY_DEAD, Loan
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network.circuits import LIMITS
from thinwire.sims.network.network import SimNet
from thinwire.sims.network.translator import KINDS, Nat, Translator
from thinwire.sims.network.transport import SimTransport
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import Chunk, Gossip, PeerId, Welcome

RUN = b"r" * 32
GOSSIP = Frame(Gossip((b"x",)))


class Swarm:
    """Peers that know each other and read what arrives: frames and ends of links by receiver."""

    def __init__(self, *nats: Nat, **options: float) -> None:
        self.net = SimNet(1, latency=0.01, circuits=LIMITS, **options)  # type: ignore[arg-type]
        self.frames: dict[PeerId, list[tuple[PeerId, Frame]]] = {}
        self.lost: list[tuple[PeerId, PeerId, str]] = []
        self.peers = []
        records = []
        for i, nat in enumerate(nats):
            identity = Identity.generate(bytes([i]) * 32)
            address = f"10.0.0.{i + 1}:4000"
            record = PeerRecord.create(identity, run_id=RUN, addresses=(address,), sequence=1, issued=1_750_000_000)
            welcome = Welcome(record.wire, b"", bytes(32), bytes(64), (), "", "", bytes(32))
            peer = self.net.transport(identity, RUN, lambda hello, them, source, welcome=welcome: welcome, address)  # type: ignore[misc]
            peer.translator = Translator(nat)
            self.peers.append(peer)
            records.append(record)
        for peer in self.peers:
            for record in records:
                peer.learn(record)
        self.readers = [asyncio.create_task(self._read(peer)) for peer in self.peers]

    async def _read(self, peer: SimTransport) -> None:
        while True:
            arrival = await peer.recv()
            if arrival.frame is None:
                self.lost.append((peer.peer_id, arrival.peer, arrival.reason))
            else:
                self.frames.setdefault(peer.peer_id, []).append((arrival.peer, arrival.frame))

    async def links(self, relays: list[SimTransport], ends: list[SimTransport]) -> None:
        for end in ends:
            for relay in relays:
                assert await end.send(relay.peer_id, GOSSIP)


async def circuit(**options: float) -> tuple[Swarm, SimTransport, SimTransport, SimTransport, int]:
    """Return a swarm, its relay, two ends with a circuit through it, and the frames that the second end has got."""
    swarm = Swarm("none", "symmetric", "symmetric", **options)
    relay, a, b = swarm.peers
    await swarm.links([relay], [a, b])
    assert await a.send(b.peer_id, GOSSIP)
    await asyncio.sleep(0.1)
    return swarm, relay, a, b, len(swarm.frames[b.peer_id])


async def circuit_with_two_relays() -> tuple[Swarm, SimTransport, SimTransport, SimTransport]:
    """Return a swarm, the relay in use of two, and two ends with a circuit through it."""
    swarm = Swarm("none", "none", "symmetric", "restricted")
    *relays, a, b = swarm.peers
    await swarm.links(relays, [a, b])
    assert await a.send(b.peer_id, GOSSIP)
    return swarm, next(one for one in relays if one.peer_id == a.relay_of(b.peer_id)), a, b


def play(work: Callable[[], Awaitable[None]], limit: float = 600.0) -> None:
    async def main() -> None:
        await work()

    virtual_loop.run(main(), seed=1, limit=limit)


def test_kinds_of_translators_admit_all_known_or_no_attempts() -> None:
    asked: dict[Nat, list[bool]] = {}
    for kind in KINDS:
        translator = Translator(kind)
        asked[kind] = [translator.admits("10.0.0.1:1")]
        translator.send("10.0.0.2:1")
        asked[kind] += [translator.admits("10.0.0.1:1"), translator.admits("10.0.0.2:1")]
    assert asked == {
        "none": [True, True, True],
        "full-cone": [False, True, True],
        "restricted": [False, False, True],
        "symmetric": [False, False, False],
        "refusing": [False, False, False],
    }


def test_peer_behind_translator_is_reached_over_the_link_that_it_opened() -> None:
    async def work() -> None:
        swarm = Swarm("none", "symmetric")
        a, b = swarm.peers
        before = swarm.net.loop.time()
        assert not await a.send(b.peer_id, GOSSIP)
        assert swarm.net.loop.time() - before == pytest.approx(swarm.net.deadline)  # dropped, not refused
        assert a.obstacle(b.peer_id) == "10.0.0.2:4000 did not answer"
        assert await b.send(a.peer_id, GOSSIP) and await a.send(b.peer_id, GOSSIP)
        await asyncio.sleep(0.1)
        assert len(swarm.frames) == 2 and not swarm.lost and a.obstacle(b.peer_id) == ""

    play(work)


def test_restricted_peers_connect_directly_once_both_have_tried() -> None:
    async def work() -> None:
        a, b = Swarm("restricted", "restricted").peers
        assert not await a.send(b.peer_id, GOSSIP)
        assert await b.send(a.peer_id, GOSSIP) and b.relay_of(a.peer_id) is None

    play(work)


def test_two_peers_behind_translators_use_a_circuit() -> None:
    async def work() -> None:
        swarm = Swarm("none", "symmetric", "symmetric", bandwidth=1e6)
        relay, a, b = swarm.peers
        await swarm.links([relay], [a, b])
        assert await a.send(b.peer_id, GOSSIP)
        assert a.relay_of(b.peer_id) == relay.peer_id == b.relay_of(a.peer_id) and a.relay_of(relay.peer_id) is None
        assert relay.lent().circuits == 1
        await asyncio.sleep(0.1)
        before, own, start = relay.totals(), a.totals()[0], swarm.net.loop.time()
        for index in range(10):
            assert await a.send(b.peer_id, Frame(Chunk(1, 0, 0, index), bytes(100_000)))
        taken, arrived = a.delivered(b.peer_id)
        assert taken > 1_000_000 > arrived + 200_000, "what is in transit to the relay, or from there, has not arrived"
        while len(swarm.frames.get(b.peer_id, ())) < 11:
            await asyncio.sleep(0.01)
        # Bytes leave the relay while they still arrive, so a second hop costs a latency.
        assert swarm.net.loop.time() - start == pytest.approx(1.0 + 0.02, abs=0.03)
        sent = a.totals()[0] - own
        assert [after - once for after, once in zip(relay.totals(), before, strict=True)] == [sent, sent]
        assert relay.lent().carried >= sent > 1_000_000
        assert [frame.message.index for _, frame in swarm.frames[b.peer_id][1:]] == list(range(10))  # type: ignore[union-attr]
        assert {peer for peer, _ in swarm.frames[b.peer_id]} == {a.peer_id}
        assert await b.send(a.peer_id, GOSSIP)
        swarm.readers[1].cancel()
        await a.close()
        await asyncio.sleep(0.1)
        assert (b.peer_id, a.peer_id, "closed by the peer") in swarm.lost
        assert not relay.lent().circuits and not swarm.net.connections

    play(work)


def test_when_a_relay_dies_another_one_is_chosen() -> None:
    async def work() -> None:
        swarm, first, a, b = await circuit_with_two_relays()
        swarm.net.kill(first.peer_id)
        await asyncio.sleep(0.1)
        ends = [end for end in swarm.lost if first.peer_id not in end[:2]]
        assert sorted(ends) == sorted([(a.peer_id, b.peer_id, "reset"), (b.peer_id, a.peer_id, "reset")])
        assert await b.send(a.peer_id, GOSSIP)
        assert b.relay_of(a.peer_id) not in (None, first.peer_id) and not first.lent().circuits

    play(work)


def test_circuit_through_a_stopped_relay_breaks_in_the_end() -> None:
    async def work() -> None:
        swarm, relay, a, b, got = await circuit(patience=30.0)
        swarm.net.pause(relay.peer_id)
        assert await a.send(b.peer_id, GOSSIP)
        await asyncio.sleep(20.0)
        assert len(swarm.frames[b.peer_id]) == got and not swarm.lost
        swarm.net.resume(relay.peer_id)
        await asyncio.sleep(0.1)
        assert len(swarm.frames[b.peer_id]) == got + 1
        swarm.net.pause(relay.peer_id)
        assert await a.send(b.peer_id, GOSSIP)
        await asyncio.sleep(31.0)
        assert set(swarm.lost) == {
            (a.peer_id, b.peer_id, "timed out"),
            (b.peer_id, a.peer_id, "timed out"),
        }

    play(work)


def test_links_over_a_relay_that_is_dead_for_membership_end_at_once() -> None:
    async def work() -> None:
        swarm, first, a, b = await circuit_with_two_relays()
        swarm.net.pause(first.peer_id)
        for end in (a, b):
            end.leave_relay(first.peer_id)
        await asyncio.sleep(0.1)
        assert set(swarm.lost) == {(a.peer_id, b.peer_id, RELAY_DEAD), (b.peer_id, a.peer_id, RELAY_DEAD)}
        assert await b.send(a.peer_id, GOSSIP)
        assert b.relay_of(a.peer_id) not in (None, first.peer_id)

    play(work)


def test_cut_between_a_peer_and_its_relay_holds_and_breaks_the_circuit() -> None:
    async def work() -> None:
        swarm, relay, a, b, got = await circuit(patience=10.0)
        swarm.net.cut(a.peer_id, b.peer_id)  # their circuit goes around it
        swarm.net.cut(relay.peer_id, b.peer_id)
        assert await a.send(b.peer_id, GOSSIP)
        await asyncio.sleep(5.0)
        assert len(swarm.frames[b.peer_id]) == got
        swarm.net.mend(relay.peer_id, b.peer_id)
        await asyncio.sleep(0.1)
        assert len(swarm.frames[b.peer_id]) == got + 1
        swarm.net.cut(relay.peer_id, b.peer_id)
        await asyncio.sleep(10.1)
        assert {end[:2] for end in swarm.lost} == {
            (one.peer_id, other.peer_id) for one, other in ((a, b), (b, a), (relay, b), (b, relay))
        }

    play(work)


def test_caps_and_refusals_of_a_relay_are_those_of_the_product() -> None:
    async def work() -> None:
        swarm = Swarm("none", *["symmetric"] * 3)
        relay, a, b, c = swarm.peers
        await swarm.links([relay], [a, b, c])
        assert relay.circuits is not None
        relay.circuits.relay.loan = Loan(circuits=1)
        assert await a.send(b.peer_id, GOSSIP)
        assert not await c.send(b.peer_id, GOSSIP)
        full = "it has lent all its circuits (relay_circuits)"
        assert relay.lent().refused == {full: 1} and c.obstacle(b.peer_id).endswith(full)
        # A circuit that carries nothing is closed.
        await asyncio.sleep(1.5 * LIMITS.idle)
        assert relay.lent().circuits == 0 and b.peer_id not in a.links

    play(work)


def test_direct_link_replaces_a_circuit() -> None:
    """Two restricted peers try each other about once a minute while they have a circuit, so both let the other in."""

    async def work() -> None:
        swarm = Swarm("none", "restricted", "restricted")
        relay, a, b = swarm.peers
        await swarm.links([relay], [a, b])
        assert await a.send(b.peer_id, GOSSIP)
        assert a.relay_of(b.peer_id) == relay.peer_id
        for _ in range(130):
            await asyncio.sleep(1.0)
            await a.send(b.peer_id, GOSSIP)
        assert b.peer_id in a.links and a.relay_of(b.peer_id) is None and b.relay_of(a.peer_id) is None
        await asyncio.sleep(1.0)
        assert relay.lent().circuits == 0 and not swarm.net.connections

    play(work)
