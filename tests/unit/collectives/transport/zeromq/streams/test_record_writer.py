"""Writer of the records of a stream, on a pair of sockets whose other side a test reads."""

import asyncio
import socket

import pytest
from kit.real.late_executor import LateExecutor
from thinwire.collectives.blocking_work import WORTH
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.collectives.transport.zeromq.streams.record_crypto import TAG, record_size, stream_keys
from thinwire.collectives.transport.zeromq.streams.record_writer import RecordWriter, WriterSetup
from thinwire.sims.engine import virtual_loop

SECRET, HEAD, SIZE = b"\7" * 32, b"h" * 200, 4 * WORTH


class Transport:
    """Transport whose buffer is sent only when a test asks for it."""

    def __init__(self, sock):
        self._socket, self.buffer = sock, bytearray()

    def get_extra_info(self, name):
        return {"socket": self._socket}[name]

    def get_write_buffer_size(self):
        return len(self.buffer)

    def write(self, data):
        self.buffer += data


class Ends:
    """A writer, the socket that gets its records, and what it has told."""

    def __init__(self, workers=None, stall=60.0):
        here, self.there = socket.socketpair()
        for one in (here, self.there):
            one.setblocking(False)
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        self.flushed, self.errors, self.over = 0, [], 0
        self.transport = Transport(here)
        (sealer, _), (self.opener, _) = stream_keys(SECRET, 0), stream_keys(SECRET, 0)
        pool = BufferPool(1 << 20)
        setup = WriterSetup(self.transport, sealer, pool, workers, stall, self._flush, self.errors.append)
        self.writer = RecordWriter(setup)
        self.writer.take_next()

    def _flush(self):
        self.flushed += 1

    def end(self):
        self.over += 1

    async def received(self, size):
        """Return the next `size` bytes of records that threads have written."""
        found = bytearray()
        while len(found) < size:
            found += await asyncio.get_running_loop().sock_recv(self.there, size - len(found))
        return found

    def opened(self, record):
        """Return head and payload of a record."""
        head = self.opener.open(len(HEAD), memoryview(record))
        return head, bytes(record[record_size(len(HEAD), 0) - TAG : -TAG])

    def close_sockets(self):
        self.transport.get_extra_info("socket").close()
        self.there.close()


@pytest.fixture
def run():
    """Return a function that runs a test's coroutine with the ends that it makes, and closes their sockets."""

    def runs(work, *, loop=asyncio.run, **options):
        async def whole():
            ends = Ends(**options)
            try:
                async with asyncio.timeout(60):
                    await work(ends)
            finally:
                ends.close_sockets()

        loop(whole())

    return runs


def test_record_of_the_event_loop_leaves_before_the_next_one(run):
    async def work(ends):
        ends.writer.write(HEAD, b"payload")
        assert not ends.writer.idle and ends.flushed == 1
        assert ends.writer.unsent == ends.writer.up == record_size(len(HEAD), 7)
        record = bytes(ends.transport.buffer)
        ends.transport.buffer.clear()
        ends.writer.resume()
        assert ends.writer.idle and ends.flushed == 2
        assert ends.opened(bytearray(record)) == (HEAD, b"payload")

    run(work)


def test_record_of_a_thread_is_sent_whole_though_the_kernel_takes_parts(run):
    workers = LateExecutor(1, eager=True)

    async def work(ends):
        payload = bytes(range(256)) * (SIZE // 256)
        await ends.writer.write_in_turn(HEAD, payload)
        assert not ends.writer.idle and 0 < ends.writer.unsent < SIZE  # more than the kernel takes at once
        record = await ends.received(record_size(len(HEAD), SIZE))
        assert ends.opened(record) == (HEAD, payload)
        while not ends.writer.idle:
            await asyncio.sleep(0)
        assert ends.flushed == 2 and not ends.transport.buffer

    run(work, workers=workers)


def test_small_records_wait_behind_a_large_one_and_their_order_is_kept(run):
    async def work(ends):
        ends.writer.write(HEAD, b"first")
        ends.writer.post(HEAD)
        first = record_size(len(HEAD), 5)
        records = bytearray(ends.transport.buffer)
        assert [ends.opened(records[:first])[1], ends.opened(records[first:])[1]] == [b"first", b""]

    run(work)


def test_closed_writer_frees_what_a_thread_uses_only_after_it(run):
    workers = LateExecutor(1)

    async def work(ends):
        sending = asyncio.ensure_future(ends.writer.write_in_turn(HEAD, bytes(SIZE)))
        await asyncio.sleep(0)
        ends.writer.close(ends.end)
        ends.writer.close(ends.end)
        for _ in range(3):
            await asyncio.sleep(0)
        assert ends.writer.busy and not sending.done() and not ends.over
        workers.run_all()
        await sending
        assert not ends.writer.busy and ends.over == 1

    run(work, workers=workers)


def test_closed_writer_takes_and_sends_nothing(run):
    async def work(ends):
        ends.writer.write(HEAD, b"payload")
        ends.writer.close(ends.end)
        before = bytes(ends.transport.buffer)
        ends.writer.post(HEAD)
        ends.writer.resume()
        assert bytes(ends.transport.buffer) == before
        assert ends.over == 1 and ends.flushed == 1 and not ends.writer.idle and not ends.errors
        assert ends.writer.unsent == ends.writer.unconfirmed == 0

    run(work)


def test_other_side_that_takes_nothing_is_an_error_and_a_slow_one_is_none(run):
    async def work(ends):
        ends.writer.write(HEAD, bytes(1000))
        for _ in range(20):  # a byte at a time, for several times as long as it may take none
            await asyncio.sleep(1.0)
            del ends.transport.buffer[0]
        assert not ends.errors
        await asyncio.sleep(10.0)
        assert [str(error) for error in ends.errors] == ["peer takes no data"]

    run(work, stall=5.0, loop=lambda whole: virtual_loop.run(whole, seed=1))
