"""What is between two simulated peers: packets, in pipes, in a link; and the count of what went through."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinwire.sims.packets import Packet

if TYPE_CHECKING:
    from thinwire.sims.network import SimNet
    from thinwire.sims.transport import SimTransport


CONTROL_WINDOW = 256
"""Control frames in flight per direction before `send` waits."""


@dataclass(slots=True)
class Traffic:
    """Bytes of one peer since the start: control and bulk, sent (when they leave) and received (when they arrive)."""

    control_up: int = 0
    control_down: int = 0
    bulk_up: int = 0
    bulk_down: int = 0


class Gateway:
    """What a site's peers have in common: one uplink and one downlink to all that is not behind the same gateway.

    Between peers behind it only their own links count, beyond it only the gateway's. `bulk` and `control` are the bytes that
    have left through it.
    """

    def __init__(self, net: SimNet, up: float | None, down: float | None) -> None:
        self.uplink, self.downlink = Uplink(net, up), Downlink(net, down)
        self.bulk = self.control = 0


class Pipe:
    """One direction and plane of a link. `used` counts frames accepted by `send` and not yet taken by `recv`; `sent` and
    `taken` number packets as they leave and as they arrive. `pair` are the ids of `source` and `sink`, `latency` is what the
    network says of them (one-way seconds), `rate` the bytes/s that one connection reaches (None: no bound), `limit` the
    frames that `used` may come to. `uplink` and `downlink` are what it goes through, `exit` the gateway on the way
    out of a site (None: there is none).
    """

    __slots__ = (
        "link", "source", "sink", "bulk", "pair", "latency", "rate", "limit", "used", "sent", "taken", "last",
        "queue", "flying", "waiting", "arrived", "waiters", "uplink", "downlink", "exit",
    )  # fmt: skip

    def __init__(self, net: SimNet, link: Link, source: SimTransport, sink: SimTransport, bulk: bool) -> None:
        self.link, self.source, self.sink, self.bulk = link, source, sink, bulk
        self.pair = (source.peer_id, sink.peer_id)
        self.latency = net.latency(*self.pair)
        self.rate = net.stream(*self.pair) if net.stream is not None else None
        self.limit = net.window if bulk else CONTROL_WINDOW
        self.exit, entry = (source.gateway, sink.gateway) if source.gateway is not sink.gateway else (None, None)
        self.uplink = self.exit.uplink if self.exit is not None else source.uplink
        self.downlink = entry.downlink if entry is not None else sink.downlink
        self.used = self.sent = self.taken = 0
        self.last = 0.0
        # Lists: an empty deque takes 600 bytes, and a thousand peers have two million pipes.
        self.queue: list[Packet] = []
        self.flying: list[Packet] = []
        self.waiting: list[Packet] = []
        self.arrived: list[Packet] = []
        self.waiters: list[asyncio.Future[None]] = []

    async def room(self) -> bool:
        """Wait for a place and take it; False when the link broke meanwhile."""
        while self.used >= self.limit and self.source.has(self.link):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                self.wake(1)  # the place may have been given to us just before
                raise
        if not self.source.has(self.link):
            return False
        self.take()
        return True

    def take(self) -> None:
        """Take a place."""
        self.used += 1
        if self.used > self.source.peaks[self.bulk]:
            self.source.peaks[self.bulk] = self.used

    def release(self) -> None:
        """Give one place back."""
        self.used -= 1
        if self.waiters:
            self.wake(1)

    def wake(self, count: int) -> None:
        while self.waiters and count:
            waiter = self.waiters.pop(0)
            if not waiter.done():
                waiter.set_result(None)
                count -= 1


def spoil(pipe: Pipe, how: str) -> None:
    """What a hostile relay does to the last packet on its way: "corrupt", "duplicate" or "reorder" (with the one before)."""
    last = pipe.flying[-1]
    if how == "duplicate":
        last.number -= 1  # two packets in one pipe are one callback each; a repeated number is what the receiver sees
    elif how == "reorder" and len(pipe.flying) > 1:
        before = pipe.flying[-2]
        last.number, before.number = before.number, last.number
    else:
        last.spoiled = True


class Link:
    """A connection between two peers. Each end holds it for as long as it believes it to be up."""

    def __init__(self, net: SimNet, a: SimTransport, b: SimTransport) -> None:
        self.ends = (a, b)
        self.pipes = [Pipe(net, self, x, y, bulk) for x, y in ((a, b), (b, a)) for bulk in (False, True)]

    def pipe(self, source: SimTransport, bulk: bool) -> Pipe:
        return self.pipes[(0 if source is self.ends[0] else 2) + bulk]

    def other(self, end: SimTransport) -> SimTransport:
        return self.ends[1] if self.ends[0] is end else self.ends[0]


class Uplink:
    """What a peer's packets leave through, at `rate` bytes/s (None: unlimited).

    Flows of bulk take turns, packet by packet. Control overtakes bulk but takes its share of the bandwidth.
    """

    def __init__(self, net: SimNet, rate: float | None) -> None:
        self.rate = rate
        self._net = net
        self._busy = self._control_busy = 0.0
        self._flows: deque[Pipe] = deque()
        self._pumping = False

    @property
    def flows(self) -> int:
        """Pipes that bulk waits in."""
        return len(self._flows)

    def send(self, pipe: Pipe, packet: Packet) -> None:
        if pipe.bulk:
            pipe.queue.append(packet)
            if len(pipe.queue) == 1:
                self._flows.append(pipe)
            if not self._pumping:
                self._pump()
            return
        now, seconds = self._net.loop.now, packet.size / self.rate if self.rate else 0.0
        self._control_busy = (self._control_busy if self._control_busy > now else now) + seconds
        self._busy = (self._busy if self._busy > now else now) + seconds
        self._net.depart(pipe, packet, self._control_busy - now)

    def _pump(self) -> None:
        now = self._net.loop.now
        while self._flows and now >= self._busy:
            pipe = self._flows.popleft()
            if not pipe.queue:  # its link broke
                continue
            packet = pipe.queue.pop(0)
            if pipe.queue:
                self._flows.append(pipe)
            self._busy = now + (packet.size / self.rate if self.rate else 0.0)
            self._net.depart(pipe, packet, self._busy - now)
        self._pumping = bool(self._flows)
        if self._pumping:
            self._net.at(self._busy, self._pump)


class Downlink:
    """What a peer's packets come in through, at `rate` bytes/s (None: unlimited). Shared as an Uplink is.

    A packet needs its share from the moment its first byte arrives and is whole when its last byte has left the sender, too.
    """

    def __init__(self, net: SimNet, rate: float | None) -> None:
        self.rate = rate
        self._net = net
        self._busy = 0.0
        self._flows: deque[Pipe] = deque()
        self._pumping = False

    def take(self, pipe: Pipe, packet: Packet) -> None:
        """The first byte of a packet of bulk is here."""
        if not self.rate:
            self._net.whole(pipe, packet)
            return
        pipe.waiting.append(packet)
        if len(pipe.waiting) == 1:
            self._flows.append(pipe)
        if not self._pumping:
            self._pump()

    def charge(self, packet: Packet) -> None:
        """A packet of control has come in."""
        if self.rate:
            now = self._net.loop.now
            self._busy = (self._busy if self._busy > now else now) + packet.size / self.rate

    def _pump(self) -> None:
        now = self._net.loop.now
        while self._flows and now >= self._busy:
            pipe = self._flows.popleft()
            packet = pipe.waiting.pop(0)
            if pipe.waiting:
                self._flows.append(pipe)
            self._busy = now + (packet.size / self.rate if self.rate else 0.0)
            packet.done = max(packet.done, self._busy)
            self._net.whole(pipe, packet)
        self._pumping = bool(self._flows)
        if self._pumping:
            self._net.at(self._busy, self._pump)
