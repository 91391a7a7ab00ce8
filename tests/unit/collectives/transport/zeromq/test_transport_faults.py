"""The ZeroMQ transport with peers that die, stall or read slowly, some of them real processes."""

import asyncio
import contextlib
import itertools
import os
import random
import resource
import signal
import sys
import time

import pytest
from thinwire.collectives.transport.interface import RESET, Contact
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import CHUNK_BYTES, Chunk, Welcome

CHILD = """
import asyncio, sys, time
import uvloop
from thinwire.collectives.transport.interface import RESET, Contact
from thinwire.collectives.transport.zeromq.transport import ListenAddress, ZmqTransport
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.messages.registry import VERSION, Hello, Ping, Chunk, Welcome
from thinwire.swarm.identity.peer_record import PeerRecord

async def main():
    address, key, sequence, port = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    identity, run = Identity.generate(b"c" * 32), b"r" * 32
    record = None
    def admit(hello, stranger, source):
        return Welcome(record.wire, b"", bytes(32), bytes(64), (), "", "", bytes(32))
    transport = ZmqTransport(identity, run_id=run, admit=admit, wall=lambda: int(time.time()), listen=ListenAddress(port=port))
    await transport.open()
    record = PeerRecord.create(
        identity, run_id=run, addresses=transport.addresses(), sequence=sequence, issued=int(time.time())
    )
    transport.learn(record)
    answer = await transport.meet(Contact(address, key), Hello(VERSION, run, record.wire))
    assert isinstance(answer, Welcome), answer
    host = next(iter(transport._connections.links))
    for index in range(10):
        assert await transport.send(host, Frame(Chunk(1, 0, 1, index), bytes(1 << 20)))
    assert await transport.send(host, Frame(Ping(int(transport.addresses()[0].rpartition(":")[2]), 0, ())))
    await asyncio.sleep(60)

uvloop.run(main())
"""
CHILD_ID = Identity.generate(b"c" * 32).peer_id


async def child(host, sequence=1, port=0):
    arguments = (host.contact.address, host.contact.transport_key.hex(), str(sequence), str(port))
    return await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, *arguments)


async def greeting(host):
    """Read all output of the child; return its gate's port."""
    port, chunks = 0, 0
    while not port or chunks < 10:
        message = (await host.recv()).frame.message
        if isinstance(message, Chunk):
            chunks += 1
        else:
            port = message.sequence
    return port


def test_killed_process_is_detected_and_can_reconnect(wire):
    async def work():
        host = await wire.peer(1)
        process = await child(host)
        port = await greeting(host)
        start = time.monotonic()
        process.send_signal(signal.SIGKILL)
        arrival = await host.recv()
        # A reset takes milliseconds; every time-out of the transport is longer than this.
        assert time.monotonic() - start < 1.0
        assert arrival.peer == CHILD_ID and arrival.frame is None and arrival.reason == RESET
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(host.transport.recv(), 0.1)
        await process.wait()
        # No process listens there now, which is reported as well.
        assert not await host.ping(type("Gone", (), {"id": CHILD_ID}))
        assert (await host.recv()).gone
        again = await child(host, 2, port)
        assert await greeting(host) == port
        assert await host.ping(type("Back", (), {"id": CHILD_ID}))
        again.kill()
        assert (await host.recv()).reason == RESET
        await again.wait()

    wire.run(work)


def test_process_killed_during_transfer_breaks_only_its_link(wire):
    async def work():
        host = await wire.peer(1)
        process = await child(host)
        await greeting(host)
        process.send_signal(signal.SIGSTOP)
        target = type("Stopped", (), {"id": CHILD_ID})

        async def feed():
            count = 0
            while await host.chunk(target, bytes(CHUNK_BYTES), count % 1000):
                count += 1
            return count

        feeder = asyncio.create_task(feed())
        await settled(host, CHILD_ID)
        assert not feeder.done()
        process.kill()
        assert (await host.recv()).peer == CHILD_ID
        # A waiting sender is informed: a lost link accepts no frame.
        assert await asyncio.wait_for(feeder, 10) < 200
        await process.wait()

    wire.run(work)


async def settled(peer, other):
    """Wait until no more bulk leaves for `other`."""
    before = -1
    while (now := peer.transport.stats()[other].traffic.bulk_up) != before:
        before = now
        await asyncio.sleep(0.3)


def test_slow_reader_holds_bulk_sender_back(wire, eventually):
    async def work():
        limits = wire.short(receive_queue=4 << 20)
        first, second = await wire.pair(limits=limits)
        count = 150
        sent = 0

        async def feed():
            nonlocal sent
            for index in range(count):
                assert await first.chunk(second, bytes([index]) * CHUNK_BYTES, index)
                sent += 1

        feeder = asyncio.create_task(feed())
        await settled(first, second.id)
        # The receive queue, the kernel's buffers of two streams, and one record in transit on each.
        assert sent < 100 and second.sockets.receive_queue.bulk.held < 8 << 20
        # Control still passes, though bulk is held back.
        assert await first.ping(second, 8)
        await eventually(lambda: second.sockets.receive_queue.control)
        assert (await second.recv()).frame.message.sequence == 8
        seen = set()
        while len(seen) < count:
            frame = (await second.recv()).frame
            assert frame.payload[0] == frame.message.index and len(frame.payload) == CHUNK_BYTES
            seen.add(frame.message.index)
        await feeder

    wire.run(work)


def test_slow_reader_holds_control_sender_back(wire):
    async def work():
        first, second = await wire.pair(limits=wire.short(receive_queue=20_000))
        count = 3000
        feeder = asyncio.create_task(asyncio.wait_for(all_pings(first, second, count), 30))
        lane = second.sockets.receive_queue.control
        while not lane.full:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.3)
        assert lane.held < 20_000 + 70 * 2048
        for number in range(count):
            assert (await second.recv()).frame.message.sequence == number
        await feeder

    async def all_pings(first, second, count):
        for number in range(count):
            assert await first.ping(second, number)

    wire.run(work)


def test_peer_that_reads_nothing_is_lost(wire):
    async def work():
        first, second = await wire.pair(limits=wire.short(stall=0.5, receive_queue=1 << 20))
        index = 0
        while await first.chunk(second, bytes(CHUNK_BYTES), index % 1000):
            index += 1
        arrival = await first.recv()
        assert arrival.peer == second.id and "takes no data" in arrival.reason

    wire.run(work)


def test_blocked_bulk_fails_and_control_continues(wire):
    async def work():
        first, second = await wire.peer(1, limits=wire.short()), await wire.peer(2, limits=wire.short())
        second.close_bulk_port()
        assert isinstance(await first.meet(second), Welcome)
        assert not await first.chunk(second, b"x")
        assert await first.ping(second, 1) and await second.ping(first, 2)
        assert (await first.recv()).frame.message.sequence == 2

    wire.run(work)


def test_cancelled_send_leaves_link_usable(wire):
    async def work():
        first, second = await wire.pair(limits=wire.short(receive_queue=1 << 20))

        async def feed():
            for index in range(1000):
                assert await first.chunk(second, bytes(CHUNK_BYTES), index % 1000)

        feeders = [asyncio.create_task(feed()) for _ in range(4)]
        await settled(first, second.id)
        for feeder in feeders:
            feeder.cancel()
        await asyncio.gather(*feeders, return_exceptions=True)
        assert await first.ping(second)
        last = asyncio.create_task(first.chunk(second, b"last", 1023))
        while True:
            message = (await second.recv()).frame.message
            if isinstance(message, Chunk) and message.index == 1023:
                break
        assert await last

    wire.run(work)


def test_second_address_is_tried_when_first_is_dead(wire):
    async def work():
        first, second = await wire.peer(1), await wire.peer(2)
        port = second.port
        dead = await wire.peer(3)
        await dead.transport.close()
        second.advertise(f"127.0.0.1:{dead.port}", f"127.0.0.1:{port}")
        record = type(second.record).create(
            second.identity,
            run_id=second.run_id,
            addresses=second.transport.addresses(),
            sequence=9,
            issued=int(time.time()),
        )
        first.transport.learn(record)
        assert await first.ping(second, 6)
        assert (await second.recv()).frame.message.sequence == 6

    wire.run(work)


def test_unresponsive_machine_times_out(wire):
    async def work():
        first = await wire.peer(1, limits=wire.short(knock=0.3))
        listener = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        answer = await first.transport.meet(Contact(f"127.0.0.1:{port}", bytes(32)), first.hello)
        assert answer.code == "unreachable"
        listener.close()

    wire.run(work)


def test_send_does_not_wait_for_a_dial_once_the_peer_has_dialled(wire):
    """A peer behind an address translator cannot be dialled, but its link carries what waits for the dial."""

    async def work():
        silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        limits = wire.short(hold=0.1, handshake=5.0)
        first = await wire.peer(1, limits=limits)
        second = await wire.peer(2, limits=limits, advertise=(f"127.0.0.1:{silent.sockets[0].getsockname()[1]}",))
        first.transport.learn(second.record)
        start, sent = time.monotonic(), asyncio.create_task(first.ping(second))
        await asyncio.sleep(0.1)
        assert isinstance(await second.meet(first), Welcome)
        assert await sent and time.monotonic() - start < limits.knock / 2
        silent.close()

    wire.run(work)


def test_flipped_bit_on_control_connection_closes_link(wire):
    async def work():
        first, second = await wire.pair()
        await wire.settled(first, second)  # otherwise the last message of the handshake is flipped
        tcp_relay = second.control_connection(first).tcp_relay
        carry = tcp_relay.carry

        def flip(outer, data):
            carry(outer, bytes([*data[:-1], data[-1] ^ 1]) if outer else data)

        tcp_relay.carry = flip
        assert await first.ping(second)
        lost = [await peer.recv() for peer in (first, second)]
        assert [arrival.frame for arrival in lost] == [None, None]
        assert await first.ping(second, 5) or await first.ping(second, 5)
        assert (await second.recv()).frame.message.sequence == 5

    wire.run(work)


def test_drop_during_link_opening_leaves_it_reopenable(wire):
    async def work():
        first = await wire.peer(1)
        listener = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        silent = Identity.generate(b"s" * 32)
        record = PeerRecord.create(
            silent, run_id=wire.RUN, addresses=(f"127.0.0.1:{port}",), sequence=1, issued=int(time.time())
        )
        first.transport.learn(record)
        target = type("Silent", (), {"id": silent.peer_id})
        sends = [asyncio.create_task(first.ping(target)), asyncio.create_task(first.chunk(target, b"x"))]
        welcome = asyncio.create_task(
            first.transport.meet(Contact(f"127.0.0.1:{port}", silent.transport_public), first.hello)
        )
        await asyncio.sleep(0.05)
        first.transport.drop(silent.peer_id, "changed my mind")
        assert await asyncio.gather(*sends) == [False, False]
        await asyncio.sleep(0.05)
        await first.transport.close()
        assert (await welcome).code == "unreachable"
        listener.close()

    wire.run(work)


@pytest.mark.parametrize("seed", range(2))
def test_every_pair_can_be_linked_again_after_random_faults(wire, seed):
    """Sends, drops, dials and restarts in random order; then all pairs agree on one link each."""

    async def work():
        rng = random.Random(seed)
        limits = wire.short(young=0.2, handshake=5.0)
        peers = [await wire.peer(number, limits=limits) for number in range(1, 5)]
        sequence = 1
        drains = []

        async def drain(peer):
            with contextlib.suppress(RuntimeError):
                while True:
                    await peer.transport.recv()

        def introduce():
            for peer in peers:
                for other in peers:
                    if other is not peer:
                        peer.transport.learn(other.record)

        async def live(place, restarts):
            nonlocal sequence
            for _ in range(250):
                peer = peers[place]
                other = rng.choice([other for other in peers if other is not peer])
                chance = rng.random()
                if chance < 0.6:
                    await peer.ping(other)
                elif chance < 0.93:
                    await peer.chunk(other, bytes(rng.randrange(100_000)))
                elif chance < 0.96:
                    peer.transport.drop(other.id, "chance")
                    peer.transport.learn(other.record)
                elif chance < 0.97:
                    await peer.meet(other)
                elif chance < 0.98 and restarts:
                    await peer.transport.close()
                    sequence += 1
                    peers[place] = await wire.peer(place + 1, limits=limits, sequence=sequence)
                    drains.append(asyncio.create_task(drain(peers[place])))
                    introduce()
                else:
                    await asyncio.sleep(rng.random() * 0.01)

        drains += [asyncio.create_task(drain(peer)) for peer in peers]
        introduce()
        await asyncio.gather(*(live(place, first) for place in range(4) for first in (True, False)))
        assert sequence > 1
        for one, other in itertools.permutations(peers, 2):
            introduce()
            async with asyncio.timeout(20):
                while not await one.ping(other):
                    await asyncio.sleep(0.02)
        for peer in peers:
            await peer.check_connections()
        for one, other in itertools.combinations(peers, 2):
            links = one.link(other), other.link(one)
            assert links[0].session == links[1].session and links[0].dialled != links[1].dialled
        for peer in peers:
            await peer.transport.close()
        await asyncio.gather(*drains)

    wire.run(work)


def test_transport_without_descriptors_refuses_and_recovers(wire):
    """A transport that cannot open another descriptor refuses, and recovers when some are free."""

    async def work():
        first, second, late = await wire.peer(1), await wire.peer(2), await wire.peer(3)
        assert isinstance(await first.meet(second), Welcome)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = max(int(name) for name in os.listdir("/proc/self/fd"))
        filled = []
        try:
            # Free lower numbers would be spare too, and depend on chance.
            while not filled or filled[-1] < used:
                filled.append(os.open(os.devnull, os.O_RDONLY))
            for spare in range(16):
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(filled[-1], used) + 1 + spare, hard))
                with contextlib.suppress(OSError):
                    await late.meet(second)
                assert await first.ping(second, spare) and await second.ping(first, spare)
                while (await second.recv()).peer != first.id:
                    pass
                while (await first.recv()).peer != second.id:
                    pass
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in filled:
                os.close(descriptor)
        async with asyncio.timeout(15):
            while not isinstance(await late.meet(second), Welcome):
                await asyncio.sleep(0.05)

    wire.run(work)
