"""Link faults: frames arrive unchanged and in order, or the link ends."""

from __future__ import annotations

import asyncio

import pytest
from thinwire.collectives.transport.interface import REFUSED, Arrival
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network.network import SimNet
from thinwire.sims.network.transport import SimTransport
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import Chunk, Welcome

RUN = b"r" * 32


def _pair(net: SimNet, count: int = 2) -> list[SimTransport]:
    peers, records = [], []
    for i in range(count):
        identity = Identity.generate(bytes([i]) * 32)
        address = (f"10.0.0.{i + 1}:4000",)
        record = PeerRecord.create(identity, run_id=RUN, addresses=address, sequence=1, issued=1_750_000_000)
        welcome = Welcome(record.wire, b"", bytes(32), bytes(64), (), "", "", bytes(32))
        peers.append(net.transport(identity, RUN, lambda hello, them, source, welcome=welcome: welcome, address[0]))
        records.append(record)
    for peer in peers:
        for record in records:
            peer.learn(record)
    return peers


def _frame(index: int, size: int = 0) -> Frame:
    return Frame(Chunk(1, 0, 0, index), bytes(size))


def _index(arrival: Arrival) -> int:
    assert arrival.frame is not None and isinstance(arrival.frame.message, Chunk)
    return arrival.frame.message.index


def test_clog_holds_bytes_back_but_allows_new_links() -> None:
    async def main() -> None:
        net = SimNet(1, latency=0.05)
        a, b = _pair(net)
        net.clog(a.peer_id, b.peer_id)
        assert await a.send(b.peer_id, _frame(0)), "the handshake is not held"
        assert await a.send(b.peer_id, _frame(1))
        reader = asyncio.create_task(b.recv())
        await asyncio.sleep(20)
        net.clog(a.peer_id, b.peer_id)
        net.unclog(a.peer_id, b.peer_id)
        await asyncio.sleep(5)
        assert not reader.done(), "two clogs need two ends"
        start = net.loop.time()
        net.unclog(a.peer_id, b.peer_id)
        assert [_index(await reader), _index(await b.recv())] == [0, 1]
        assert net.loop.time() == pytest.approx(start + 0.05)

    virtual_loop.run(main(), seed=1)


def test_long_clog_breaks_link() -> None:
    async def main() -> None:
        net = SimNet(1, patience=30)
        a, b = _pair(net)
        await a.send(b.peer_id, _frame(0))
        await b.recv()
        net.clog(a.peer_id, b.peer_id)
        start = net.loop.time()
        assert await a.recv() == Arrival(b.peer_id, None, "timed out") and net.loop.time() == start + 30

    virtual_loop.run(main(), seed=1)


def test_overlapping_cuts_end_separately() -> None:
    async def main() -> None:
        net = SimNet(1, latency=0.01)
        a, b, c = _pair(net, 3)
        await a.send(b.peer_id, _frame(0))
        await b.recv()
        net.partition([[a.peer_id], [b.peer_id, c.peer_id]])
        net.cut(a.peer_id, b.peer_id, one_way=True)
        await a.send(b.peer_id, _frame(1))
        await b.send(a.peer_id, _frame(2))
        net.partition([[a.peer_id], [b.peer_id, c.peer_id]], end=True)
        assert _index(await a.recv()) == 2
        reader = asyncio.create_task(b.recv())
        await asyncio.sleep(1)
        assert not reader.done()
        net.mend(a.peer_id, b.peer_id, one_way=True)
        net.mend(a.peer_id, b.peer_id, one_way=True)  # a surplus mend has no effect
        assert _index(await reader) == 1

    virtual_loop.run(main(), seed=1)


def test_half_open_link_swallows_frames_until_noticed() -> None:
    async def main() -> None:
        net = SimNet(1, latency=0.01)
        a, b = _pair(net)
        await a.send(b.peer_id, _frame(0))
        await b.recv()
        net.half_open(a.peer_id, b.peer_id, 12.0)
        assert await a.recv() == Arrival(b.peer_id, None, "reset")
        assert await b.send(a.peer_id, _frame(1))
        reader = asyncio.create_task(a.recv())
        assert await b.recv() == Arrival(a.peer_id, None, "timed out") and net.loop.time() > 12
        assert not reader.done()
        assert await b.send(a.peer_id, _frame(2))
        assert _index(await reader) == 2
        net.half_open(a.peer_id, b.peer_id, 12.0)
        assert (await a.recv()).reason == "reset"
        assert await a.send(b.peer_id, _frame(3)), "a new link takes the old one's place"
        assert (await b.recv()).reason == "replaced" and _index(await b.recv()) == 3
        await asyncio.sleep(30)
        assert await b.send(a.peer_id, _frame(4)), "and the old one's end does not harm it"
        assert _index(await a.recv()) == 4

    virtual_loop.run(main(), seed=1)


def test_slow_close_delivers_frames_in_flight() -> None:
    async def main() -> None:
        net = SimNet(1, latency=0.5)
        a, b = _pair(net)
        for index in range(3):
            assert await a.send(b.peer_id, _frame(index))
        net.slow_close(a.peer_id, b.peer_id, 4.0)
        assert (await a.recv()).reason == "closed"
        assert [_index(await b.recv()) for _ in range(3)] == [0, 1, 2]
        assert await b.recv() == Arrival(a.peer_id, None, "closed by the peer")

    virtual_loop.run(main(), seed=1)


@pytest.mark.parametrize("encode", [True, False])
@pytest.mark.parametrize("how", ["corrupt", "duplicate", "reorder"])
def test_hostile_relay_can_only_break_link(how: str, encode: bool) -> None:
    async def main() -> None:
        net = SimNet(3, latency=0.05, encode=encode)
        a, b = _pair(net)
        await a.send(b.peer_id, _frame(0))
        await b.recv()
        net.relay(a.peer_id, b.peer_id, how)

        async def push() -> None:
            for index in range(1, 200):
                await a.send(b.peer_id, _frame(index, 2000))  # eight in flight

        task = asyncio.create_task(push())
        seen, broken = [0], 0
        while seen[-1] < 199:
            arrival = await b.recv()
            if arrival.frame is None:
                assert "seal" in arrival.reason
                broken += 1
                if broken == 5:
                    net.relay(a.peer_id, b.peer_id, "")
            else:
                seen.append(_index(arrival))
        await task
        assert broken >= 5 and seen == sorted(set(seen)) and len(seen) < 200

    virtual_loop.run(main(), seed=3)


def test_connection_rate_is_limited_below_link_rate() -> None:
    async def main() -> None:
        net = SimNet(1, latency=0.01, bandwidth=10e6, stream=lambda sender, receiver: 1e6)
        a, b, c = _pair(net, 3)
        for peer in (b, c):
            await a.send(peer.peer_id, _frame(0))
            await peer.recv()
        start = net.loop.time()

        async def push(to: SimTransport) -> None:
            for index in range(8):
                await a.send(to.peer_id, _frame(index, 500_000))

        async def pull(at: SimTransport) -> float:
            for _ in range(8):
                await at.recv()
            return net.loop.time() - start

        pushes = [asyncio.create_task(push(peer)) for peer in (b, c)]
        for took in await asyncio.gather(pull(b), pull(c)):
            assert took == pytest.approx(4.0, rel=0.05)
        await asyncio.gather(*pushes)

    virtual_loop.run(main(), seed=1)


def test_slow_sender_gets_fair_share_of_downlink() -> None:
    async def main() -> None:
        net = SimNet(1, latency=0.01)
        a, b, c = _pair(net, 3)
        a.downlink.rate, b.uplink.rate, c.uplink.rate = 2e6, 20e6, 1e6
        for peer in (b, c):
            await peer.send(a.peer_id, _frame(0))
            await a.recv()
        start, ends = net.loop.time(), {b.peer_id: 0.0, c.peer_id: 0.0}

        async def push(peer: SimTransport, count: int) -> None:
            for index in range(count):
                await peer.send(a.peer_id, _frame(index, 100_000))

        pushes = [asyncio.create_task(push(b, 60)), asyncio.create_task(push(c, 30))]
        for _ in range(90):
            ends[(await a.recv()).peer] = net.loop.time() - start
        await asyncio.gather(*pushes)
        assert ends[c.peer_id] == pytest.approx(3.0, rel=0.15), "its uplink is the bottleneck, not the other's queue"
        assert ends[b.peer_id] == pytest.approx(4.5, rel=0.1)

    virtual_loop.run(main(), seed=1)


def test_refusing_partition_resets_links_and_refuses_new_ones_at_once() -> None:
    async def main() -> None:
        net = SimNet(1, latency=0.05)
        a, b, c = _pair(net, 3)
        await a.send(b.peer_id, _frame(0))
        await a.send(c.peer_id, _frame(0))
        await b.recv()
        groups = [[a.peer_id], [b.peer_id]]
        net.partition(groups, refuse=True)
        start = net.loop.time()
        assert await a.recv() == Arrival(b.peer_id, None, "reset") and await b.recv() == Arrival(
            a.peer_id, None, "reset"
        )
        assert net.loop.time() == start
        for sender, receiver in ((a, b), (b, a)):
            start = net.loop.time()
            assert not await sender.send(receiver.peer_id, _frame(1))
            assert net.loop.time() < start + 0.2, "the attempt does not wait for a time-out"
            assert await sender.recv() == Arrival(receiver.peer_id, None, REFUSED)
        assert await a.send(c.peer_id, _frame(1)), "the others are not affected"
        net.partition(groups, refuse=True, end=True)
        assert await a.send(b.peer_id, _frame(2)) and _index(await b.recv()) == 2

    virtual_loop.run(main(), seed=1)


def test_overlapping_refusals_end_separately() -> None:
    async def main() -> None:
        net = SimNet(1, latency=0.05)
        a, b = _pair(net)
        net.refuse(a.peer_id, b.peer_id)
        net.refuse(a.peer_id, b.peer_id)
        net.admit(a.peer_id, b.peer_id)
        assert not await a.send(b.peer_id, _frame(0))
        net.heal()
        assert await a.send(b.peer_id, _frame(0))
        net.admit(a.peer_id, b.peer_id)  # a surplus end has no effect
        net.refuse(a.peer_id, b.peer_id)
        assert (await a.recv()).reason == REFUSED and (await a.recv()).reason == "reset"
        assert not await a.send(b.peer_id, _frame(1))

    virtual_loop.run(main(), seed=1)


def test_connection_that_is_being_made_when_refusal_begins_fails() -> None:
    async def main() -> None:
        net = SimNet(1, latency=0.5)
        a, b = _pair(net)
        net.at(net.loop.time() + 1.2, net.refuse, a.peer_id, b.peer_id)
        assert not await a.send(b.peer_id, _frame(0))
        assert not a.links and not b.links

    virtual_loop.run(main(), seed=1)


def test_one_way_refusal_refuses_first_peer_and_is_silent_to_second() -> None:
    async def main() -> None:
        net = SimNet(1, latency=0.05)
        a, b = _pair(net)
        await a.send(b.peer_id, _frame(0))
        await b.recv()
        net.refuse(a.peer_id, b.peer_id, one_way=True)
        assert await a.recv() == Arrival(b.peer_id, None, "reset")
        start = net.loop.time()
        assert not await a.send(b.peer_id, _frame(1)) and net.loop.time() < start + 0.2
        assert (await a.recv()).reason == REFUSED
        assert await b.send(a.peer_id, _frame(1)), "b does not know that the link was reset"
        reader = asyncio.create_task(b.recv())
        await asyncio.sleep(5)
        assert not reader.done()
        net.admit(a.peer_id, b.peer_id, one_way=True)
        assert await reader == Arrival(a.peer_id, None, "reset")
        assert await b.send(a.peer_id, _frame(2)) and _index(await a.recv()) == 2

    virtual_loop.run(main(), seed=1)


def test_attempt_against_a_one_way_refusal_times_out() -> None:
    async def main() -> None:
        net = SimNet(1, latency=0.05, deadline=5.0)
        a, b = _pair(net)
        net.refuse(a.peer_id, b.peer_id, one_way=True)
        start = net.loop.time()
        assert not await b.send(a.peer_id, _frame(0))
        assert net.loop.time() == pytest.approx(start + 5.0)

    virtual_loop.run(main(), seed=1)
