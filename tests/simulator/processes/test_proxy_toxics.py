"""Faults of proxied connections on real sockets. Only minimum delays are asserted, no maximum."""

import asyncio
import contextlib
import random
import time

import pytest
from thinwire.sims.network.toxics import LEAST_STALL, Toxics
from thinwire.sims.processes.proxy import PIECE, Proxy, ProxyAccessLink

AT = "127.1.9.2"
HELLO = bytes(range(256)) * 300


def played(scene):
    """Run scene(world, dial): host 0 dials host 1, which returns all bytes until the end, then closes."""

    async def limited():
        async with asyncio.timeout(60):
            world = Proxy([ProxyAccessLink(1e9, 1e9), ProxyAccessLink(1e9, 1e9)], 0.001, seed=5)
            heard = asyncio.Queue()

            async def serve(reader, writer):
                told = asyncio.Queue()
                heard.put_nowait((told, writer))
                try:
                    while data := await reader.read(PIECE):
                        told.put_nowait(data)
                    told.put_nowait(b"")
                except ConnectionError as error:
                    told.put_nowait(error)

            async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
                port = server.sockets[0].getsockname()[1]
                await world.reach(0, 1, AT, "127.0.0.1", [port])

                async def dial():
                    reader, writer = await asyncio.open_connection(AT, port)
                    writer.write(b"!")
                    told, answer = await heard.get()
                    assert await told.get() == b"!"
                    return reader, writer, told, answer

                try:
                    await scene(world, dial)
                finally:
                    await world.close()
                    assert not world.between(0, 1)
                    while not heard.empty():
                        heard.get_nowait()[1].close()

    asyncio.run(limited())


async def whole(told, size):
    data = b""
    while len(data) < size:
        data += await told.get()
    return data


def test_held_connection_passes_nothing_until_released():
    async def scene(world, dial):
        reader, writer, told, answer = await dial()
        world.path(0, 1).hold()
        world.path(0, 1).hold()
        writer.write(HELLO)
        # The other direction is open: when its bytes have come, ours have had their time too.
        answer.write(b"x" * 100_000)
        await reader.readexactly(100_000)
        assert told.empty()
        world.path(0, 1).release()
        answer.write(b"y")
        assert await reader.readexactly(1) == b"y" and told.empty()
        world.path(0, 1).release()
        assert await whole(told, len(HELLO)) == HELLO
        writer.close()

    played(scene)


def test_latency_toxic_delays_at_least_as_asked():
    async def scene(world, dial):
        reader, writer, told, answer = await dial()
        world.path(0, 1).latency = 0.15
        world.path(1, 0).latency = 0.1
        began = time.perf_counter()
        writer.write(b"ping")
        assert await told.get() == b"ping"
        assert time.perf_counter() - began >= 0.15
        answer.write(b"pong")
        assert await reader.readexactly(4) == b"pong" and time.perf_counter() - began >= 0.25
        writer.close()

    played(scene)


def test_bandwidth_toxic_limits_one_connection():
    async def scene(world, dial):
        _, writer, told, _ = await dial()
        world.path(0, 1).bandwidth = 400_000
        began = time.perf_counter()
        writer.write(HELLO)
        assert await whole(told, len(HELLO)) == HELLO
        assert time.perf_counter() - began >= 0.15  # 77 kB at 400 kB/s, less the burst
        writer.close()

    played(scene)


def test_reset_reaches_both_ends():
    async def scene(world, dial):
        reader, writer, told, _ = await dial()
        (connection,) = world.between(1, 0)
        connection.reset()
        with pytest.raises(ConnectionError):
            await reader.read(1)
        assert isinstance(await told.get(), ConnectionError)
        writer.close()

    played(scene)


def test_half_open_ends_one_side_at_once_and_the_other_late():
    async def scene(world, dial):
        reader, writer, told, answer = await dial()
        (connection,) = world.between(0, 1)
        connection.half_open(1, 0.3)
        with pytest.raises(ConnectionError):
            await reader.read(1)
        began = time.perf_counter()
        answer.write(b"is anybody there?")
        await answer.drain()
        assert told.empty()
        assert isinstance(await told.get(), ConnectionError)
        assert time.perf_counter() - began >= 0.1

    played(scene)


def test_slow_close_delivers_bytes_in_flight_and_ends():
    async def scene(world, dial):
        reader, writer, told, _ = await dial()
        world.path(0, 1).hold()
        writer.write(HELLO)
        await writer.drain()
        while world.hosts[0].up.carried < len(HELLO) + 1:
            await asyncio.sleep(0.01)
        (connection,) = world.between(0, 1)
        connection.slow_close(0.1)
        world.path(0, 1).release()
        assert await whole(told, len(HELLO)) == HELLO and await told.get() == b""
        assert await reader.read() == b""
        writer.close()

    played(scene)


def test_limit_data_toxic_ends_connection():
    async def scene(world, dial):
        reader, writer, told, _ = await dial()
        world.path(0, 1).limit = PIECE
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                writer.write(HELLO)
                await writer.drain()
        with pytest.raises(ConnectionError):
            await reader.readexactly(1)
        got = 0
        while isinstance(data := await told.get(), bytes):
            got += len(data)
        # At the latest with the piece that reached the limit, which is not the end of the sent bytes.
        assert got <= 2 * PIECE

    played(scene)


@pytest.mark.parametrize("spoil", ["", "corrupt", "duplicate", "reorder"])
def test_slicer_and_corruption_toxics_change_the_stream(spoil):
    async def scene(world, dial):
        _, writer, told, _ = await dial()
        path = world.path(0, 1)
        path.slice, path.gap, path.spoil = 3, 0.001, spoil
        writer.write(b"ABCDEFGH")
        got = await whole(told, 16 if spoil == "duplicate" else 8)
        if spoil == "corrupt":
            assert sum((a ^ b).bit_count() for a, b in zip(got, b"ABCDEFGH", strict=True)) == 1
        else:
            assert got == {"": b"ABCDEFGH", "duplicate": b"ABCDEFGHABCDEFGH", "reorder": b"EFGHABCD"}[spoil]
        writer.close()

    played(scene)


def test_proxy_asks_who_dials_and_drops_unknown_diallers():
    async def main():
        world = Proxy([ProxyAccessLink(1e9, 1e9)] * 3, 0.0)
        asked = []

        def who(address):
            asked.append(address)
            return None if len(asked) > 1 else 2

        async def serve(reader, writer):
            writer.write(b"hello")
            await reader.read()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            await world.reach(who, 1, AT, "127.0.0.1", [port])
            reader, writer = await asyncio.open_connection(AT, port)
            assert await reader.readexactly(5) == b"hello" and len(world.between(1, 2)) == 1
            assert asked == [writer.get_extra_info("sockname")]
            other, _ = await asyncio.open_connection(AT, port)
            with pytest.raises(ConnectionError):
                await other.read(1)
            writer.close()
            await world.close()

    asyncio.run(main())


def test_loss_toxic_stalls_and_jitter_only_adds_delay():
    rng, path = random.Random(1), Toxics(latency=0.05, jitter=0.01, loss=0.02)
    delays = [path.delay(PIECE, rng) for _ in range(4000)]
    stalled = [delay for delay in delays if delay >= 0.05 + LEAST_STALL]
    # A piece has 12 packets: 1 - 0.98^12.
    assert 0.18 < len(stalled) / len(delays) < 0.25
    calm = [delay for delay in delays if delay < 0.05 + LEAST_STALL]
    assert min(calm) >= 0.05 and 0.058 < sum(calm) / len(calm) < 0.062
    assert Toxics(latency=0.05).delay(PIECE, rng) == 0.05
