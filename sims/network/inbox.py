"""Received frames of a simulated peer that its `recv` has not returned yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping

from thinwire.collectives.transport.frame_limit import FrameLimit, FrameLimits
from thinwire.collectives.transport.interface import Arrival
from thinwire.sims.network.link import Fabric, Pipe
from thinwire.swarm.messages.registry import Message, PeerId

FRAMES = FrameLimits()


class Inbox:
    """Arrivals of one peer, control before bulk. Those of frames take room in the pipe of their link.

    As with real sockets, a link over which too many small frames arrive (`FrameLimit`) is not read for a while.
    """

    def __init__(self, net: Fabric) -> None:
        self._net = net
        self._control: deque[tuple[Arrival, Pipe | None, int]] = deque()
        self._bulk: deque[tuple[Arrival, Pipe | None, int]] = deque()
        """Arrivals with the pipe that they take room in, and their bytes."""
        self._frame_limit = FrameLimit(FRAMES)
        self._unread: dict[PeerId, list[tuple[Arrival, Pipe, int]]] = {}
        """Arrivals of each peer whose link is not read for a while."""
        self._mail: asyncio.Future[None] | None = None

    @property
    def pauses(self) -> Mapping[PeerId, int]:
        """Number of times that the link of each peer was not read for a while."""
        return dict(self._frame_limit.pauses)

    def sent(self, peer: PeerId, message: Message) -> None:
        """Note a message to a peer, and allow it the frames that follow from that."""
        self._frame_limit.sent(peer, message)

    def accept(self, arrival: Arrival, pipe: Pipe, size: int) -> None:
        """Take a frame of `size` bytes that has arrived through a pipe."""
        peer = arrival.peer
        if peer in self._unread:
            self._unread[peer].append((arrival, pipe, size))
            return
        now = self._net.loop.now
        if not self._frame_limit.admits(peer, now, payload=size if pipe.bulk else 0):
            self._frame_limit.pauses[peer] += 1
            self._unread[peer] = []
            self._net.at(now + FRAMES.pause, self._read_on, peer)
        (self._bulk if pipe.bulk else self._control).append((arrival, pipe, size))
        self.wake()

    def _read_on(self, peer: PeerId) -> None:
        for entry in self._unread.pop(peer, ()):
            self.accept(*entry)

    def put(self, arrival: Arrival) -> None:
        """Add an arrival that takes no room, such as the loss of a link; `wake` makes `recv` return it."""
        self._control.append((arrival, None, 0))

    def take(self) -> Arrival | None:
        """Remove and return the next arrival, None if there is none. Its room in the pipe is free again."""
        queue = self._control or self._bulk
        if not queue:
            return None
        arrival, pipe, size = queue.popleft()
        if pipe is not None:
            pipe.release(size)
        return arrival

    async def wait(self) -> None:
        """Wait for an arrival, or for `wake`."""
        self._mail = self._net.loop.create_future()
        await self._mail

    def wake(self) -> None:
        """Wake up the waiting `recv`."""
        if (mail := self._mail) is not None and not mail.done():
            mail.set_result(None)

    def forget(self, peer: PeerId) -> None:
        """Drop what has been read from a peer."""
        for queue in (self._control, self._bulk):
            kept = [entry for entry in queue if entry[0].peer != peer]
            queue.clear()
            queue.extend(kept)

    def forget_unread(self, peer: PeerId) -> None:
        """Drop what a link has brought that is not read for a while, because the link is lost."""
        self._unread.pop(peer, None)

    def clear(self) -> None:
        """Drop what has been read: the process has ended."""
        self._control.clear()
        self._bulk.clear()
