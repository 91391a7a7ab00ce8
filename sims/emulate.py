"""Real sockets over an imitated internet: a proxy in front of every peer's ports, with bandwidth and delay (level L1).

Every host has an access link: an uplink and a downlink, each shared by all its connections. A byte waits for its sender's
uplink, then for the delay between the two hosts, then for the receiver's downlink. What is imitated is the path, not TCP:
no loss, no slow start; a connection has at most a window of bytes under way, as TCP would.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias

PIECE = 16 << 10
"""Bytes that a connection puts on a link before the next connection has its turn."""

BURST = 0.004
"""Seconds that a link may lag behind its rate and make up for: timers are no more exact than that."""

WINDOW = 4 << 20
"""Bytes of one direction of a connection between its two ends."""


_Join: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class Wire:
    """One direction of an access link: `rate` bytes per second for all connections together, in turns."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.carried = 0
        """Bytes since the start."""
        self._free = 0.0

    async def carry(self, size: int) -> None:
        """Return when `size` bytes have gone through."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._free = max(self._free, now - BURST) + size / self.rate
        self.carried += size
        if self._free > now:
            await asyncio.sleep(self._free - now)


class Access:
    """A host's link to the world, `up` and `down` in bytes per second."""

    def __init__(self, up: float, down: float) -> None:
        self.up, self.down = Wire(up), Wire(down)


class Emulation:
    """The world between hosts 0…n-1. `reach` opens the ways from one host to another; `delay` is one-way seconds."""

    def __init__(self, hosts: Sequence[Access], delay: float) -> None:
        self.hosts, self._delay = hosts, delay
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def reach(self, dialler: int, target: int, at: str, real: str, ports: Sequence[int]) -> None:
        """Whoever connects to `at` on one of `ports` is `dialler` and gets `target`, who listens at `real` on that port."""
        for port in ports:
            join = functools.partial(self._join, self.hosts[dialler], self.hosts[target], real, port)

            def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, join: _Join = join) -> None:
                task = asyncio.get_running_loop().create_task(join(reader, writer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

            self._servers.append(await asyncio.start_server(accepted, at, port))

    async def _join(
        self,
        near: Access,
        far: Access,
        host: str,
        port: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        ends = [writer]
        try:
            # The handshake of TCP takes a round trip.
            await asyncio.sleep(2 * self._delay)
            other_reader, other_writer = await asyncio.open_connection(host, port)
            ends.append(other_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry(reader, other_writer, near.up, far.down))
                both.create_task(self._carry(other_reader, writer, far.up, near.down))
            for end in ends:
                end.close()
        except (OSError, ExceptionGroup):
            # One end is broken, or was never there: so is the other.
            pass
        finally:
            for end in ends:
                if not end.is_closing():
                    end.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: Wire, down: Wire) -> None:
        """One direction of a connection, until its sender has no more to say."""
        loop = asyncio.get_running_loop()
        flying: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        room = asyncio.Semaphore(WINDOW // PIECE)

        async def leave() -> None:
            while True:
                data = await reader.read(PIECE)
                await room.acquire()
                await up.carry(len(data))
                flying.put_nowait((loop.time() + self._delay, data))
                if not data:
                    return

        async def arrive() -> None:
            while True:
                due, data = await flying.get()
                if due > loop.time():
                    await asyncio.sleep(due - loop.time())
                if not data:
                    writer.write_eof()
                    return
                await down.carry(len(data))
                writer.write(data)
                await writer.drain()
                room.release()

        async with asyncio.TaskGroup() as ends:
            ends.create_task(leave())
            ends.create_task(arrive())

    async def close(self) -> None:
        """Close all ways."""
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
