"""Unix sockets by which peers of one user on one machine find each other and exchange memory.

A peer listens in a private folder under a name that follows from its run, its id and its port for bulk streams. A process
that opens this socket belongs to the same user on the same machine: the folder has mode 0700, and the kernel names the user of
the other process. Each stream then proves with the secret of its link that it comes from the right peer.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import blake3
from thinwire.collectives.transport.shared_memory.region import PAGE, RegionReader, SharedRegion
from thinwire.swarm.messages.registry import PeerId

LOGGER = logging.getLogger(__name__)
AnyProtocol = TypeVar("AnyProtocol", bound=asyncio.BaseProtocol)

GREETING = b"\2"
"""First byte each way, with the descriptor of the sender's region. Another byte means another layout."""

CREDENTIALS = struct.Struct("3i")
"""struct ucred of unix(7): process, user and group."""

NAMESPACES = "mnt", "pid", "user"
"""Namespaces (namespaces(7)) that processes share unless one of them is in a container."""

AGAIN = 1.0
"""Seconds without accepting connections after the process ran out of descriptors."""

STALE = 60.0
"""Seconds after which a socket that refuses connections is that of a dead process."""


@dataclass(frozen=True, slots=True)
class SharedLimits:
    """Limits of shared memory.

    A region has `in_place` bytes for payloads that the receiver uses where they are, and after them `copied` bytes for
    payloads that it copies out at once. `links`: links with regions of ours. `patience`: seconds to greet.
    """

    in_place: int = 64 << 20
    copied: int = 8 << 20
    links: int = 16
    patience: float = 1.0

    def region(self, links: int = 0) -> int:
        """Return the bytes of a new region besides those of `links` others.

        The more peers average, the less each link carries. So later regions are smaller: 16 have 0.65 GiB in all.
        """
        return self.in_place // (1 + links // 4) // PAGE * PAGE + self.copied


class LocalConnection:
    """Connection to a peer on this machine: regions to write and to read, `socket` for everything else."""

    def __init__(
        self, sock: socket.socket, region: SharedRegion, reader: RegionReader, over: Callable[[LocalConnection], None]
    ) -> None:
        self.trusted = same_system(sock)
        """True if the other side could change our memory by other means, too."""
        self.socket, self.region, self.reader, self._over = sock, region, reader, over
        self._closed = False

    async def connect(self, factory: Callable[[], AnyProtocol], *, accepted: bool = False) -> AnyProtocol:
        """Return the protocol that reads and writes the socket from now on.

        `accepted`: whether the other side dialled.
        """
        loop = asyncio.get_running_loop()
        try:
            if accepted:
                _, protocol = await loop.connect_accepted_socket(factory, self.socket)
            else:
                _, protocol = await loop.create_unix_connection(factory, sock=self.socket)
        except BaseException:
            # uvloop does not tell the protocol of a connection that was cancelled.
            self.end()
            raise
        return protocol

    def close(self) -> None:
        """Free both regions; the socket has another owner."""
        if not self._closed:
            self._closed = True
            self.region.close()
            self.reader.close()
            self._over(self)

    def end(self) -> None:
        """End the connection, and free both regions."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.close()


def usual_folder() -> Path | None:
    """Return the folder of this user in the machine's shared memory, None if the system has none."""
    shared = Path("/dev/shm")
    known = hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED") and shared.is_dir()
    return shared / f"thinwire-{os.geteuid()}" if known else None


def socket_name(run_id: bytes, peer: PeerId, port: int) -> str:
    """Return the name of the socket of a peer that takes bulk streams at `port`."""
    return blake3.blake3(b"".join((run_id, peer, port.to_bytes(4, "big")))).hexdigest()[:32]


class LocalSockets:
    """The sockets of one peer.

    `folder`: where they are, with mode 0700; None: this peer shares no memory. `wall`: unix time in seconds.
    """

    def __init__(self, folder: Path | None, limits: SharedLimits, wall: Callable[[], int]) -> None:
        self._folder, self._limits, self._wall = folder, limits, wall
        self.obstacle = "switched off, or not supported by this system" if folder is None else ""
        """Why no memory is shared; "" if it is."""
        self._listener: socket.socket | None = None
        self._place: Path | None = None
        self.regions = 0
        """Our regions: those of connections, and of dials in progress."""
        self._connections: set[LocalConnection] = set()
        self._again: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    def listen(self, name: str, accepted: Callable[[LocalConnection], asyncio.BaseProtocol]) -> None:
        """Listen under a name; `accepted` makes the protocol of each connection.

        Without a private folder, set `obstacle` instead.
        """
        if self._folder is None:
            return
        try:
            _make_private(self._folder)
            _sweep(self._folder, self._wall())
            self._listener = listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            # Renamed when it listens: from then on, a socket that refuses is stale.
            hidden = self._folder / secrets.token_hex(8)
            listener.bind(str(hidden))
            self._place = hidden
            listener.listen(16)
            hidden.rename(self._folder / name)
            self._place = self._folder / name
        except OSError as error:
            self.stop()
            self.obstacle = f"{self._folder}: {error.strerror or error}"
            LOGGER.debug("no memory is shared: %s", self.obstacle)
            return
        self._loop.add_reader(listener.fileno(), self._accept, listener, accepted)

    def _accept(self, listener: socket.socket, accepted: Callable[[LocalConnection], asyncio.BaseProtocol]) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # No descriptors are left, so the connection would be here again at once, and for ever.
            self._loop.remove_reader(listener.fileno())
            self._again = self._loop.call_later(
                AGAIN, self._loop.add_reader, listener.fileno(), self._accept, listener, accepted
            )
            return

        async def handle() -> None:
            connection = await self._exchange(sock, accepted=True)
            if connection is not None:
                with suppress(OSError):
                    await connection.connect(lambda: accepted(connection), accepted=True)

        task = self._loop.create_task(handle())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def dial(self, name: str) -> LocalConnection | None:
        """Return the connection to the peer that listens under a name; None if there is none on this machine."""
        if self._folder is None or self.obstacle:
            return None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect(str(self._folder / name))
        except OSError:
            sock.close()
            return None
        return await self._exchange(sock, accepted=False)

    async def _exchange(self, sock: socket.socket, *, accepted: bool) -> LocalConnection | None:
        """Exchange regions. On any failure close the socket and return None.

        The side that accepted sends its region only after it has checked the other one, so the dialler learns of a refusal
        here, and uses TCP.
        """
        region: SharedRegion | None = None
        reader: RegionReader | None = None
        sock.setblocking(False)
        try:
            if self.regions >= self._limits.links or not same_user(sock):
                raise OSError(errno.EPERM, "not shared")
            region = SharedRegion(self._limits.region(self.regions))
            self.regions += 1
            if not accepted:
                socket.send_fds(sock, [GREETING], [region.descriptor])
            reader = await self._receive(sock)
            if accepted:
                socket.send_fds(sock, [GREETING], [region.descriptor])
            region.hand_over()
        except BaseException as error:
            sock.close()
            if reader is not None:
                reader.close()
            if region is not None:
                region.close()
                self.regions -= 1
            if isinstance(error, (OSError, ValueError)):
                return None
            raise
        connection = LocalConnection(sock, region, reader, self._freed)
        self._connections.add(connection)
        return connection

    async def _receive(self, sock: socket.socket) -> RegionReader:
        """Return the other side's region. Raises ValueError for anything else, TimeoutError if nothing comes."""
        async with asyncio.timeout(self._limits.patience):
            await self._readable(sock)
        data, descriptors, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if data != GREETING or len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ValueError("no region")
        return RegionReader(descriptors[0], self._limits.region())

    def _freed(self, connection: LocalConnection) -> None:
        self._connections.discard(connection)
        self.regions -= 1

    async def _readable(self, sock: socket.socket) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()

        def set_ready() -> None:
            if not ready.done():
                ready.set_result(None)

        self._loop.add_reader(sock.fileno(), set_ready)
        try:
            await ready
        finally:
            self._loop.remove_reader(sock.fileno())

    def free_gaps(self) -> None:
        """Return the memory of our regions that no payload occupies to the system."""
        for connection in self._connections:
            connection.region.free_gaps()

    def close(self) -> None:
        """End the connections that no link has closed."""
        self.stop()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)  # the event loop closes it
            connection.close()

    def stop(self) -> None:
        """Stop listening and remove the socket's file."""
        for task in self._tasks:
            task.cancel()
        if self._again is not None:
            self._again.cancel()
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        if self._place is not None:
            with suppress(OSError):
                self._place.unlink()
            self._place = None


def same_user(sock: socket.socket) -> bool:
    """Return True if the process at the other end has our user."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(found)[1] == os.geteuid())


def same_system(sock: socket.socket) -> bool:
    """Return True if the process at the other end is in our container: it has our files and processes."""
    other = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[0]
    if other <= 0:  # in no namespace of ours
        return False
    try:
        return all(os.path.samefile(f"/proc/{other}/ns/{kind}", f"/proc/self/ns/{kind}") for kind in NAMESPACES)
    except OSError:
        return False


def _make_private(folder: Path) -> None:
    """Make a folder for this user alone.

    Raises PermissionError if it belongs to others, or others may enter it.
    """
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(errno.EPERM, f"must belong to user {os.geteuid()} alone, with mode 0700")


def _sweep(folder: Path, now: int) -> None:
    """Remove the sockets of processes that died."""
    for place in folder.iterdir():
        with suppress(OSError):
            found = place.lstat()
            if not stat.S_ISSOCK(found.st_mode) or now - found.st_mtime < STALE:
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
                if probe.connect_ex(str(place)) == errno.ECONNREFUSED:
                    place.unlink()
