"""Links of peers of one machine: bulk data through shared memory."""

import asyncio
import ctypes
import fcntl
import mmap
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread

import blake3
import numpy as np
import pytest
from thinwire.collectives.rounds.data_planes.contributions import Contributions
from thinwire.collectives.topology.shards import Grid
from thinwire.collectives.transport.shared_memory import local_sockets
from thinwire.collectives.transport.shared_memory.local_sockets import SharedLimits
from thinwire.collectives.transport.shared_memory.places import DELAY, MOST_OFFSETS
from thinwire.collectives.transport.shared_memory.region import ADD_SEALS, PAGE, SHRINK, RegionReader, SharedRegion
from thinwire.collectives.transport.zeromq.streams.record_crypto import SHARED, record_size
from thinwire.collectives.transport.zeromq.streams.shared_memory_stream import IN_PLACE, OFFSET, PLACE
from thinwire.collectives.transport.zeromq.streams.stream import UNOPENED
from thinwire.compression.dense.floats import Fp32
from thinwire.swarm.frame import Frame, encode
from thinwire.swarm.messages.registry import Chunk

SIZE = SharedLimits().region()


@pytest.fixture
def folder():
    """Return a folder that is short enough for the path of a socket; that of `tmp_path` may not be."""
    with tempfile.TemporaryDirectory(prefix="tw") as made:
        yield Path(made) / "shared"


async def joined(first, second):
    """Return when bulk data may go both ways."""
    async with asyncio.timeout(20):
        ends = (first, second), (second, first)
        while not all(other.id in one.links and one.streams(other) for one, other in ends):
            await asyncio.sleep(0.001)


async def settled(wire, first, second):
    """Return when bulk data may go both ways, and a stream that the test pauses stays paused.

    The link resumes its streams when round messages move to the express stream.
    """
    await joined(first, second)
    await wire.settled(first, second)


async def reason_of_loss(peer):
    """Return why a peer's only link ended."""
    async with asyncio.timeout(10):
        while (arrival := await peer.recv()).frame is not None:
            pass
    return arrival.reason


def test_link_inside_one_machine_moves_bulk_data_through_shared_memory(wire, folder):
    async def work():
        first, second = await wire.pair(shared=folder)
        await joined(first, second)
        assert first.transport.shares(second.id) and second.transport.shares(first.id)
        before = first.transport.totals()[0]
        sent = [os.urandom(size) for size in (1 << 20, 1, 0, 1 << 20, 70_000) * 8]
        for one, other in ((first, second), (second, first)):
            task = asyncio.create_task(other.bulk(len(sent)))
            for index, payload in enumerate(sent):
                assert await one.chunk(other, payload, index)
            found = await task
            assert [bytes(frame.payload) for frame in found] == sent
            assert [frame.message.index for frame in found] == list(range(len(sent)))
        total = sum(map(len, sent))
        assert first.transport.totals()[0] - before < 100_000
        assert total < first.transport.inside()[0] < total + 100_000
        assert total < second.transport.inside()[1] < total + 100_000
        assert first.transport.by_peer()[second.id][0] > total
        taken, arrived = first.transport.delivered(second.id)
        assert taken == arrived > total, "what is in the memory of the peer's machine has arrived"

    wire.run(work)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("place", [(-1 % 2**64, 1), (SIZE, 1), (0, 2**32 - 1), (SIZE, 1 << 20), (2**63, 5)])
def test_place_outside_of_the_region_ends_the_link(wire, folder, place, paused):
    async def work():
        first, second = await wire.pair(shared=folder)
        await joined(first, second)
        second.streams(first)[SHARED].pause(paused)
        first.post_shared(second, encode(Frame(Chunk(1, 0, 1, 0), b"x"), None, wire.RUN), PLACE.pack(*place))
        reason = await reason_of_loss(second)
        assert "shared memory" in reason or "over the limits" in reason

    wire.run(work)


@pytest.mark.parametrize("offset", [0, PAGE, 5, 2**64 - 1])
def test_report_of_a_payload_that_was_not_sent_ends_the_link(wire, folder, offset):
    async def work():
        first, second = await wire.pair(shared=folder)
        await joined(first, second)
        first.post_shared(second, OFFSET.pack(offset), b"")
        assert f"no payload to release at {offset}" in await reason_of_loss(second)

    wire.run(work)


@pytest.mark.parametrize("head", [b"", b"1234567", bytes(8 * 65)])
def test_report_with_the_wrong_length_ends_the_link(wire, folder, head):
    async def work():
        first, second = await wire.pair(shared=folder)
        await joined(first, second)
        first.post_shared(second, head, b"")
        assert f"record of {len(head)} + 0 bytes is over the limits" in await reason_of_loss(second)

    wire.run(work)


def test_folder_that_others_may_enter_or_that_is_a_link_falls_back_to_tcp(wire, folder):
    folder.mkdir()
    open_to_all, link = folder / "open", folder / "link"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    (folder / "own").mkdir(0o700)
    link.symlink_to(folder / "own")

    async def work():
        for seed, shared in ((1, open_to_all), (3, link)):
            first, second = await wire.peer(seed, shared=shared), await wire.peer(seed + 1, shared=shared)
            assert isinstance(await first.meet(second), wire.Welcome)
            await joined(first, second)
            assert str(shared) in first.transport.no_sharing()
            assert not first.transport.shares(second.id)
            assert await first.chunk(second, b"payload")
            assert [bytes(frame.payload) for frame in await second.bulk(1)] == [b"payload"]

    wire.run(work)


def test_peer_with_a_limited_uplink_shares_no_memory(wire, folder):
    async def work():
        first, second = await wire.peer(1, shared=folder, up=10**9), await wire.peer(2, shared=folder)
        assert isinstance(await first.meet(second), wire.Welcome)
        await joined(first, second)
        assert not first.transport.shares(second.id) and not second.transport.shares(first.id)
        assert "uplink" in first.transport.no_sharing() and second.transport.no_sharing() == ""

    wire.run(work)


def test_many_empty_payloads_do_not_fill_the_region(wire, folder):
    async def work():
        first, second = await wire.pair(shared=folder)
        await joined(first, second)
        task = asyncio.create_task(second.bulk(2500))
        async with asyncio.timeout(20):
            for index in range(2500):
                assert await first.chunk(second, b"", index)
            assert [frame.message.index for frame in await task] == list(range(2500))

    wire.run(work)


def small(wire, in_place, copied=4 << 20):
    """Return limits with small regions."""
    return wire.short(handshake=5.0, shared=SharedLimits(in_place=in_place, copied=copied))


@pytest.mark.parametrize("in_place", [0, 4 << 20])
def test_peer_that_takes_no_data_can_send_more_than_a_region(wire, folder, in_place):
    async def work():
        first, second = await wire.pair(shared=folder, limits=small(wire, in_place))
        await settled(wire, first, second)
        stream = first.streams(second)[SHARED]
        stream.pause(True)
        for index in range(3):
            assert await second.chunk(first, bytes(1000), index)
        task = asyncio.create_task(second.bulk(24))
        async with asyncio.timeout(20):
            for index in range(24):
                assert await first.chunk(second, bytes(1 << 20), index)
            await task
            stream.pause(False)
            assert [frame.message.index for frame in await first.bulk(3)] == [0, 1, 2]

    wire.run(work)


@pytest.mark.parametrize("ends", [False, True])
def test_payloads_that_have_waited_do_not_hold_the_event_loop(wire, folder, eventually, ends):
    """About 4 MiB are hashed in one turn, and what came before the end of the stream counts."""
    count, most = 20, UNOPENED + (1 << 20)

    async def work():
        first, second = await wire.pair(shared=folder)
        await settled(wire, first, second)
        stream = second.streams(first)[SHARED]
        stream.pause(True)
        before = stream.down
        for index in range(count):
            assert await first.chunk(second, bytes([index]) * (1 << 20), index)
        head = encode(Frame(Chunk(1, 0, 1, 0), bytes(1 << 20)), None, wire.RUN)
        await eventually(lambda: stream.down - before == count * record_size(len(head), PLACE.size))
        turns, before = [], stream.down
        stream.pause(False)
        if ends:
            stream.connection_lost(None)
        while sum(turns) < count << 20:
            turns.append(stream.down - before)
            before = stream.down
            await asyncio.sleep(0)
        assert max(turns) <= most
        assert [frame.message.index for frame in await second.bulk(count)] == list(range(count))

    wire.run(work)


def test_payload_at_the_place_of_another_one_ends_the_link(wire, folder):
    async def work():
        first, second = await wire.pair(shared=folder)
        await settled(wire, first, second)
        second.streams(first)[SHARED].pause(True)
        for index in range(2):
            head = encode(Frame(Chunk(1, 0, 1, index), b"x"), None, wire.RUN)
            first.post_shared(second, head, PLACE.pack(PAGE, 1))
        assert f"a payload at {PAGE} of the shared memory, where another one is" in await reason_of_loss(second)

    wire.run(work)


def test_payloads_of_more_bytes_than_the_region_end_the_link(wire, folder):
    """Records with places that overlap must not fill the receiver's memory."""

    async def work():
        first, second = await wire.pair(shared=folder)
        await settled(wire, first, second)
        second.streams(first)[SHARED].pause(True)
        for index in range((SIZE >> 20) + 1):
            head = encode(Frame(Chunk(1, 0, 1, index), b"x"), None, wire.RUN)
            first.post_shared(second, head, PLACE.pack(index * PAGE, 1 << 20))
        assert "bytes of shared memory" in await reason_of_loss(second)

    wire.run(work)


@pytest.mark.parametrize("threads", [False, True])
def test_payloads_that_the_receiver_holds_stay_as_they_are(wire, folder, threads):
    """The sender uses a place again only after the last reader, and is never stuck because of what is held."""
    sizes = (1 << 20, 70_000, 1, 1 << 20, 0, PAGE) * 8

    async def work(workers):
        first, second = await wire.pair(shared=folder, limits=small(wire, 6 << 20), workers=workers)
        await joined(first, second)
        held, sent = [], []
        async with asyncio.timeout(30):
            for _ in range(3):
                sent.append([os.urandom(size) for size in sizes])
                task = asyncio.create_task(second.bulk(len(sizes)))
                for index, payload in enumerate(sent[-1]):
                    assert await first.chunk(second, payload, index)
                held.append(await task)
        found = [bytes(frame.payload) for frames in held for frame in frames]
        assert found == [payload for payloads in sent for payload in payloads]
        assert all(frame.digest == blake3.blake3(frame.payload).digest() for frames in held for frame in frames)

    with ThreadPoolExecutor(2) as pool:
        wire.run(lambda: work(pool if threads else None))


def test_memory_of_payloads_is_used_again_after_the_last_reader_wherever_that_ends(wire, folder, eventually):
    async def work():
        asyncio.get_running_loop().set_debug(True)  # so it refuses calls from other threads that do not wake it
        first, second = await wire.pair(shared=folder)
        await joined(first, second)
        region = first.streams(second)[SHARED].writer.region
        for index in range(3):
            assert await first.chunk(second, bytes([index]) * (1 << 20), index)
        frames = await second.bulk(3)
        part = memoryview(frames[1].payload)[5:7]
        whole = np.frombuffer(frames[2].payload, np.uint8)
        del frames
        await eventually(lambda: region.used == 2 << 20)
        assert await first.chunk(second, b"x" * (1 << 20), 3)
        (frame,) = await second.bulk(1)
        assert bytes(part) == b"\1\1" and whole[0] == whole[-1] == 2
        last = [part, frame]
        del frame, part
        await asyncio.to_thread(last.clear)
        await eventually(lambda: region.used == 1 << 20)
        last = [whole]
        del whole
        thread = Thread(target=last.clear)
        thread.start()
        thread.join()
        await eventually(lambda: region.used == 0)

    wire.run(work)


@pytest.mark.parametrize("count", [1, 2 * MOST_OFFSETS + 1])
def test_all_places_are_reported_however_many_become_free_at_once(wire, folder, eventually, count):
    async def work():
        first, second = await wire.pair(shared=folder)
        await joined(first, second)
        region = first.streams(second)[SHARED].writer.region
        for _ in range(2):
            for index in range(count):
                assert await first.chunk(second, bytes(IN_PLACE), index)
            frames = await second.bulk(count)
            assert region.used == count * IN_PLACE
            frames.clear()
            await eventually(lambda: region.used == 0)

    wire.run(work)


def test_payload_is_reported_as_free_after_it_was_copied(wire, folder, eventually, monkeypatch):
    copy, begun, may_copy = RegionReader.read, Event(), Event()

    def slow(reader, offset, into):
        if into.nbytes > 1:
            begun.set()
            may_copy.wait(30)
        copy(reader, offset, into)

    monkeypatch.setattr(RegionReader, "read", slow)

    async def work(workers):
        limits = wire.short(handshake=5.0, shared=SharedLimits(in_place=0))
        first, second = await wire.pair(shared=folder, limits=limits, workers=workers)
        await joined(first, second)
        region, payload = first.streams(second)[SHARED].writer.region, os.urandom(1 << 20)
        for index in range(3):
            assert await first.chunk(second, payload, index)
        await eventually(begun.is_set)
        await asyncio.sleep(2 * DELAY)
        assert await second.chunk(first, b"x") and await first.bulk(1)  # a report would have come before it
        assert region.used == 3 << 20
        may_copy.set()
        assert [bytes(frame.payload) for frame in await second.bulk(3)] == [payload] * 3
        await eventually(lambda: region.used == 0)

    with ThreadPoolExecutor(4) as pool:
        wire.run(lambda: work(pool))


def test_only_large_payloads_before_the_last_bytes_of_a_region_stay_there(wire, folder, eventually):
    """The second payload is too small, and the last one is partly in the last bytes."""
    large = 1 << 20
    sizes = IN_PLACE, IN_PLACE - 1, large, large, large, large
    stay = True, False, True, True, True, False

    async def work():
        first, second = await wire.pair(shared=folder, limits=small(wire, 4 << 20))
        await joined(first, second)
        region = first.streams(second)[SHARED].writer.region
        frames, used = [], 0
        for index, size in enumerate(sizes):
            assert await first.chunk(second, bytes([index]) * size, index)
            frames += await second.bulk(1)
            used += size * stay[index]
            await eventually(lambda used=used: region.used == used)
        assert [bytes(frame.payload) for frame in frames] == [bytes([index]) * size for index, size in enumerate(sizes)]

    wire.run(work)


def test_payloads_of_a_process_in_another_container_are_copied(wire, folder, eventually, monkeypatch):
    monkeypatch.setattr(local_sockets, "same_system", lambda sock: False)

    async def work():
        first, second = await wire.pair(shared=folder)
        await joined(first, second)
        region = first.streams(second)[SHARED].writer.region
        for index in range(3):
            assert await first.chunk(second, bytes([index]) * (1 << 20), index)
        frames = await second.bulk(3)
        await eventually(lambda: region.used == 0)
        assert [bytes(frame.payload) for frame in frames] == [bytes([index]) * (1 << 20) for index in range(3)]

    wire.run(work)


def test_process_in_another_namespace_is_no_part_of_our_system():
    def other(*command):
        ours, theirs = socket.socketpair()  # the credentials of a pair are those of the process that made it
        assert local_sockets.same_system(ours)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("")
        listener.listen()
        name = listener.getsockname().decode("latin-1")
        code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({name!r}.encode('latin-1')); input()"
        process = subprocess.Popen([*command, sys.executable, "-c", code], stdin=subprocess.PIPE)
        listener.settimeout(10)
        try:
            return local_sockets.same_system(listener.accept()[0])
        finally:
            process.communicate(b"\n")
            for one in (ours, theirs, listener):
                one.close()

    assert other()
    apart = ["unshare", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make namespaces")
    assert not other(*apart)


def test_payload_stays_as_it_is_after_its_link_has_ended(wire, folder, eventually):
    async def work():
        first, second = await wire.pair(shared=folder)
        await joined(first, second)
        assert await first.chunk(second, b"a" * (1 << 20))
        (frame,) = await second.bulk(1)
        first.transport.drop(second.id, "the test")
        await reason_of_loss(second)
        first.transport.learn(second.record)
        second.transport.learn(first.record)
        assert await first.chunk(second, b"b" * (1 << 20))
        assert bytes((await second.bulk(1))[0].payload) == b"b" * (1 << 20)
        assert bytes(frame.payload) == b"a" * (1 << 20)

    wire.run(work)


@pytest.mark.parametrize("in_place", [0, 4 << 20])
def test_payload_that_is_overwritten_before_it_is_read_is_refused(wire, folder, monkeypatch, in_place):
    """The hash is that of the bytes that the receiver uses, so it differs from the announced one."""
    fill = SharedRegion.fill

    def damaged(region, start, payload):
        fill(region, start, payload)
        fill(region, start + 100, b"garbage")

    async def work():
        first, second = await wire.pair(shared=folder, limits=small(wire, in_place))
        await joined(first, second)
        payload = np.arange(1 << 18, dtype=np.float32).view(np.uint8).data
        announced = blake3.blake3(payload).digest()
        held = Contributions(Fp32(), Grid(1 << 18, 1 << 18), {})
        for damage, reason in ((fill, ""), (damaged, "hash")):
            monkeypatch.setattr(SharedRegion, "fill", damage)
            assert await first.chunk(second, payload)
            (frame,) = await second.bulk(1)
            key = first.id, len(reason)
            assert held.take(key, 0, frame.payload, found=frame.hashed(), announced=announced) == reason
            assert held.has(key, 0) is not bool(reason)

    wire.run(work)


def test_peers_that_offer_regions_of_other_sizes_use_tcp(wire, folder):
    async def work():
        first, second = await wire.peer(1, shared=folder), await wire.peer(2, shared=folder, limits=small(wire, 0))
        assert isinstance(await first.meet(second), wire.Welcome)
        await joined(first, second)
        assert not first.transport.shares(second.id)
        assert await first.chunk(second, b"payload") and await second.chunk(first, b"payload")

    wire.run(work)


def test_process_of_another_user_shares_no_memory(wire, folder, monkeypatch):
    monkeypatch.setattr(local_sockets, "same_user", lambda sock: False)

    async def work():
        first, second = await wire.pair(shared=folder)
        await joined(first, second)
        assert not first.transport.shares(second.id) and await first.chunk(second, b"payload")

    wire.run(work)


def test_links_that_end_while_they_open_leave_no_region(wire, folder):
    async def work():
        first, second = await wire.peer(1, shared=folder), await wire.peer(2, shared=folder)
        places = [peer.sockets.local_sockets for peer in (first, second)]
        for turns in range(24):
            await first.meet(second)
            for _ in range(turns % 12):
                await asyncio.sleep(0)
            first.transport.drop(second.id, "the test")
        async with asyncio.timeout(10):
            while any(place.regions for place in places):
                await asyncio.sleep(0.01)

    wire.run(work)


def test_reader_that_takes_nothing_ends_the_link(wire, folder):
    async def work():
        first = await wire.peer(1, shared=folder, limits=wire.short(handshake=5.0, stall=0.3))
        second = await wire.peer(2, shared=folder)
        assert isinstance(await first.meet(second), wire.Welcome)
        await settled(wire, first, second)
        assert first.transport.shares(second.id)
        second.streams(first)[SHARED].pause(True)
        sent = 0
        async with asyncio.timeout(10):
            while await first.chunk(second, bytes(1 << 20), sent):
                sent += 1
        assert sent == (SIZE >> 20) - 1  # The region has room for one more, but not for the largest payload.
        assert "takes no data" in await reason_of_loss(first)

    wire.run(work)


def test_links_beyond_the_limit_use_tcp(wire, folder):
    async def work():
        few = wire.short(handshake=5.0, shared=SharedLimits(links=1))
        hub = await wire.peer(1, shared=folder, limits=few)
        others = [await wire.peer(seed, shared=folder) for seed in (2, 3)]
        for other in others:
            assert isinstance(await other.meet(hub), wire.Welcome)
            await joined(hub, other)
            assert await hub.chunk(other, b"payload")
            assert [bytes(frame.payload) for frame in await other.bulk(1)] == [b"payload"]
        assert [hub.transport.shares(other.id) for other in others] == [True, False]
        hub.transport.drop(others[0].id, "the test")
        async with asyncio.timeout(10):
            while hub.sockets.local_sockets.regions:
                await asyncio.sleep(0.01)

    wire.run(work)


def test_later_links_have_smaller_regions(wire, folder):
    limits = SharedLimits()
    sizes = [limits.region(links) for links in range(limits.links)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 72 << 20 and sizes[-1] == 24 << 20
    assert sum(sizes) < 0.65 * 2**30

    async def work():
        hub = await wire.peer(1, shared=folder)
        others = [await wire.peer(seed, shared=folder) for seed in range(2, 7)]
        for other in others:
            assert isinstance(await other.meet(hub), wire.Welcome)
            await joined(hub, other)
        found = [hub.streams(other)[SHARED].writer.region.size for other in others]
        assert found == sizes[:5]
        for other in others:
            assert await hub.chunk(other, b"payload")
            assert [bytes(frame.payload) for frame in await other.bulk(1)] == [b"payload"]

    wire.run(work)


def test_sockets_of_dead_processes_are_removed(wire, folder):
    folder.mkdir(0o700)
    now = time.time()
    ages = {"dead": 120, "alive": 120, "young": 5}
    made = {name: socket.socket(socket.AF_UNIX) for name in ages}
    for name, one in made.items():
        one.bind(str(folder / name))
        one.listen()
        if name != "alive":
            one.close()
        os.utime(folder / name, (now, now - ages[name]))
    (folder / "file").touch()
    os.utime(folder / "file", (now, now - 120))

    async def work():
        await wire.peer(1, shared=folder)
        assert {"alive", "young", "file"} < {place.name for place in folder.iterdir()}
        assert not (folder / "dead").exists()

    wire.run(work)
    made["alive"].close()


def sealed(size):
    """Return the descriptor of memory that cannot become smaller, and whose owner may do everything else with it."""
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, ADD_SEALS, SHRINK)
    return descriptor


def test_region_refuses_what_is_not_sealed_memory():
    with pytest.raises(ValueError, match="not shared memory"):
        RegionReader(os.open("/dev/zero", os.O_RDONLY), 1 << 20)
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(ValueError, match="not shared memory"):
        RegionReader(unsealed, 1 << 20)
    with pytest.raises(ValueError, match="not shared memory"):
        RegionReader(sealed(2 << 20), 1 << 20)


def test_writer_can_neither_end_the_reader_nor_change_what_it_has_copied():
    descriptor = sealed(2 * PAGE)
    os.pwrite(descriptor, b"a" * 2 * PAGE, 0)
    reader, found = RegionReader(os.dup(descriptor), 2 * PAGE), bytearray(2 * PAGE)
    reader.read(0, memoryview(found))
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, PAGE)
    keep_size, punch_hole = 1, 2
    libc = ctypes.CDLL(None, use_errno=True)
    offsets = ctypes.c_longlong(PAGE), ctypes.c_longlong(PAGE)
    assert libc.fallocate64(descriptor, keep_size | punch_hole, *offsets) == 0, os.strerror(ctypes.get_errno())
    os.pwrite(descriptor, b"b" * PAGE, 0)
    assert found == b"a" * 2 * PAGE
    reader.read(0, memoryview(found))
    assert found == b"b" * PAGE + bytes(PAGE)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        reader.read(PAGE, memoryview(bytearray(PAGE + 1)))
    os.close(descriptor)
    reader.close()


def test_region_puts_payloads_into_the_first_gap_and_joins_gaps():
    region = SharedRegion(6 * PAGE)
    assert [region.reserve(size) for size in (1, PAGE, PAGE + 1, 2 * PAGE)] == [0, PAGE, 2 * PAGE, 4 * PAGE]
    assert region.used == region.size and not region.fits(1)
    with pytest.raises(ValueError, match="no room"):
        region.reserve(0)
    region.release([2 * PAGE, 0])
    assert region.fits(2 * PAGE) and not region.fits(2 * PAGE + 1)
    assert region.reserve(2 * PAGE) == 2 * PAGE and region.reserve(5) == 0
    region.release([0])
    region.release([2 * PAGE])
    assert not region.fits(2 * PAGE + 1)
    region.release([PAGE])
    assert region.fits(4 * PAGE) and not region.fits(4 * PAGE + 1) and region.used == 2 * PAGE
    for wrong in (PAGE, 4 * PAGE + 1):
        with pytest.raises(ValueError, match=f"no payload to release at {wrong} "):
            region.release([wrong])
    region.release([4 * PAGE])
    assert region.used == 0 and region.reserve(6 * PAGE) == 0
    region.close()


def occupied(descriptor):
    """Return the bytes of memory that a region occupies."""
    return os.fstat(descriptor).st_blocks * 512


def test_region_returns_the_memory_of_its_gaps_and_leaves_payloads():
    region = SharedRegion(64 * PAGE)
    descriptor = os.dup(region.descriptor)
    reader = RegionReader(os.dup(descriptor), region.size)
    first, second = (region.reserve(32 * PAGE) for _ in range(2))
    for start, letter in ((first, b"a"), (second, b"b")):
        region.fill(start, letter * 32 * PAGE)
    assert occupied(descriptor) >= region.size
    view = reader.view(second, 32 * PAGE, lambda offset: None)
    region.release([first])
    region.free_gaps()
    assert view == b"b" * 32 * PAGE
    region.fill(region.reserve(PAGE), b"c" * PAGE)
    assert reader.view(first, PAGE, lambda offset: None) == b"c" * PAGE
    region.release([first, second])
    region.free_gaps()
    assert occupied(descriptor) == 0
    os.close(descriptor)
    reader.close()
    region.close()


def test_reader_of_a_region_cannot_map_it_for_writing():
    region = SharedRegion(PAGE)
    with pytest.raises(PermissionError):
        mmap.mmap(region.descriptor, PAGE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(region.descriptor, b"x", 0)
    region.close()


def test_transport_at_rest_occupies_no_shared_memory_without_payloads(wire, folder, monkeypatch):
    made = []

    class Noted(SharedRegion):
        def __init__(self, size):
            super().__init__(size)
            made.append(os.dup(self.descriptor))

    monkeypatch.setattr(local_sockets, "SharedRegion", Noted)

    async def work():
        first, second = await wire.pair(shared=folder)
        await joined(first, second)
        task = asyncio.create_task(second.bulk(4))
        for index in range(4):
            assert await first.chunk(second, bytes([index]) * (1 << 20), index)
        frames = await task
        assert sum(map(occupied, made)) >= 4 << 20
        del frames, task
        async with asyncio.timeout(20):
            while sum(map(occupied, made)):  # until the receiver has reported that it uses the payloads no more
                first.transport.rest()
                await asyncio.sleep(0.001)

    wire.run(work)
    for descriptor in made:
        os.close(descriptor)


def test_view_of_a_region_outlives_it_and_reports_its_end_once():
    region, gone = SharedRegion(4 * PAGE), []
    reader = RegionReader(os.dup(region.descriptor), 4 * PAGE)
    region.fill(region.reserve(3), b"abc")
    view = reader.view(0, 3, gone.append)
    assert view.readonly
    with pytest.raises(ValueError, match="bytes of shared memory"):
        reader.view(PAGE, 3 * PAGE + 1, gone.append)
    reader.close()
    region.close()
    part = view[1:]
    del view
    assert bytes(part) == b"bc" and gone == []
    del part
    assert gone == [0]
