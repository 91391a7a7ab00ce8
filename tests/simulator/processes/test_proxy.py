"""The emulating proxy: links in virtual time, connections with real sockets. No result depends on real time."""

import asyncio

import pytest
from thinwire.sims.engine import virtual_loop
from thinwire.sims.processes.proxy import BURST, PIECE, Proxy, ProxyAccessLink, ProxyPipe


def test_proxy_link_keeps_its_rate_for_any_number_of_connections():
    async def main():
        loop, wire, done = virtual_loop.current(), ProxyPipe(1e6), []

        async def connection(pieces):
            for _ in range(pieces):
                await wire.carry(10_000)
            done.append(loop.time())

        await asyncio.gather(connection(10), connection(10), connection(20))
        assert loop.time() == pytest.approx(0.4, abs=BURST + 1e-9)
        # In turn: connections with half as much are through when three times theirs was carried.
        assert done[0] == pytest.approx(0.3, abs=0.02) and wire.carried == 400_000
        await asyncio.sleep(5)
        began = loop.time()
        await wire.carry(100_000)
        # Unused time is not made up for later.
        assert loop.time() - began == pytest.approx(0.1, abs=BURST + 1e-9)

    virtual_loop.run(main(), seed=1)


def test_proxy_delivers_bytes_in_order_and_passes_on_eof():
    async def main():
        heard = []

        async def serve(reader, writer):
            heard.append(await reader.read())  # up to the dialler's end
            writer.write(heard[-1][::-1])
            writer.close()

        data = bytes(range(256)) * 1000
        hosts = [ProxyAccessLink(50e6, 50e6), ProxyAccessLink(50e6, 50e6)]
        emulation = Proxy(hosts, 0.001)
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            await emulation.reach(0, 1, "127.1.1.2", "127.0.0.1", [port])
            reader, writer = await asyncio.open_connection("127.1.1.2", port)
            writer.write(data)
            writer.write_eof()
            assert await reader.read() == data[::-1]
            writer.close()
        assert heard == [data] and len(data) > PIECE
        carried = (hosts[0].up, hosts[1].down, hosts[1].up, hosts[0].down)
        assert [wire.carried for wire in carried] == [len(data)] * 4
        # No process listens there any more: the connection of the dialler ends.
        reader, writer = await asyncio.open_connection("127.1.1.2", port)
        with pytest.raises(ConnectionError):
            writer.write(b"hello")
            while True:
                assert await reader.read() == b""
                writer.write(b"hello")
                await writer.drain()
        await emulation.close()
        assert not emulation.between(0, 1)

    async def limited():
        async with asyncio.timeout(30):
            await main()

    asyncio.run(limited())
