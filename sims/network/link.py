"""Simulated links between peers: packets, pipes, links, and byte counters.

`Fabric` and `Endpoint` are the parts of the network and of the transports that links use; both are built on links.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Protocol, TypeVarTuple, Unpack

from thinwire.collectives.transport.interface import Arrival
from thinwire.sims.engine.virtual_loop import SimLoop
from thinwire.sims.network.packets import Packet
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import PeerId

Ts = TypeVarTuple("Ts")

Latency = Callable[[PeerId, PeerId], float]
"""One-way seconds from a sender to a receiver."""

Rate = Callable[[PeerId, PeerId], float | None]
"""Bytes/s of one connection from a sender to a receiver; None: no bound."""

CONTROL_WINDOW = 256
"""Control frames in flight per direction before `send` waits."""

BURST = 14_600
"""Bytes that a TCP connection sends at once after a pause: ten segments (RFC 6928).

Small bulk frames share them.
"""


@dataclass(slots=True)
class LinkTraffic:
    """Bytes of one peer since the start: control and bulk data, sent and received.

    Sent bytes count when they leave, received bytes when they arrive.
    """

    control_up: int = 0
    control_down: int = 0
    bulk_up: int = 0
    bulk_down: int = 0


class Fabric(Protocol):
    """Network for links. `window`: large bulk frames in flight per direction. `loop.now`: virtual seconds.

    `context`: that of callbacks that belong to no peer. `patience`: seconds after which a link that does not move breaks.
    `paths`: one object for all equal paths, because a thousand peers have a million directions of links.
    """

    loop: SimLoop
    context: Context
    patience: float
    latency: Latency
    stream: Rate | None
    window: int
    paths: dict[Path, Path]

    def at(self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts) -> None:
        """Call back at a virtual time, as the network."""
        ...

    def depart(self, pipe: Pipe, packet: Packet, seconds: float) -> None:
        """Carry a packet of which the first byte leaves now and the last byte after `seconds`."""
        ...

    def whole(self, pipe: Pipe, packet: Packet) -> None:
        """Deliver a packet of which the last byte arrives at `packet.done`."""
        ...

    def hand_over(self, pipe: Pipe) -> None:
        """Deliver the packets of a pipe that have arrived, in order."""
        ...


class Endpoint(Protocol):
    """Transport of one peer. `awake` is cleared while its process is stopped or dead.

    `loss` and `jitter` are those of its own link. `peaks`: maximum of control and of bulk frames in flight; several small
    bulk frames count as one.
    """

    peer_id: PeerId
    run_id: bytes
    uplink: Uplink
    downlink: Downlink
    gateway: Gateway | None
    loss: float
    jitter: float
    traffic: LinkTraffic
    peaks: list[int]
    awake: asyncio.Event
    known: dict[PeerId, PeerRecord]
    links: dict[PeerId, SimLink]

    def has(self, link: SimLink) -> bool:
        """Return True while this end still holds the link."""
        ...

    def accept(self, arrival: Arrival, pipe: Pipe, size: int) -> None:
        """Take a frame of `size` bytes that has arrived through a pipe."""
        ...

    def lose(self, link: SimLink, reason: str) -> None:
        """Take note that a link broke."""
        ...

    def replace(self, link: SimLink, record: PeerRecord | None) -> None:
        """Give up a link: its other end has a link to another process with our key, which shows this record."""
        ...


class Gateway:
    """Uplink and downlink that the peers of a site share for traffic beyond the same gateway.

    Between peers behind it only their own links count, beyond it only the gateway's. `bulk` and `control` are the bytes
    that have left through it.
    """

    def __init__(self, net: Fabric, up: float | None, down: float | None) -> None:
        self.uplink, self.downlink = Uplink(net, up), Downlink(net, down)
        self.bulk = self.control = 0


Path = tuple[float, float | None, int]
"""Latency, rate (see Pipe) and window of one direction of a link, as they are when it opens."""


def path_of(net: Fabric, source: Endpoint, sink: Endpoint) -> Path:
    """Return the present path from one peer to another."""
    pair = source.peer_id, sink.peer_id
    path = net.latency(*pair), net.stream(*pair) if net.stream is not None else None, net.window
    return net.paths.setdefault(path, path)


class Pipe:
    """One direction and one plane (control or bulk) of a link.

    used: room of the frames accepted by `send` and not yet taken by `recv`; `send` waits from `limit` on. share: most
    room that one frame takes: 1 of a control frame; a smaller bulk frame takes its bytes. sent, taken: number the
    packets as they leave and arrive. given: bytes of all bulk packets so far. pair: ids of `source` and `sink`.
    latency: one-way seconds between them. rate: bytes/s that one connection reaches (None: unlimited). uplink,
    downlink: links on the route. exit: gateway of the sender's site on the route (None: there is none). onward: in
    a pipe to a relay, the pipe from there to the receiver; entry: the inverse. Frames in both count in `used` of
    the entry.
    """

    __slots__ = (
        "link", "source", "sink", "bulk", "pair", "latency", "rate", "limit", "share", "used", "sent", "taken", "given", "last",
        "queue", "in_flight", "waiting", "arrived", "waiters", "uplink", "downlink", "exit", "onward", "entry",
    )  # fmt: skip

    def __init__(
        self, link: SimLink, source: Endpoint, sink: Endpoint, path: Path, bulk: bool, entry: Pipe | None = None
    ) -> None:
        self.onward: Pipe | None = None
        self.entry = entry
        self.link, self.source, self.sink, self.bulk = link, source, sink, bulk
        self.pair = (source.peer_id, sink.peer_id)
        self.latency, self.rate, window = path
        self.share = max(1, BURST // max(1, window)) if bulk else 1
        self.limit = self.share * (window if bulk else CONTROL_WINDOW)
        self.exit, into = (source.gateway, sink.gateway) if source.gateway is not sink.gateway else (None, None)
        self.uplink = self.exit.uplink if self.exit is not None else source.uplink
        self.downlink = into.downlink if into is not None else sink.downlink
        self.used = self.sent = self.taken = self.given = 0
        self.last = 0.0
        # Tuples: all empty ones are one object, and a thousand peers have a million pipes, nearly all of them empty.
        self.queue: tuple[Packet, ...] = ()
        self.in_flight: tuple[Packet, ...] = ()
        self.waiting: tuple[Packet, ...] = ()
        self.arrived: tuple[Packet, ...] = ()
        self.waiters: tuple[asyncio.Future[None], ...] = ()

    @property
    def in_transit(self) -> int:
        """Bytes that have not arrived at the receiver, on either side of a relay."""
        lists = (self.queue, self.in_flight, self.waiting, self.arrived)
        onward = self.onward.in_transit if self.onward is not None else 0
        return sum(packet.size for packets in lists for packet in packets) + onward

    @property
    def full(self) -> bool:
        """True if no frame can be sent now."""
        return self.used >= self.limit

    async def room(self, size: int) -> bool:
        """Wait for room for a frame of `size` bytes and take it. Returns False if the link broke meanwhile."""
        while self.full and self.source.has(self.link):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiters += (waiter,)
            try:
                await waiter
            except asyncio.CancelledError:
                self.wake(1)  # the room may have been given to us just before
                raise
        if not self.source.has(self.link):
            return False
        self.take(size)
        if self.waiters and not self.full:
            self.wake(1)  # a large frame has left room for several small ones
        return True

    def take(self, size: int) -> None:
        """Take the room of a frame of `size` bytes."""
        self.used += min(size, self.share)
        if self.used // self.share > self.source.peaks[self.bulk]:
            self.source.peaks[self.bulk] = self.used // self.share

    def release(self, size: int) -> None:
        """Give the room of a frame of `size` bytes back."""
        self.used -= min(size, self.share)
        if self.waiters and not self.full:
            self.wake(1)

    def wake(self, count: int) -> None:
        while self.waiters and count:
            waiter, self.waiters = self.waiters[0], self.waiters[1:]
            if not waiter.done():
                waiter.set_result(None)
                count -= 1


def spoil(pipe: Pipe, how: str) -> None:
    """Damage the last packet in flight like a hostile relay.

    how: "corrupt", "duplicate" or "reorder" (with the packet before).
    """
    last = pipe.in_flight[-1]
    if how == "duplicate":
        last.number -= 1  # two packets in one pipe need a callback each; the receiver notices the repeated number
    elif how == "reorder" and len(pipe.in_flight) > 1:
        before = pipe.in_flight[-2]
        last.number, before.number = before.number, last.number
    else:
        last.spoiled = True


class SimLink:
    """Connection between two peers, made by the first. An end holds it while it believes it to be up."""

    __slots__ = ("ends", "_paths", "_pipes")  # a thousand peers have half a million links

    relay: PeerId = b""
    """The peer that passes the packets on; b"": none."""

    def __init__(self, net: Fabric, a: Endpoint, b: Endpoint) -> None:
        self.ends, self._paths = (a, b), (path_of(net, a, b), path_of(net, b, a))
        # Made when first used: most links carry control frames only.
        self._pipes: list[Pipe | None] = [None] * 4

    @property
    def pipes(self) -> list[Pipe]:
        """Pipes that have been used so far."""
        return [pipe for pipe in self._pipes if pipe is not None]

    def pipe(self, source: Endpoint, bulk: bool) -> Pipe:
        place = bulk if source is self.ends[0] else 2 + bulk
        pipe = self._pipes[place]
        if pipe is None:
            pipe = self._pipes[place] = Pipe(self, source, self.other(source), self._paths[place >> 1], bulk)
        return pipe

    def release(self, end: Endpoint, when: float, reason: str) -> None:
        """Note that an end gives the link up for a reason; its last byte has left at `when`."""
        for pipe in self.pipes:
            if pipe.source is end:
                pipe.queue = ()
                pipe.wake(len(pipe.waiters))
        if not any(one.has(self) for one in self.ends):
            self.dissolve()

    def dissolve(self) -> None:
        """Let the pipes go, since neither end holds the link: link and pipes refer to each other."""
        self._pipes = [None] * 4

    def pass_on(self, pipe: Pipe) -> None:
        """Pass on the packets that have arrived through a pipe to a relay: this link has none."""
        raise NotImplementedError

    def other(self, end: Endpoint) -> Endpoint:
        return self.ends[1] if self.ends[0] is end else self.ends[0]


class Uplink:
    """Outgoing link of a peer, of `rate` bytes/s (None: unlimited).

    Bulk flows take turns, packet by packet. Control packets overtake bulk packets, but use their share of the
    bandwidth.
    """

    def __init__(self, net: Fabric, rate: float | None) -> None:
        self.rate = rate
        self._net = net
        self._busy = self._control_busy = 0.0
        self._flows: deque[Pipe] = deque()
        self._pumping = False

    @property
    def flows(self) -> int:
        """Number of pipes in which bulk packets wait."""
        return len(self._flows)

    @property
    def leaving(self) -> int:
        """Bytes of packets that have begun to leave and have not left yet."""
        return round(max(0.0, self._busy - self._net.loop.now) * (self.rate or 0.0))

    def send(self, pipe: Pipe, packet: Packet) -> None:
        if pipe.bulk:
            pipe.given += packet.size
            pipe.queue += (packet,)
            if len(pipe.queue) == 1:
                self._flows.append(pipe)
            if not self._pumping:
                self._pump()
            return
        net = self._net
        now, seconds = net.loop.now, packet.size / self.rate if self.rate else 0.0
        self._control_busy = busy = (self._control_busy if self._control_busy > now else now) + seconds
        self._busy = (self._busy if self._busy > now else now) + seconds
        net.depart(pipe, packet, busy - now)

    def _pump(self) -> None:
        now = self._net.loop.now
        while self._flows and now >= self._busy:
            pipe = self._flows.popleft()
            if not pipe.queue:  # its link broke
                continue
            packet, pipe.queue = pipe.queue[0], pipe.queue[1:]
            if pipe.queue:
                self._flows.append(pipe)
            self._busy = now + (packet.size / self.rate if self.rate else 0.0)
            self._net.depart(pipe, packet, self._busy - now)
        self._pumping = bool(self._flows)
        if self._pumping:
            self._net.at(self._busy, self._pump)


class Downlink:
    """Incoming link of a peer, of `rate` bytes/s (None: unlimited), shared like an Uplink.

    A packet uses its share from the moment its first byte arrives. It is complete when its last byte has also left the
    sender.
    """

    def __init__(self, net: Fabric, rate: float | None) -> None:
        self.rate = rate
        self._net = net
        self._busy = 0.0
        self._flows: deque[Pipe] = deque()
        self._pumping = False

    def take(self, pipe: Pipe, packet: Packet) -> None:
        """Accept a bulk packet whose first byte has arrived."""
        if not self.rate:
            self._net.whole(pipe, packet)
            return
        pipe.waiting += (packet,)
        if len(pipe.waiting) == 1:
            self._flows.append(pipe)
        if not self._pumping:
            self._pump()

    def charge(self, packet: Packet) -> None:
        """Account for a control packet that has arrived."""
        if self.rate:
            now = self._net.loop.now
            self._busy = (self._busy if self._busy > now else now) + packet.size / self.rate

    def _pump(self) -> None:
        now = self._net.loop.now
        while self._flows and now >= self._busy:
            pipe = self._flows.popleft()
            packet, pipe.waiting = pipe.waiting[0], pipe.waiting[1:]
            if pipe.waiting:
                self._flows.append(pipe)
            self._busy = now + (packet.size / self.rate if self.rate else 0.0)
            packet.done = max(packet.done, self._busy)
            self._net.whole(pipe, packet)
        self._pumping = bool(self._flows)
        if self._pumping:
            self._net.at(self._busy, self._pump)
