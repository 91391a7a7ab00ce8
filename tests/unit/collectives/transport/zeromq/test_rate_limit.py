"""The rate limit of bulk traffic, in arithmetic and through real sockets."""

from __future__ import annotations

import asyncio

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.transport.rate_limit import RateLimit
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Chunk, StateChunk


@given(st.integers(1, 10**9), st.lists(st.tuples(st.floats(0, 10), st.integers(1, 1 << 20)), min_size=1, max_size=40))
def test_rate_limit_sends_exactly_at_the_rate(rate, records):
    rate_limit, now, sent = RateLimit(rate), 0.0, []
    for pause, nbytes in records:
        now += pause
        sent.append((now + rate_limit.reserve(nbytes, now), nbytes, now))
    for (left, nbytes, _), (catch_up, _, asked) in zip(sent, sent[1:], strict=False):
        # Each waits only for the one before.
        assert catch_up == pytest.approx(max(asked, left + nbytes / rate))


def test_no_rate_limit_means_no_wait():
    rate_limit = RateLimit()
    assert [rate_limit.reserve(1 << 30, 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]


def test_rate_limit_waits_the_computed_time():
    async def main():
        rate_limit, loop = RateLimit(1000), virtual_loop.current()
        await asyncio.gather(*(rate_limit.wait(500) for _ in range(5)))
        assert loop.time() == pytest.approx(2.0)

    virtual_loop.run(main(), seed=1)


RATE, SIZE = 2_000_000, 100_000


@pytest.mark.parametrize("loop", [uvloop.run, asyncio.run])
def test_bulk_over_sockets_stays_within_rate_limit(wire, loop):
    async def work():
        first, second = await wire.pair(up=RATE)
        began, before = asyncio.get_running_loop().time(), first.transport.totals()[0]
        for index in range(6):
            assert await first.transport.send(second.id, Frame(Chunk(1, 0, 1, index), bytes(SIZE)))
        took = asyncio.get_running_loop().time() - began
        for index in range(6):
            assert (await second.recv()).frame.message.index == index
        # All but the first wait for the one before.
        assert took >= 5 * SIZE / RATE
        while first.transport.totals()[0] < before + 6 * SIZE:  # after confirmation by the other side's kernel
            await asyncio.sleep(0.01)
        assert first.transport.totals()[0] < before + 6 * SIZE + 5000

    wire.run(work, loop=loop)


@pytest.mark.parametrize("loop", [uvloop.run, asyncio.run])
def test_rate_limited_frames_wait_in_the_queue_not_in_the_kernel(wire, loop):
    """Otherwise frames are assigned to streams long before they leave, and one stream always ends last."""

    async def work():
        first, second = await wire.pair(up=RATE // 10)
        await wire.settled(first, second)
        assert await first.chunk(second, bytes(10 * SIZE))
        await asyncio.sleep(0)
        assert sum(stream.writer.unsent for stream in first.streams(second).values()) > 7 * SIZE

    wire.run(work, loop=loop)


def test_on_narrow_uplink_state_goes_after_rounds(wire):
    async def work():
        first = await wire.peer(1, up=RATE)
        others = [await wire.peer(seed) for seed in (2, 3)]
        for other in others:
            assert isinstance(await first.meet(other), wire.Welcome)
        handed = []

        class Noted:
            up_limit = first.transport.up_limit

            async def send(self, to, frame):
                taken = await first.transport.send(to, frame)
                handed.append(type(frame.message))
                return taken

            def offer(self, to, frame):
                return False

            def totals(self):
                return first.transport.totals()

            def delivered(self, peer):
                return first.transport.delivered(peer)

        send_queue = SendQueue(Noted())
        for index in range(8):
            send_queue.bulk(others[0].id, Frame(Chunk(1, 0, 1, index), bytes(SIZE)))
        for index in range(2):
            send_queue.bulk(others[1].id, Frame(StateChunk(1, index), bytes(SIZE)), requested=True)
        while len(handed) < 10:
            await asyncio.sleep(0.01)
        assert handed[-1] is StateChunk or handed.index(StateChunk) >= 4
        assert send_queue.bandwidth.end_round()[0] <= RATE, "no burst that the limit lets pass counts as a faster link"
        await send_queue.close()

    wire.run(work)


def test_relayed_bytes_use_the_whole_rate_if_nothing_else_is_sent():
    async def main():
        rate_limit, loop = RateLimit(1000), virtual_loop.current()
        for _ in range(10):
            await rate_limit.wait_behind(100)
        assert loop.time() == pytest.approx(0.9, abs=0.03)

    virtual_loop.run(main(), seed=1)


def test_relayed_bytes_wait_behind_own_ones_but_get_a_share():
    async def main():
        rate_limit, loop, relayed = RateLimit(1000), virtual_loop.current(), []

        async def relay():
            while True:
                await rate_limit.wait_behind(10)
                relayed.append(loop.time())

        await rate_limit.wait(500)
        task = asyncio.create_task(relay())
        for _ in range(20):
            await rate_limit.wait(100)
        task.cancel()
        # 2,400 bytes of our own, and every 80 ms 10 bytes of others between them
        assert loop.time() == pytest.approx(2.4, abs=0.4)
        pauses = [after - before for before, after in zip(relayed, relayed[1:], strict=False)]
        assert len(relayed) > 20 and max(pauses) == pytest.approx(0.08, abs=0.01)

    virtual_loop.run(main(), seed=1)
