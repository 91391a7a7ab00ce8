"""The ZeroMQ transport between honest peers."""

import asyncio
import errno
import gc
import hashlib
import os
import random
import socket
import threading
import time

import msgspec
import psutil
import pytest
import uvloop
from kit.wire import Peer, until
from thinwire.collectives.transport.addresses.name_resolver import NameResolver
from thinwire.collectives.transport.zeromq import transport as zmq_transport
from thinwire.collectives.transport.zeromq.sockets.limits import Limits
from thinwire.collectives.transport.zeromq.sockets.listener import PortTaken, listen
from thinwire.collectives.transport.zeromq.streams import record_writer
from thinwire.collectives.transport.zeromq.streams.record_crypto import EXPRESS_KINDS
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import (
    CHUNK_BYTES,
    TYPES,
    Ask,
    Ballot,
    Chunk,
    Circuit,
    CircuitAsk,
    Gossip,
    Hello,
    Ping,
    Refuse,
    ResultRecord,
    Vote,
    Welcome,
)


def _has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


IPV6 = _has_ipv6()


def sample(info):
    """Return a value of a type that msgspec describes."""
    match type(info).__name__:
        case "StructType":
            return info.cls(*(sample(field.type) for field in info.fields))
        case "BytesType":
            return b"\x07" * (info.min_length or (32 if info.max_length == 32 else min(info.max_length or 9, 9)))
        case "StrType":
            return "why"
        case "IntType":
            return info.ge + 1
        case "FloatType":
            return 2.5
        case "BoolType":
            return True
        case "VarTupleType":
            return (sample(info.item_type),)  # a proposal names no peer twice
        case "UnionType":
            return sample(info.types[0])
    raise AssertionError(info)


ELSEWHERE = (Hello, Welcome, Refuse, CircuitAsk, Circuit)
"""Messages of gates, and of the transport itself."""

MESSAGES = [sample(msgspec.inspect.type_info(kind)) for kind in TYPES.values() if kind not in ELSEWHERE]


@pytest.mark.parametrize("loop", [uvloop.run, asyncio.run])
def test_every_message_type_arrives_both_ways(wire, loop):
    assert len(MESSAGES) == len(TYPES) - len(ELSEWHERE)
    rng = random.Random(1)
    frames = []
    for message in MESSAGES:
        limit = type(message).payload
        for size in {0, min(limit, 1), min(limit, 100_001), limit}:
            frames.append(Frame(message, rng.randbytes(size)))

    async def work():
        first, second = await wire.pair()
        for source, sink in ((first, second), (second, first)):
            for frame in frames:
                assert await source.transport.send(sink.id, frame)
                arrival = await sink.recv()
                assert arrival.peer == source.id
                assert arrival.frame.message == frame.message
                assert bytes(arrival.frame.payload) == frame.payload
                assert bool(arrival.frame.signature) == frame.message.signed

    wire.run(work, loop=loop)


def test_welcome_has_the_manifest(wire):
    async def work():
        first, second = await wire.peer(1), await wire.peer(2)
        hello = Hello(first.hello.version, first.run_id, first.record.wire)
        answer = await first.transport.meet(second.contact, hello)
        assert isinstance(answer, Welcome) and answer.manifest == b"the manifest"
        assert second.hellos == [hello]
        # The link is up: the listener can send without an address of the other.
        assert await second.ping(first, 5)
        assert (await first.recv()).frame.message.sequence == 5

    wire.run(work)


def test_two_hundred_megabytes_arrive_intact(wire):
    async def work():
        first, second = await wire.pair()
        block = os.urandom(CHUNK_BYTES + CHUNK_BYTES // 16)
        count = 200

        def payload(index):
            return memoryview(block)[index * 37 : CHUNK_BYTES + index * 11]

        async def feed():
            buffer = bytearray(len(block))
            for index in range(count):
                data = payload(index)
                buffer[: len(data)] = data
                # One buffer for all: it may be reused as soon as send returns.
                assert await first.chunk(second, memoryview(buffer)[: len(data)], index)

        task = asyncio.create_task(feed())
        seen = {}
        for _ in range(count):
            frame = (await second.recv()).frame
            seen[frame.message.index] = hashlib.sha256(frame.payload).digest()
        await task
        assert seen == {index: hashlib.sha256(payload(index)).digest() for index in range(count)}
        traffic = first.transport.stats()[second.id].traffic
        total = sum(len(payload(index)) for index in range(count))
        assert total < traffic.bulk_up < total + count * 256
        assert second.transport.stats()[first.id].traffic.bulk_down == traffic.bulk_up

    wire.run(work)


def test_bytes_that_the_peer_does_not_read_have_not_arrived(wire, eventually):
    async def work():
        first, second = await wire.peer(1), await wire.peer(2)
        assert first.transport.delivered(second.id) == (0, 0)
        first.transport.learn(second.record)
        second.transport.learn(first.record)

        async def feed():
            for index in range(120):
                assert await first.chunk(second, bytes(CHUNK_BYTES), index)

        def waits():
            taken, arrived = first.transport.delivered(second.id)
            return taken > Limits().receive_queue and arrived < taken

        task = asyncio.create_task(feed())
        await eventually(waits)
        assert not task.done(), "the receive queue is full"
        for _ in range(120):
            await second.recv()
        await task
        await eventually(lambda: first.transport.delivered(second.id)[1] == first.transport.delivered(second.id)[0])
        assert first.transport.delivered(second.id)[0] > 120 * CHUNK_BYTES

    wire.run(work)


def test_received_payload_is_not_overwritten_while_referenced(wire):
    async def work():
        first, second = await wire.pair()
        kept = []
        for index in range(60):
            assert await first.chunk(second, bytes([index]) * 200_000, index)
            frame = (await second.recv()).frame
            if index % 3 == 0:
                kept.append((index, frame.payload[1000:1010], frame.payload))
        for index, part, whole in kept:
            assert bytes(part) == bytes([index]) * 10
            assert bytes(whole) == bytes([index]) * 200_000

    wire.run(work)


def test_control_does_not_wait_behind_bulk(wire):
    async def work():
        first, second = await wire.pair()
        for index in range(8):
            assert await first.chunk(second, bytes(CHUNK_BYTES), index)
        assert await first.ping(second, 77)
        lane = second.sockets.receive_queue.bulk
        while lane.held < 8 * CHUNK_BYTES or not second.sockets.receive_queue.control:
            await asyncio.sleep(0.005)
        assert isinstance((await second.recv()).frame.message, Ping)
        assert isinstance((await second.recv()).frame.message, Chunk)

    wire.run(work)


def test_simultaneous_dials_leave_one_link(wire, eventually):
    async def work():
        for attempt in range(8):
            first, second = await wire.peer(10 + 2 * attempt), await wire.peer(11 + 2 * attempt)
            first.transport.learn(second.record)
            second.transport.learn(first.record)
            sends = [first.ping(second, 1), second.ping(first, 2)]
            assert await asyncio.gather(*sends) == [True, True]
            assert (await first.recv()).frame.message.sequence == 2
            assert (await second.recv()).frame.message.sequence == 1
            links = [peer.link(other) for peer, other in ((first, second), (second, first))]
            assert links[0].dialled != links[1].dialled
            assert links[0].session == links[1].session
            # The second link is gone, and both sides can still use the first.
            await eventually(lambda p=first, q=second: not (p.offers or q.offers))
            assert await first.chunk(second, b"x" * 1000) and await second.chunk(first, b"y" * 1000)
            assert bytes((await second.recv()).frame.payload) == b"x" * 1000
            assert bytes((await first.recv()).frame.payload) == b"y" * 1000

    wire.run(work)


def test_simultaneous_meets_both_succeed(wire):
    async def work():
        for attempt in range(4):
            first, second = await wire.peer(30 + 2 * attempt), await wire.peer(31 + 2 * attempt)
            answers = await asyncio.gather(first.meet(second), second.meet(first))
            assert all(isinstance(answer, Welcome) for answer in answers), answers
            assert await first.ping(second) and await second.ping(first)
            links = [peer.link(other) for peer, other in ((first, second), (second, first))]
            assert links[0].session == links[1].session

    wire.run(work)


def test_peer_that_can_only_dial_out_is_linked(wire):
    async def work():
        hidden, public = await wire.peer(1, reachable=False), await wire.peer(2)
        public.transport.learn(hidden.record)
        assert not await public.ping(hidden)
        hidden.transport.learn(public.record)
        assert await hidden.ping(public, 1)
        assert (await public.recv()).frame.message.sequence == 1
        assert await public.ping(hidden, 2) and await public.chunk(hidden, bytes(CHUNK_BYTES))
        kinds = {type((await hidden.recv()).frame.message) for _ in range(2)}
        assert kinds == {Ping, Chunk}

    wire.run(work)


@pytest.mark.skipif(not IPV6, reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize("hosts", [("127.0.0.1", "::1"), ("::1", "127.0.0.1"), ("::1", "::1")])
def test_peers_of_either_address_family_are_linked(wire, hosts):
    async def work():
        first, second = await wire.peer(1, host=hosts[0]), await wire.peer(2, host=hosts[1])
        assert second.record.addresses[0].startswith("[::1]") is (hosts[1] == "::1")
        first.transport.learn(second.record)
        assert await first.ping(second, 1) and (await second.recv()).frame.message.sequence == 1
        assert await second.chunk(first, bytes(CHUNK_BYTES)) and isinstance((await first.recv()).frame.message, Chunk)

    wire.run(work)


def test_send_to_unknown_or_gone_peer_fails(wire):
    async def work():
        first, second = await wire.peer(1), await wire.peer(2)
        assert not await first.ping(second)
        await second.transport.close()
        first.transport.learn(second.record)
        assert not await first.ping(second)
        arrival = await first.recv()
        assert arrival.peer == second.id and arrival.gone
        assert (await first.meet(second)).code == "refused"
        # No storm: until the back-off is over a send fails without a dial.
        assert not await first.ping(second)

    wire.run(work)


def test_goodbye_reports_reason_once_after_earlier_frames(wire):
    async def work():
        first, second = await wire.pair()
        for number in range(20):
            assert await second.ping(first, number)
        await second.transport.close()
        for number in range(20):
            assert (await first.recv()).frame.message.sequence == number
        arrival = await first.recv()
        assert arrival.frame is None and arrival.reason.startswith("closed by the peer") and not arrival.gone
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(first.transport.recv(), 0.1)

    wire.run(work)


def test_dropped_link_opens_again(wire):
    async def work():
        first, second = await wire.pair()
        assert await first.ping(second)
        await second.recv()
        first.transport.drop(second.id, "tired")
        arrival = await second.recv()
        assert arrival.frame is None and "tired" in arrival.reason
        assert not await first.ping(second)
        first.transport.learn(second.record)
        assert await first.ping(second, 3)
        assert (await second.recv()).frame.message.sequence == 3

    wire.run(work)


def test_restarted_peer_replaces_its_old_link(wire):
    async def work():
        limits = wire.short()
        first, second = await wire.pair(limits=limits)
        # The same identity again, while the old link still looks alive from here.
        again = await wire.peer(1, limits=limits, sequence=2)
        assert isinstance(await again.meet(second), Welcome)
        assert "replaced" in (await second.recv()).reason
        assert await second.ping(first, 4)
        assert (await again.recv()).frame.message.sequence == 4
        # If it is another process with the same key, the older one must know at once, or it would fight for the link.
        assert (await first.recv()).frame.message == Gossip((again.record.item,))
        assert "replaced" in (await first.recv()).reason

    wire.run(work)


def test_peer_cannot_meet_its_own_identity(wire):
    async def work():
        first, twin = await wire.peer(1), await wire.peer(1)
        assert (await twin.meet(first)).code == "busy"

    wire.run(work)


@pytest.mark.parametrize(("shift", "reason"), [(-3600, "in the future"), (20 * 86400, "expired")])
def test_peer_with_a_wrong_clock_learns_that_records_are_not_valid_here_and_now(wire, shift, reason):
    """The gate does not know this clock, so it may admit a peer that is behind."""

    async def work():
        first, second = await wire.peer(1), await wire.peer(2, wall=lambda: int(time.time()) + shift)
        refusal = await second.meet(first)
        assert refusal.code == "signature" and reason in refusal.detail

    wire.run(work)


def test_own_addresses_stay_while_descriptors_are_short(wire, monkeypatch):
    async def work():
        peer = await wire.peer(1, host="0.0.0.0")
        before = peer.transport.addresses()
        monkeypatch.setattr(zmq_transport, "own_addresses", lambda host: ("10.7.7.7",))
        moved = peer.transport.addresses()
        assert moved == (f"10.7.7.7:{peer.transport.port}",) != before

        def fail(host):
            raise OSError(errno.EMFILE, "too many open files")

        monkeypatch.setattr(zmq_transport, "own_addresses", fail)
        assert peer.transport.addresses() == moved

    wire.run(work)


def test_taken_port_is_an_error(wire):
    async def work():
        first = await wire.peer(1)
        with pytest.raises(PortTaken) as error:
            await wire.peer(2, port=first.port)
        assert error.value.exit_code == 3 and "port" in error.value.hint
        assert str(error.value).endswith(f"port {first.port}: Address already in use"), "the same with each event loop"

    wire.run(work)


def test_bind_to_foreign_address_is_an_error():
    async def work():
        with pytest.raises(PortTaken) as error:
            await listen(asyncio.Protocol, "192.0.2.1", range(0, 1))
        assert "--host" in error.value.hint

    asyncio.run(work())


@pytest.mark.parametrize("host", ["nonsense..x", "x" * 70 + ".example"])
def test_host_that_is_no_name_is_an_error(wire, host):
    async def work():
        with pytest.raises(PortTaken, match=f"cannot listen on {host}: ") as error:
            await wire.peer(1, host=host)
        assert "--host" in error.value.hint

    wire.run(work)


def test_event_loop_continues_while_the_name_of_our_host_is_looked_up():
    """Of its addresses the first one of IPv4 is bound."""

    async def work():
        asked = threading.Event()

        def look_up(host, port, **_):
            asked.wait(20)
            return [(None, None, None, None, (one, 0)) for one in ("::1", "127.0.0.3", "127.0.0.4")]

        peer = Peer(1, host="here.example")
        peer.sockets.resolver = NameResolver(look_up)
        opening = asyncio.create_task(peer.transport.open())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not opening.done()
        asked.set()
        await opening
        assert peer.transport.addresses() == (f"here.example:{peer.transport.port}",)
        for address, listens in (("127.0.0.3", True), ("127.0.0.4", False)):
            with socket.socket() as visitor:
                assert (visitor.connect_ex((address, peer.transport.port)) == 0) == listens
        await peer.transport.close()

    uvloop.run(work())


def test_member_and_bulk_ports_come_from_the_range(wire):
    async def work():
        ports = range(23_000, 23_400)
        first, second = await wire.peer(1), await wire.peer(2, ports=ports)
        answer = await first.meet(second)
        assert int(answer.endpoint[1:]) in ports and int(answer.bulk[1:]) in ports

    wire.run(work)


def test_link_stats_report_traffic_and_dialler(wire):
    async def work():
        first, second = await wire.pair()
        assert await first.ping(second)
        await second.recv()
        stats = first.transport.stats()[second.id]
        assert stats.linked and stats.dialled and stats.traffic.control_up > 100 and stats.silent >= 0
        assert stats.rtt is None or 0 <= stats.rtt < 10
        assert not second.transport.stats()[first.id].dialled

    wire.run(work)


@pytest.mark.trial
def test_close_leaves_no_task_and_no_descriptor(wire):
    async def work():
        process = psutil.Process()
        open_files = []
        for _ in range(3):
            gc.collect()
            open_files.append(process.num_fds())
            first, second = await wire.pair()
            third = await wire.peer(3)
            third.transport.learn(first.record)
            assert await third.ping(first) and await first.chunk(second, bytes(1000))
            waiting = asyncio.create_task(third.transport.recv())
            await asyncio.sleep(0)
            for peer in (third, first, second):
                await peer.transport.close()
            with pytest.raises(RuntimeError):
                await waiting
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        # The first time, the event loop reserves a descriptor for itself.
        assert open_files[2] == open_files[1] == process.num_fds()

    wire.run(work)


# --- the stream for words of rounds


def test_control_messages_of_rounds_use_a_separate_stream(wire):
    """Bulk and news of members do not."""

    async def work():
        first, second = await wire.pair()
        here, there = await wire.settled(first, second)
        for message in MESSAGES:
            before = here.stream_pool.express.writer.up, there.stream_pool.express.down
            frame = Frame(message, b"x" * min(1, type(message).payload))
            sent = first.transport.offer(second.id, frame)
            assert sent or await first.transport.send(second.id, frame)
            assert (await second.recv()).frame.message == message
            used = (here.stream_pool.express.writer.up, there.stream_pool.express.down) != before
            assert used == (type(message) in EXPRESS_KINDS), message
            assert sent or type(message) not in EXPRESS_KINDS, "a word does not wait"
        assert {Ask, Vote, ResultRecord} < EXPRESS_KINDS and not {Ping, Gossip, Chunk} & EXPRESS_KINDS
        totals = [peer.transport.totals() for peer in (first, second)]
        assert totals[0] == totals[1][::-1], "bytes by that stream are counted"

    wire.run(work)


def test_traffic_of_many_former_peers_becomes_one_sum(wire):
    async def work():
        first = await wire.peer(1, limits=Limits(peers=2))
        for number in range(2, 7):
            other = await wire.peer(number)
            await other.meet(first)
            await other.ping(first)
            await other.transport.close()
            await until(lambda other=other: other.id not in first.links)
        by_peer = first.transport.by_peer()
        assert len(by_peer) == 3 and by_peer[b""][1] > by_peer[other.id][1] > 0
        assert sum(down for _, down in by_peer.values()) == first.transport.totals()[1]

    wire.run(work)


@pytest.mark.parametrize("loop", [uvloop.run, asyncio.run])
def test_control_messages_keep_order_while_their_stream_opens(wire, loop):
    async def work():
        first, second = await wire.pair()
        ends = [peer.link(other) for peer, other in ((first, second), (second, first))]
        said, by_stream = 0, 0
        async with asyncio.timeout(20):
            while by_stream < 50:
                for source, sink in ((first, second), (second, first)):
                    assert await source.transport.send(sink.id, Frame(Ask(said, 0)))
                said, by_stream = said + 1, by_stream + all(end.sends_express for end in ends)
                await asyncio.sleep(0)
        for sink in (first, second):
            assert [(await sink.recv()).frame.message.round for _ in range(said)] == list(range(said))

    wire.run(work, loop=loop)


@pytest.mark.parametrize("loop", [uvloop.run, asyncio.run])
def test_excess_control_messages_wait_in_order(wire, loop, monkeypatch):
    """A reader that does not read holds them back; they wait in order, and arrive."""
    monkeypatch.setattr(record_writer, "BACKLOG", 1 << 12)

    async def work():
        first, second = await wire.pair(limits=wire.short(receive_queue=1 << 16))
        await wire.settled(first, second)
        said, word = 0, bytes(30_000)

        def frame(number):
            return Frame(ResultRecord(number, 0, Ballot(1, bytes(32)), (0,), word))

        while first.transport.offer(second.id, frame(said)):
            said += 1
            await asyncio.sleep(0)
            assert said < 5000
        late = [asyncio.create_task(first.transport.send(second.id, frame(said + at))) for at in range(3)]
        assert [(await second.recv()).frame.message.round for _ in range(said)] == list(range(said))
        assert sorted([(await second.recv()).frame.message.round for _ in range(3)]) == [said, said + 1, said + 2]
        assert all(await asyncio.gather(*late))

    wire.run(work, loop=loop)


def test_waiting_sender_learns_that_the_link_is_gone(wire, monkeypatch):
    monkeypatch.setattr(record_writer, "BACKLOG", -1)

    async def work():
        first, second = await wire.pair()
        await wire.settled(first, second)
        late = asyncio.create_task(first.transport.send(second.id, Frame(Ask(1, 0))))
        await asyncio.sleep(0.05)
        assert not late.done()
        await second.transport.close()
        assert await late is False

    wire.run(work)


def test_last_message_before_close_arrives(wire):
    """The message is in transit when the link is closed in order."""

    async def work():
        first, second = await wire.pair()
        await wire.settled(first, second)
        assert first.transport.offer(second.id, Frame(Ask(7, 0)))
        await first.transport.close()
        assert (await second.recv()).frame.message == Ask(7, 0)
        assert (await second.recv()).frame is None

    wire.run(work)
