"""Emulated network with real sockets: a proxy with bandwidth and delay before every port (level L1).

Every host has an access link: an uplink and a downlink, each shared by all its connections. A byte waits for its
sender's uplink, then for the path between the two hosts (`toxics.py`), then for the receiver's downlink. The path is
emulated, TCP is not: there is no slow start; a connection has at most a window of bytes in transit, as with TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from thinwire.sims.network.toxics import Toxics

PIECE = 16 << 10
"""Bytes that a connection puts on a link before the next connection has its turn."""

BURST = 0.004
"""Seconds that a link may lag behind its rate and make up for, because timers are no more exact."""

WINDOW = 4 << 20
"""Bytes of one direction of a connection between its two ends."""

Accepted: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]
"""Handler of a new connection."""

FindDialler: TypeAlias = Callable[[tuple[str, int]], int | None]
"""Function that returns the host that dials from a socket address; None: unknown, and refused."""


class ProxyPipe:
    """One direction of an access link: `rate` bytes per second for all connections together, in turns."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.carried = 0
        """Bytes since the start."""
        self._free = 0.0

    async def carry(self, size: int) -> None:
        """Return when `size` bytes have passed."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._free = max(self._free, now - BURST) + size / self.rate
        self.carried += size
        if self._free > now:
            await asyncio.sleep(self._free - now)


class ProxyAccessLink:
    """Access link of a host, `up` and `down` in bytes per second."""

    def __init__(self, up: float, down: float) -> None:
        self.up, self.down = ProxyPipe(up), ProxyPipe(down)


class _LimitReached(Exception):
    """A connection has carried as many bytes as its toxics permit."""


class Connection:
    """Connection from `dialler` to `target`, joined from two real ones."""

    def __init__(self, proxy: Proxy, dialler: int, target: int) -> None:
        self.dialler, self.target = dialler, target
        self._proxy = proxy
        self._ends: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._carrying: asyncio.Task[None] | None = None
        self._leaving: list[asyncio.Task[None]] = []
        self._survivor: int | None = None
        self._linger = 0.0
        self._late: float | None = None

    async def run(self, near: tuple[asyncio.StreamReader, asyncio.StreamWriter], host: str, port: int) -> None:
        """Run from the dialler's connection to us until both ends are closed."""
        proxy = self._proxy
        self._ends[self.dialler] = near
        there, back = proxy.path(self.dialler, self.target), proxy.path(self.target, self.dialler)
        try:
            # The handshake of TCP takes a round trip, which a cut delays.
            await there.passable()
            await back.passable()
            await asyncio.sleep(there.latency + back.latency)
            self._ends[self.target] = await asyncio.open_connection(host, port)
            self._carrying = asyncio.get_running_loop().create_task(self._both(there, back))
            await asyncio.wait((self._carrying,))
            if self._survivor is not None:
                await self._outlive(self._survivor)
            elif not self._carrying.cancelled() and self._carrying.exception() is None:
                for _, writer in self._ends.values():
                    writer.close()
        except OSError:
            pass  # The target does not listen.
        finally:
            if self._carrying is not None:
                self._carrying.cancel()
                await asyncio.gather(self._carrying, return_exceptions=True)
            for _, writer in self._ends.values():
                if not writer.is_closing():
                    _reset(writer)

    def reset(self) -> None:
        """Reset both ends at once."""
        if self._carrying is not None:
            self._carrying.cancel()
        for _, writer in self._ends.values():
            _reset(writer)

    def half_open(self, survivor: int, seconds: float) -> None:
        """Reset the other end; `survivor` learns of it after `seconds`, and gets no answers until then."""
        self._survivor, self._linger = survivor, seconds
        if self._carrying is not None:
            self._carrying.cancel()

    def slow_close(self, seconds: float) -> None:
        """Accept no more data; data in transit takes `seconds` longer, then both ends are closed."""
        self._late = seconds
        for task in self._leaving:
            task.cancel()

    async def _outlive(self, survivor: int) -> None:
        for host, end in self._ends.items():
            if host != survivor:
                _reset(end[1])
        reader, writer = self._ends[survivor]
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(self._linger):
                while await reader.read(PIECE):
                    pass
        _reset(writer)

    async def _both(self, there: Toxics, back: Toxics) -> None:
        hosts = self._proxy.hosts
        near, far = hosts[self.dialler], hosts[self.target]
        (near_reader, near_writer), (far_reader, far_writer) = self._ends[self.dialler], self._ends[self.target]
        with contextlib.suppress(ExceptionGroup):  # One end is broken or at its limit: close the other one, too.
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry(near_reader, far_writer, near.up, far.down, there))
                both.create_task(self._carry(far_reader, near_writer, far.up, near.down, back))
            return
        self.reset()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: ProxyPipe, down: ProxyPipe, path: Toxics
    ) -> None:
        """Carry one direction of a connection until its sender closes it."""
        loop, rng = asyncio.get_running_loop(), self._proxy.rng
        in_flight: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        room = asyncio.Semaphore(WINDOW // PIECE)

        async def leave() -> None:
            own, due, data = ProxyPipe(1.0), 0.0, b"?"
            while data:
                try:
                    data = await reader.read(PIECE)
                    await room.acquire()
                    await up.carry(len(data))
                    if path.bandwidth is not None:
                        own.rate = path.bandwidth
                        await own.carry(len(data))
                except asyncio.CancelledError:
                    if self._late is None:
                        raise
                    data = b""
                # A stream keeps its order, however late one piece is.
                due = max(due, loop.time() + path.delay(len(data), rng))
                in_flight.put_nowait((due, data))

        async def arrive() -> None:
            arrived = 0
            while True:
                due, data = await in_flight.get()
                due += self._late or 0.0
                if due > loop.time():
                    await asyncio.sleep(due - loop.time())
                await path.passable()
                if not data:
                    writer.write_eof()
                    return
                await down.carry(len(data))
                for piece in path.pieces(data, rng):
                    writer.write(piece)
                    await writer.drain()
                    if path.slice:
                        await asyncio.sleep(path.gap)
                arrived += len(data)
                if path.limit is not None and arrived >= path.limit:
                    raise _LimitReached
                room.release()

        async with asyncio.TaskGroup() as ends:
            self._leaving.append(ends.create_task(leave()))
            ends.create_task(arrive())


class Proxy:
    """Network between hosts 0…n-1. `reach` opens the path to a host; `delay`: seconds in one direction.

    `buffer`: approximate bytes that the kernel accepts for a connection before its link has passed them; 0: the
    kernel's default. To a sender these bytes look delivered, so a small buffer is more realistic if senders measure
    their links.
    """

    def __init__(self, hosts: Sequence[ProxyAccessLink], delay: float = 0.0, seed: int = 0, buffer: int = 0) -> None:
        self.hosts, self.rng, self._buffer = hosts, random.Random(seed), buffer
        self._paths = {(i, j): Toxics(latency=delay) for i in range(len(hosts)) for j in range(len(hosts))}
        self._servers: list[asyncio.Server] = []
        self._connections: dict[asyncio.Task[None], Connection] = {}

    def path(self, i: int, j: int) -> Toxics:
        """Return the toxics of the path from host i to host j."""
        return self._paths[i, j]

    def between(self, i: int, j: int) -> list[Connection]:
        """Return the connections between two hosts, whichever dialled."""
        return [one for one in self._connections.values() if {one.dialler, one.target} == {i, j}]

    async def reach(self, dialler: int | FindDialler, target: int, at: str, real: str, ports: Iterable[int]) -> None:
        """Connect each dialler of `at` on one of `ports` to `target`, which listens at `real`, same port.

        `dialler`: the dialling host, or a function that finds it. Raises OSError if an address is taken.
        """
        for port in ports:

            def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = port) -> None:
                source = dialler if isinstance(dialler, int) else dialler(writer.get_extra_info("peername"))
                if source is None:
                    _reset(writer)
                    return
                connection = Connection(self, source, target)
                task = asyncio.get_running_loop().create_task(connection.run((reader, writer), real, port))
                self._connections[task] = connection
                task.add_done_callback(self._connections.pop)

            self._servers.append(await self._serve(accepted, at, port))

    async def _serve(self, accepted: Accepted, at: str, port: int) -> asyncio.Server:
        if not self._buffer:
            return await asyncio.start_server(accepted, at, port)
        listener = socket.create_server((at, port))
        listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer
        )  # Accepted sockets inherit the buffer size.
        return await asyncio.start_server(accepted, sock=listener, limit=PIECE)

    async def close(self) -> None:
        """Close all paths."""
        for server in self._servers:
            server.close()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Reset a connection, so that the other side does not take it for a regular close."""
    if writer.transport.is_closing():
        return
    raw = writer.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
