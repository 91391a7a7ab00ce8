import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
from thinwire.collectives.transport.interface import Arrival, Contact, Transport
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network.link import BURST, Gateway
from thinwire.sims.network.network import SimNet
from thinwire.sims.network.packets import Packer
from thinwire.sims.network.transport import SimTransport
from thinwire.swarm.frame import Frame, encode
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import VERSION, Chunk, Gossip, Hello, Refuse, Welcome

RUN = b"r" * 32
MIB = 1 << 20


def _record(identity: Identity, address: str, sequence: int = 1) -> PeerRecord:
    return PeerRecord.create(identity, run_id=RUN, addresses=(address,), sequence=sequence, issued=1_750_000_000)


def _welcome(record: PeerRecord) -> Welcome:
    return Welcome(record.wire, b"", bytes(32), bytes(64), (), "", "", bytes(32))


def _swarm(net: SimNet, count: int) -> list[SimTransport]:
    """Return peers that know each other's records."""
    peers, records = [], []
    for i in range(count):
        identity = Identity.generate(bytes([i]) * 32)
        record = _record(identity, f"10.0.0.{i + 1}:4000")
        welcome = _welcome(record)
        peers.append(
            net.transport(identity, RUN, lambda hello, them, source, welcome=welcome: welcome, record.addresses[0])
        )
        records.append(record)
    for peer in peers:
        for record in records:
            peer.learn(record)
    return peers


def _chunk(index: int = 0, size: int = 0) -> Frame:
    return Frame(Chunk(1, 0, 0, index), bytes(size))


def _gossip(mark: int = 0) -> Frame:
    return Frame(Gossip((bytes([mark]),)))


async def _ring(net: SimNet, peers: Sequence[SimTransport], total: int) -> float:
    """Send 2(N-1) shards of `total`/N bytes in frames of 1 MiB; a step begins when the one before is whole."""
    count = len(peers)
    frames = total // count // MIB

    async def turn(i: int) -> None:
        for _ in range(2 * (count - 1)):

            async def push() -> None:
                for index in range(frames):
                    assert await peers[i].send(peers[(i + 1) % count].peer_id, _chunk(index, MIB))

            async with asyncio.TaskGroup() as group:
                group.create_task(push())
                for index in range(frames):
                    arrival = await peers[i].recv()
                    assert arrival.frame is not None and isinstance(arrival.frame.message, Chunk)
                    assert arrival.frame.message.index == index

    for i in range(count):  # links first: the closed form has no handshakes
        await peers[i].send(peers[(i + 1) % count].peer_id, _chunk())
        await peers[(i + 1) % count].recv()
    start = net.loop.time()
    await asyncio.gather(*(turn(i) for i in range(count)))
    return net.loop.time() - start


def test_packer_encodes_repeated_and_changed_frames_as_the_wire_does() -> None:
    """The packer caches the last frame; the same message with another payload is another frame."""
    identity = Identity.generate(bytes(32))
    packer, chunk, gossip = Packer(identity, RUN, encode=True), _chunk(1).message, _gossip(1).message
    sent = [
        Frame(chunk, b"a"),
        Frame(chunk, b"a"),
        Frame(chunk, b"bc"),
        Frame(gossip),
        Frame(gossip),
        Frame(chunk, b"a"),
    ]
    for frame in sent:
        packet = packer.pack(frame)
        assert packet.wire == encode(frame, identity, RUN) and packet.payload == frame.payload
        assert packet.size == len(packet.wire) + len(packet.payload)


@pytest.mark.parametrize(("count", "encode"), [(4, True), (16, False)])
def test_ring_on_network_takes_closed_form_time(count: int, encode: bool) -> None:
    rate, latency, total = 12.5e6, 0.05, 32 * MIB

    async def main() -> float:
        net = SimNet(1, latency=latency, bandwidth=rate, encode=encode)
        return await _ring(net, _swarm(net, count), total)

    expected = 2 * (count - 1) * (total / count / rate + latency)
    assert virtual_loop.run(main(), seed=1) == pytest.approx(expected, rel=1e-3)


def test_uplink_is_shared_fairly_and_control_overtakes_bulk() -> None:
    async def main() -> None:
        net = SimNet(1, latency=0.01, bandwidth=1e6)
        a, b, c = _swarm(net, 3)
        for peer in (b, c):
            assert await a.send(peer.peer_id, _gossip())
            await peer.recv()
        start = net.loop.time()

        async def push(to: SimTransport, count: int) -> None:
            for _ in range(count):
                await a.send(to.peer_id, _chunk(size=100_000))

        async def pull(to: SimTransport, count: int) -> float:
            for _ in range(count):
                while not isinstance((await to.recv()).frame.message, Chunk):  # type: ignore[union-attr]
                    seen.append(net.loop.time() - start)
            return net.loop.time() - start

        seen: list[float] = []
        pushes = [asyncio.create_task(push(b, 30)), asyncio.create_task(push(c, 10))]
        pulls = [asyncio.create_task(pull(b, 30)), asyncio.create_task(pull(c, 10))]
        await asyncio.sleep(1.0)
        await a.send(b.peer_id, _gossip())
        assert await pulls[1] == pytest.approx(2.0, abs=0.25)  # the first one has frames in the queue already
        assert await pulls[0] == pytest.approx(4.0, rel=0.01)
        await asyncio.gather(*pushes)
        assert seen == [pytest.approx(1.01, abs=0.001)]
        assert a.traffic.bulk_up == b.traffic.bulk_down + c.traffic.bulk_down > 4_000_000
        assert 0 < a.traffic.control_up < 5000

    virtual_loop.run(main(), seed=1)


@pytest.mark.parametrize("receivers", [1, 2])
def test_burst_of_control_frames_takes_the_time_of_its_bytes(receivers: int) -> None:
    """The frames leave one after the other; the time that one waits in the uplink must not count for the next ones, too."""

    async def main() -> tuple[float, float]:
        net = SimNet(1, latency=0.01, bandwidth=1e4)
        sender, *others = _swarm(net, 1 + receivers)
        for peer in others:
            await sender.send(peer.peer_id, _gossip())
            await peer.recv()
        start, before = net.loop.time(), sender.traffic.control_up
        for _ in range(60):
            for peer in others:
                assert sender.offer(peer.peer_id, _gossip())
        for peer in others:
            for _ in range(60):
                await peer.recv()
        return net.loop.time() - start, (sender.traffic.control_up - before) / 1e4

    took, alone = virtual_loop.run(main(), seed=1)
    assert alone > 0.5 and took == pytest.approx(alone + 0.01, rel=0.01)


def test_downlink_limits_the_rate() -> None:
    async def main() -> float:
        net = SimNet(1, latency=0.01)
        peers = _swarm(net, 5)
        peers[0].downlink.rate = 1e6
        for peer in peers[1:]:
            await peer.send(peers[0].peer_id, _gossip())
            await peers[0].recv()
        start = net.loop.time()
        sends = [asyncio.create_task(peer.send(peers[0].peer_id, _chunk(size=MIB))) for peer in peers[1:]]
        for _ in sends:
            await peers[0].recv()
        return net.loop.time() - start

    assert virtual_loop.run(main(), seed=1) == pytest.approx(4 * MIB / 1e6 + 0.01, rel=0.001)


@pytest.mark.parametrize("encode", [True, False])
def test_payload_factor_stretches_payloads_alone_and_counts_their_bytes_while_they_leave(encode: bool) -> None:
    async def main() -> None:
        net = SimNet(1, latency=0.01, bandwidth=1e6, encode=encode, payload_factor=100.0)
        sender, receiver = _swarm(net, 2)
        for frame, seconds in ((_gossip(), 0.0), (_chunk(0, 10_000), 1.0), (_chunk(1), 0.0)):
            await sender.send(receiver.peer_id, frame)  # after the first one there is a link
            await receiver.recv()
            began, before = net.loop.time(), sender.totals()[0]
            await sender.send(receiver.peer_id, frame)
            await asyncio.sleep(seconds / 2)
            assert sender.totals()[0] - before == pytest.approx(0.5e6 * seconds, abs=1_000)
            await receiver.recv()
            assert net.loop.time() - began == pytest.approx(seconds + 0.01, abs=0.002)
            assert sender.totals()[0] - before == pytest.approx(1e6 * seconds, abs=1_000)

    virtual_loop.run(main(), seed=1)


def test_site_line_limits_traffic_between_sites_only() -> None:
    """Two send through one gateway to different sites; traffic inside a site has the speed of its links."""

    async def main() -> tuple[float, float, int]:
        net = SimNet(1, latency=0.01, bandwidth=100e6)
        peers = _swarm(net, 4)
        home, away = Gateway(net, 1e6, 1e6), Gateway(net, 2e6, 0.5e6)
        for peer, gateway in zip(peers, (home, home, away, None), strict=True):
            peer.gateway = gateway
        a, b, c, d = peers
        for one, other in ((a, c), (b, c), (b, d), (a, b)):
            await one.send(other.peer_id, _gossip())
            await other.recv()
        start, before = net.loop.time(), home.bulk
        await a.send(b.peer_id, _chunk(size=1_000_000))
        await b.recv()
        inside = net.loop.time() - start
        start = net.loop.time()
        await b.send(d.peer_id, _chunk(size=500_000))
        await a.send(c.peer_id, _chunk(size=1_000_000))
        await asyncio.gather(c.recv(), d.recv())
        return inside, net.loop.time() - start, home.bulk - before

    inside, outside, nbytes = virtual_loop.run(main(), seed=1)
    assert inside == pytest.approx(0.01 + 0.01, rel=0.01)
    # Half a second of the line for one, then a second for the other, whose site receives half as much in that time.
    assert outside == pytest.approx(0.5 + 0.01 + 2.0, rel=0.01)
    assert nbytes == pytest.approx(1_500_000, rel=0.01)


def test_back_pressure_bounds_bytes_in_flight() -> None:
    async def main() -> None:
        net = SimNet(1, window=8)
        a, b = _swarm(net, 2)
        sent: list[int] = []

        async def push() -> None:
            for i in range(20):
                assert await a.send(b.peer_id, _chunk(i, BURST))
                sent.append(i)

        task = asyncio.create_task(push())
        await asyncio.sleep(10)
        assert len(sent) == 8
        assert await a.send(b.peer_id, _gossip())  # the other plane is free
        await asyncio.sleep(1)
        for _ in range(3):
            await b.recv()  # the gossip and two chunks
        await asyncio.sleep(1)
        assert len(sent) == 10
        net.pause(b.peer_id)
        await asyncio.sleep(60)
        assert len(sent) == 10
        net.resume(b.peer_id)
        indices = [(await b.recv()).frame.message.index for _ in range(18)]  # type: ignore[union-attr]
        assert indices == list(range(2, 20))
        await task

    virtual_loop.run(main(), seed=3)


def test_small_frames_are_in_flight_together_up_to_one_burst() -> None:
    async def main() -> None:
        net = SimNet(1, window=8, latency=0.3)
        a, b = _swarm(net, 2)
        sent: list[float] = []

        async def push(count: int, size: int) -> None:
            start = net.loop.time()
            for i in range(count):
                await a.send(b.peer_id, _chunk(i, size))
                sent.append(net.loop.time() - start)

        async def take(count: int) -> None:
            for _ in range(count):
                await b.recv()

        await asyncio.gather(push(1, 0), take(1))
        size = len(encode(_chunk(0, 200), None, RUN)) + 200
        sent.clear()
        most = -(-8 * (BURST // 8) // size)  # The last one may exceed the burst.
        await asyncio.gather(push(100, 200), take(100))
        assert 40 < most < 80
        assert sent == [0.0] * most + [pytest.approx(0.3)] * (100 - most)
        assert a.peaks[True] == 8
        sent.clear()
        await asyncio.gather(push(9, BURST), take(9))
        assert sent == [0.0] * 8 + [pytest.approx(0.3)]
        assert a.links[b.peer_id].pipe(a, bulk=True).used == 0

    virtual_loop.run(main(), seed=3)


def test_sends_waiting_on_killed_peer_return_false() -> None:
    async def main() -> None:
        net = SimNet(1, window=8)
        a, b = _swarm(net, 2)
        for i in range(8):
            assert await a.send(b.peer_id, _chunk(i, BURST))
        waiting = [asyncio.create_task(a.send(b.peer_id, _chunk(i, BURST))) for i in range(8, 11)]
        await asyncio.sleep(1)
        net.kill(b.peer_id)
        assert await asyncio.gather(*waiting) == [False] * 3
        assert a.peaks[True] == 8

    virtual_loop.run(main(), seed=3)


def test_killed_peer_resets_links_after_one_latency() -> None:
    async def main() -> None:
        net = SimNet(1, latency=0.05)
        a, b, c = _swarm(net, 3)
        await a.send(b.peer_id, _gossip())
        await c.send(a.peer_id, _gossip())
        assert (await b.recv()).peer == a.peer_id and (await a.recv()).peer == c.peer_id
        for i in range(8):
            assert await a.send(b.peer_id, _chunk(i, BURST))
        stuck = asyncio.create_task(a.send(b.peer_id, _chunk()))
        dead = asyncio.create_task(b.recv())
        await asyncio.sleep(0)
        start = net.loop.time()
        net.kill(b.peer_id)
        assert await a.recv() == Arrival(b.peer_id, None, "reset")
        assert net.loop.time() == pytest.approx(start + 0.05)
        assert await stuck is False
        assert await a.send(b.peer_id, _gossip()) is False
        assert net.loop.time() == pytest.approx(start + 0.15)  # refused, in a round trip
        assert await c.send(a.peer_id, _gossip())  # others are not concerned
        assert not dead.done()
        again = net.transport(Identity.generate(bytes([1]) * 32), RUN, lambda *_: _welcome(record), b.addresses()[0])
        record = _record(Identity.generate(bytes([1]) * 32), b.addresses()[0], 2)
        assert await a.send(again.peer_id, _gossip(7))
        assert (await again.recv()).frame == Frame(Gossip((b"\x07",)), b"", (await _last(a, again)))

    async def _last(a: SimTransport, again: SimTransport) -> bytes:
        await a.send(again.peer_id, _gossip(7))
        frame = (await again.recv()).frame
        assert frame is not None
        return frame.signature

    virtual_loop.run(main(), seed=1)


def test_partition_stalls_links_until_healed_or_broken() -> None:
    async def main() -> None:
        net = SimNet(1, latency=0.05, patience=30)
        a, b, c = _swarm(net, 3)
        for x, y in ((a, b), (b, c), (c, a)):
            await x.send(y.peer_id, _gossip())
            await y.recv()
        net.partition([[a.peer_id, c.peer_id], [b.peer_id]])
        for i in range(3):
            assert await a.send(b.peer_id, _gossip(i))
        await a.send(c.peer_id, _gossip())
        assert (await c.recv()).peer == a.peer_id
        reader = asyncio.create_task(b.recv())
        await asyncio.sleep(10)
        assert not reader.done()
        net.heal()
        arrivals = [await reader, await b.recv(), await b.recv()]
        assert [x.frame.message.items for x in arrivals] == [(b"\0",), (b"\1",), (b"\2",)]  # type: ignore[union-attr]
        net.cut(a.peer_id, b.peer_id, one_way=True)
        await a.send(b.peer_id, _gossip())
        await b.send(a.peer_id, _gossip())
        assert (await a.recv()).frame is not None
        start = net.loop.time()
        assert await b.recv() == Arrival(a.peer_id, None, "timed out")
        assert await a.recv() == Arrival(b.peer_id, None, "timed out")
        assert net.loop.time() - start == pytest.approx(30, abs=0.2)
        assert await a.send(b.peer_id, _gossip()) is False  # a new link cannot be opened either
        net.heal()
        assert await a.send(b.peer_id, _gossip())

    virtual_loop.run(main(), seed=1)


def test_admission_refuses_with_reason_and_bans_hold() -> None:
    async def main() -> None:
        net = SimNet(1)
        a, b, c = _swarm(net, 3)
        mine = _record(Identity.generate(bytes([0]) * 32), "10.0.0.1:4000")
        theirs = b.known[c.peer_id]
        key = a.known[b.peer_id].transport_key

        async def code(hello: Hello, address: str = "10.0.0.2:4000", key: bytes = key) -> str:
            answer = await a.meet(Contact(address, key), hello)
            return answer.code if isinstance(answer, Refuse) else "welcome"

        assert await code(Hello(VERSION + 1, RUN, mine.wire)) == "version"
        assert await code(Hello(VERSION, bytes(32), mine.wire)) == "run"
        assert await code(Hello(VERSION, RUN, mine.wire[:-1] + b"x")) == "signature"
        assert await code(Hello(VERSION, RUN, theirs.wire)) == "signature"
        assert await code(Hello(VERSION, RUN, mine.wire), key=bytes(32)) == "unreachable"
        assert await code(Hello(VERSION, RUN, mine.wire), address="10.9.9.9:1") == "unreachable"
        assert await code(Hello(VERSION, RUN, mine.wire)) == "welcome"
        assert await b.send(a.peer_id, _gossip())
        b.drop(a.peer_id, "liar", ban=True)
        while (arrival := await a.recv()).frame is not None:
            pass
        assert arrival.reason == "closed by the peer"
        assert await code(Hello(VERSION, RUN, mine.wire)) == "banned"
        assert await a.send(b.peer_id, _gossip()) is False
        assert await b.send(a.peer_id, _gossip()) is False

    virtual_loop.run(main(), seed=1)


def test_flipped_bit_closes_link_and_caller_may_reuse_buffer() -> None:
    async def main() -> None:
        net = SimNet(1)
        a, b = _swarm(net, 2)
        buffer = bytearray(b"first")
        await a.send(b.peer_id, Frame(Chunk(1, 0, 0, 0), buffer))
        buffer[:] = b"other"
        frame = (await b.recv()).frame
        assert frame is not None and bytes(frame.payload) == b"first"  # type: ignore[arg-type]
        net.corrupt = lambda sender, receiver, data: data[:30] + bytes([data[30] ^ 1]) + data[31:]
        await a.send(b.peer_id, _gossip())
        arrival = await b.recv()
        assert arrival.frame is None and "signature" in arrival.reason
        assert (await a.recv()).frame is None

    virtual_loop.run(main(), seed=1)


def test_close_delivers_sent_frames_and_ends_recv() -> None:
    async def main() -> None:
        net = SimNet(1, jitter=0.9, loss=0.2)
        a, b = _swarm(net, 2)
        waiting = asyncio.create_task(a.recv())
        for i in range(20):
            await a.send(b.peer_id, _gossip(i))
        await a.close()
        for i in range(20):
            assert (await b.recv()).frame.message == Gossip((bytes([i]),))  # type: ignore[union-attr]
        assert await b.recv() == Arrival(a.peer_id, None, "closed by the peer")
        with pytest.raises(RuntimeError):
            await waiting
        with pytest.raises(RuntimeError):
            await a.send(b.peer_id, _gossip())

    for seed in range(5):
        virtual_loop.run(main(), seed=seed)


def test_sim_transport_implements_transport() -> None:
    async def main() -> None:
        net = SimNet(1)
        transport: Transport = _swarm(net, 1)[0]
        assert transport.addresses() == ("10.0.0.1:4000",)
        assert await transport.send(b"x" * 32, _gossip()) is False

    virtual_loop.run(main(), seed=1)


_TRACE = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from test_network import SimNet, _chunk, _gossip, _swarm
from thinwire.sims.engine import virtual_loop

async def main(seed):
    net = SimNet(seed, jitter=0.5, loss=0.05, bandwidth=1e6)
    peers = _swarm(net, 5)
    async def talk(peer):
        for i in range(10):
            for other in peers:
                await peer.send(other.peer_id, _chunk(i, 5000) if i % 2 else _gossip(i))
    async def listen(peer):
        while True:
            await peer.recv()
    readers = [asyncio.create_task(listen(peer)) for peer in peers]
    net.loop.call_later(0.3, net.cut, peers[0].peer_id, peers[1].peer_id)
    net.loop.call_later(0.9, net.heal)
    await asyncio.gather(*(talk(peer) for peer in peers))
    return net.loop.trace

print([virtual_loop.run(main(seed), seed=seed) for seed in (1, 2, 3)])
"""


def test_network_traces_are_equal_for_any_hash_seed() -> None:
    code = _TRACE.format(folder=os.path.dirname(__file__))
    outputs = []
    for seed in ("0", "4711"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0].split(","))) == 3


def test_loss_fault_affects_only_its_peers_and_ends_on_time() -> None:
    """A retransmission after the fault succeeds: time-outs do not keep doubling because of an old fault."""

    async def main() -> tuple[list[float], list[float], list[float]]:
        net = SimNet(5)
        a, b, c, d = (peer.peer_id for peer in _swarm(net, 4))
        net.lose((a, b), 0.6, until=2.0)
        net.lose((a,), 0.6, until=2.0)
        named = [net.delay(a, c) for _ in range(500)] + [net.delay(d, b) for _ in range(500)]
        others = [net.delay(c, d) for _ in range(100)]
        net.keep((a,), 0.6, until=2.0)
        net.keep((a, b), 0.6, until=2.0)
        return named, others, [net.delay(a, b) for _ in range(100)]

    named, others, after = virtual_loop.run(main(), seed=1)
    assert 2.0 < max(named) < 4.0  # the time-out in progress at the end still counts
    assert sum(delay > 0.1 for delay in named) > 500
    assert max(others) == max(after) == min(named)


def test_lost_packet_delivers_no_bytes_until_retransmitted() -> None:
    """Bytes behind a lost packet wait with it: they are no progress."""

    async def main() -> tuple[list[int], list[int]]:
        net = SimNet(5)
        a, b = _swarm(net, 2)
        a.uplink.rate = 1e6
        await a.send(b.peer_id, _chunk())
        await b.recv()

        async def watch() -> list[int]:
            before, seen = b.bulk_received(a.peer_id), []
            for index in range(2):
                await a.send(b.peer_id, _chunk(index, MIB))
            for _ in range(3):
                await asyncio.sleep(0.25)
                seen.append(b.bulk_received(a.peer_id) - before)
            for _ in range(2):
                await b.recv()
            return seen

        well = await watch()
        net.lose((a.peer_id,), 0.999, until=net.loop.time() + 1.0)
        return well, await watch()

    well, lossy = virtual_loop.run(main(), seed=1)
    assert sorted(set(well)) == well and well[-1] > MIB // 4
    assert lossy == [0, 0, 0]


def test_sent_bytes_arrive_at_the_rate_of_the_link_and_not_through_a_cut() -> None:
    async def main() -> None:
        net = SimNet(5, latency=0.1)
        a, b = _swarm(net, 2)
        a.uplink.rate = MIB / 10
        assert a.delivered(b.peer_id) == (0, 0)
        for index in range(2):
            await a.send(b.peer_id, _chunk(index, MIB))
        taken, _ = a.delivered(b.peer_id)
        assert 2 * MIB < taken < 2.01 * MIB
        start = net.loop.time()
        for seconds, share in ((0.05, 0.0), (5.1, 0.25), (10.1, 0.5), (15.1, 0.75), (20.2, 1.0)):
            await asyncio.sleep(start + seconds - net.loop.time())
            assert a.delivered(b.peer_id) == (taken, pytest.approx(share * taken, abs=0.01 * taken))
        await a.send(b.peer_id, _chunk(2, MIB))
        await asyncio.sleep(5.0)
        net.cut(a.peer_id, b.peer_id)
        await asyncio.sleep(10.0)
        assert a.delivered(b.peer_id)[1] == taken
        net.mend(a.peer_id, b.peer_id)
        await asyncio.sleep(1.0)
        after, arrived = a.delivered(b.peer_id)
        assert after == arrived > taken
        a.drop(b.peer_id, "over")
        assert a.delivered(b.peer_id) == (0, 0)

    virtual_loop.run(main(), seed=1)


def test_pipes_of_a_link_are_made_when_used_and_as_the_link_was_opened():
    async def main():
        delay = 0.25
        net = SimNet(1, latency=lambda sender, receiver: delay)
        one, two = _swarm(net, 2)
        assert await one.send(two.peer_id, _gossip())
        link = one.links[two.peer_id]
        assert link is two.links[one.peer_id] and [(pipe.source, pipe.bulk) for pipe in link.pipes] == [(one, False)]
        delay = 9.0
        back = link.pipe(two, bulk=True)
        assert (back.source, back.sink, back.bulk, back.latency, back.limit) == (two, one, True, 0.25, 8 * back.share)
        assert link.pipe(two, bulk=True) is back and len(link.pipes) == 2

    virtual_loop.run(main(), seed=1)
