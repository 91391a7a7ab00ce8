"""Bulk streams whose records are sealed and opened in threads that run late, or in another order."""

import asyncio
import os
import tempfile
from pathlib import Path

import pytest
import uvloop
from kit.real.late_executor import LateExecutor
from thinwire.collectives.blocking_work import WORTH
from thinwire.collectives.transport.zeromq.streams.stream import UNOPENED

SIZE = 4 * WORTH
LOOPS = pytest.mark.parametrize("loop", [uvloop.run, asyncio.run])


@pytest.fixture(params=["tcp", "shared memory"])
def options(request):
    """Return options of transports: for links over TCP, or through shared memory."""
    with tempfile.TemporaryDirectory(prefix="tw") as made:
        yield {} if request.param == "tcp" else {"shared": Path(made) / "shared"}


async def pumped(executors, work):
    """Return the result of `work`, while waiting functions run in random order."""
    task = asyncio.ensure_future(work)
    while not task.done():
        for executor in executors:
            if executor.waiting:
                executor.run()
        await asyncio.sleep(0)
    return task.result()


async def late_pair(wire, eventually, **options):
    """Return two linked peers with all streams, and their executors."""
    executors = LateExecutor(1), LateExecutor(2)
    first = await wire.peer(1, workers=executors[0], **options)
    second = await wire.peer(2, workers=executors[1], **options)
    assert isinstance(await first.meet(second), wire.Welcome)
    await wire.settled(first, second)
    count = 1 if options.get("shared") else 2
    await eventually(lambda: all(len(one.streams(other)) >= count for one, other in ((first, second), (second, first))))
    return first, second, executors


@LOOPS
def test_frames_of_all_sizes_arrive_whole(wire, eventually, loop, options):
    async def work():
        first, second, executors = await late_pair(wire, eventually, **options)
        sent = [os.urandom(size) for size in (SIZE, 1, 0, SIZE, WORTH, WORTH - 1, 70_000) * 3]

        async def send(one, other):
            for index, payload in enumerate(sent):
                assert await one.chunk(other, payload, index)

        both = asyncio.gather(
            *(send(one, other) for one, other in ((first, second), (second, first))),
            *(peer.bulk(len(sent)) for peer in (first, second)),
        )
        for frames in (await pumped(executors, both))[2:]:
            order = [frame.message.index for frame in frames]
            assert order == list(range(len(sent))) if options else sorted(order) == list(range(len(sent)))
            assert {frame.message.index: bytes(frame.payload) for frame in frames} == dict(enumerate(sent))

    wire.run(work, loop=loop)


def test_payload_may_change_once_send_returns(wire, eventually, options):
    async def work():
        first, second, executors = await late_pair(wire, eventually, **options)
        payload = bytearray(b"a" * SIZE)
        sending = asyncio.ensure_future(first.chunk(second, payload))
        await eventually(lambda: executors[0].waiting)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not sending.done()
        executors[0].run()
        assert await sending
        payload[:] = b"b" * SIZE
        (frame,) = await pumped(executors, second.bulk(1))
        assert frame.payload == b"a" * SIZE

    wire.run(work)


def test_stream_with_many_records_to_open_is_not_read(wire, eventually):
    async def work():
        first, second, executors = await late_pair(wire, eventually)
        count = 80
        sending = [asyncio.ensure_future(first.chunk(second, bytes(SIZE), index)) for index in range(count)]
        executors[0].eager = True
        executors[0].run_all()
        streams = second.streams(first).values()
        await eventually(lambda: sum(stream.down for stream in streams) > UNOPENED)
        before = -1
        while before != (before := sum(stream.down for stream in streams)):
            await asyncio.sleep(0.1)  # everything has stopped
        assert before <= len(streams) * (UNOPENED + 2 * SIZE + 1000) < count * SIZE
        found = await pumped(executors[1:], second.bulk(count))
        assert sorted(frame.message.index for frame in found) == list(range(count))
        assert all(await asyncio.gather(*sending))

    wire.run(work)


def test_link_that_closes_with_work_in_threads_frees_everything_after_it(wire, eventually, options):
    async def work():
        first, second, executors = await late_pair(wire, eventually, **options)
        await pumped(executors, asyncio.gather(first.chunk(second, bytes(SIZE)), second.bulk(1)))
        before = len(os.listdir("/proc/self/fd"))
        sending = asyncio.ensure_future(first.chunk(second, bytes(SIZE)))
        await eventually(lambda: executors[0].waiting)
        streams = list(first.streams(second).values())
        first.transport.drop(second.id, "over")
        await eventually(lambda: all(stream.state == "closed" for stream in streams))
        assert not sending.done()  # a thread may still read the payload
        executors[0].run_all()
        assert not await sending
        await eventually(lambda: len(os.listdir("/proc/self/fd")) < before)

        async def loss():
            while (arrival := await second.recv()).frame is not None:
                pass
            return arrival.reason

        assert (await pumped(executors, loss())).endswith("over")

    wire.run(work)


def test_frames_that_came_before_the_end_of_a_stream_count(wire, eventually):
    async def work():
        first, second, executors = await late_pair(wire, eventually)
        await pumped(executors[:1], first.chunk(second, b"x" * SIZE))
        await eventually(lambda: executors[1].waiting)
        for stream in first.streams(second).values():
            stream.fail("a test")
        assert [bytes(frame.payload) for frame in await pumped(executors[1:], second.bulk(1))] == [b"x" * SIZE]

    wire.run(work)


@LOOPS
def test_lost_stream_whose_records_are_being_opened_can_be_measured_and_takes_no_frame(wire, eventually, loop, options):
    """The connection is closed then, and uvloop raises ValueError for what one asks its socket."""

    async def work():
        first, second, executors = await late_pair(wire, eventually, **options)
        count = 6
        payload = b"x" * SIZE
        await pumped(executors[:1], asyncio.gather(*(first.chunk(second, payload, index) for index in range(count))))
        streams = list(second.streams(first).values())
        sending = asyncio.gather(*(second.chunk(first, payload, index) for index in range(4)))
        await eventually(lambda: len(executors[1].waiting) >= (2 if options else 4))  # each stream seals and opens
        first.reset_streams(second)
        await eventually(lambda: any(stream.state == "lost" for stream in streams))
        assert not any(stream.state == "closed" for stream in streams)
        while executors[1].waiting:
            second.transport.totals()
            executors[1].run()
            for _ in range(3):
                await asyncio.sleep(0)
            assert not any(stream.writer.idle for stream in streams)
        found = []

        async def rest():
            while len(found) < count:
                arrival = await second.recv()
                assert arrival.frame is not None, arrival.reason
                if arrival.frame.digest:
                    found.append(arrival.frame.message.index)

        await pumped(executors, asyncio.wait_for(rest(), 20))
        await pumped(executors, asyncio.wait_for(sending, 20))

    wire.run(work, loop=loop)
