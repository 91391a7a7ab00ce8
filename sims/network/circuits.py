"""Circuits of simulations: the product's own code grants, limits and ends them.

Two things are simulated: the connections of visitors to the gate of a relay, and the frames over them. Frames pass a relay
as packets, without its back-pressure and its limit `up`: the window of the link, from end to end, bounds them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from thinwire.collectives.transport.circuits.circuits import GATE, Circuits, Factory
from thinwire.collectives.transport.circuits.limits import CircuitLimits
from thinwire.collectives.transport.circuits.splice import End
from thinwire.collectives.transport.circuits.ticket import name_of
from thinwire.collectives.transport.interface import RESET, Loan
from thinwire.collectives.transport.rate_limit import RateLimit
from thinwire.sims.network.link import Endpoint, Fabric, Pipe, SimLink, path_of
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import PeerId, Refuse

LOAN = replace(Loan(), circuits=Loan().circuits // 4)
LIMITS = replace(CircuitLimits(), pair=3, asker=CircuitLimits().asker // 4)
"""A simulated link is one circuit, a real one has four: the caps are a quarter of the real ones."""


class CircuitFabric(Fabric, Protocol):
    """Network with circuits. `connections`: those to relays, in the order in which they were made."""

    connections: dict[Connection, None]


class RelayTransport(Endpoint, Protocol):
    """Transport of a peer that may relay."""

    circuits: Circuits | None


class Connection(asyncio.Transport):
    """TCP connection of a visitor to a relay's gate, as the relay's splice sees it.

    `opened`: True once the relay has both ends, False if it closes before. `link`: the link that uses it.
    """

    def __init__(self, net: CircuitFabric, visitor: Endpoint, relay: RelayTransport, end: End) -> None:
        super().__init__()
        self.visitor, self.relay, self.end = visitor, relay, end
        self.opened: asyncio.Future[bool] = net.loop.create_future()
        self.link: RelayedLink | None = None
        self.up = True
        self._net, self._reading = net, True
        net.connections[self] = None

    # --- called by the relay's splice

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_reading(self) -> bool:
        return self._reading

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True

    def is_closing(self) -> bool:
        return not self.up

    def write(self, data: Any) -> None:
        """Tell the visitor that the circuit is open: nothing else is written by a relay here."""
        net = self._net
        net.at(net.loop.now + net.latency(self.relay.peer_id, self.visitor.peer_id), self._open)

    def close(self) -> None:
        """Close the connection; frames that have left the relay still arrive."""
        if self.up:
            net, link = self._net, self.link
            when = net.loop.now + net.latency(self.relay.peer_id, self.visitor.peer_id)
            pipes = link.pipes if link is not None else ()
            self._end()
            coming = [pipe.last + 1e-6 for pipe in pipes if pipe.source is self.relay and pipe.sink is self.visitor]
            net.at(max([when, *coming]), self._lose, link.reason if link is not None else RESET)

    def abort(self) -> None:
        if self.up:
            net = self._net
            self._end()
            net.at(net.loop.now + net.latency(self.relay.peer_id, self.visitor.peer_id), self._lose, RESET)

    # --- called by the network and the visitor

    def leave(self, when: float = 0.0) -> None:
        """Close the visitor's end; the relay notices one latency later, and not before `when`."""
        net = self._net
        arrival = net.loop.now + net.latency(self.visitor.peer_id, self.relay.peer_id)
        net.at(max(arrival, when), self._end)

    def sever(self, reason: str) -> None:
        """Break the connection for both ends, now."""
        if self.up:
            self._end()
            self._lose(reason)

    def _open(self) -> None:
        if self.up and not self.opened.done():
            self.opened.set_result(True)

    def _end(self) -> None:
        """Note the end at the relay."""
        if self.up:
            self.up = False
            del self._net.connections[self]
            self.end.connection_lost(None)

    def _lose(self, reason: str) -> None:
        """Let the visitor notice the end."""
        if not self.opened.done():
            self.opened.set_result(False)
        if self.link is not None:
            self.visitor.lose(self.link, reason)


class RelayedLink(SimLink):
    """Link over a circuit, through the relay of two connections; the first one's visitor has made it.

    Each pipe consists of two. A packet of bulk data leaves the relay while it still arrives.
    """

    def __init__(self, net: CircuitFabric, near: Connection, far: Connection) -> None:
        super().__init__(net, near.visitor, far.visitor)
        self.relay = near.relay.peer_id
        self.reason = RESET
        """Reason that the other end learns when this link ends."""
        self._net, self._connections = net, (near, far)
        self._stall: asyncio.Task[None] | None = None
        near.link = far.link = self

    @property
    def up(self) -> bool:
        """True while the relay has both connections."""
        return all(connection.up for connection in self._connections)

    @property
    def pipes(self) -> list[Pipe]:
        first = super().pipes
        return first + [pipe.onward for pipe in first if pipe.onward is not None]

    def pipe(self, source: Endpoint, bulk: bool) -> Pipe:
        place = 2 * (source is not self.ends[0]) + bulk
        pipe = self._pipes[place]
        if pipe is None:
            relay = self._connections[0].relay
            sink = self.other(source)
            pipe = self._pipes[place] = Pipe(self, source, relay, path_of(self._net, source, relay), bulk)
            pipe.onward = Pipe(self, relay, sink, path_of(self._net, relay, sink), bulk, pipe)
        return pipe

    def release(self, end: Endpoint, when: float, reason: str) -> None:
        super().release(end, when, reason)
        self.reason = reason
        for connection in self._connections:
            if connection.visitor is end:
                connection.leave(when)

    def pass_on(self, pipe: Pipe) -> None:
        """Pass on the packets that have arrived at the relay, unless its process is stopped."""
        relay, onward = self._connections[0].relay, pipe.onward
        assert onward is not None
        while pipe.arrived and self.up:
            if not relay.awake.is_set():
                self._stall = self._stall or self._net.loop.create_task(self._wait(relay), context=self._net.context)
                return
            packet, pipe.arrived = pipe.arrived[0], pipe.arrived[1:]
            if pipe.bulk:
                relay.traffic.bulk_down += packet.size
            else:
                relay.traffic.control_down += packet.size
            self._connections[0].end.splice.relayed(packet.size)
            if self.up:  # the relay may have passed on all that it lends
                onward.uplink.send(onward, packet)

    async def _wait(self, relay: RelayTransport) -> None:
        """Wait until the relay's process runs again; the link breaks if that takes too long."""
        try:
            async with asyncio.timeout(self._net.patience):
                await relay.awake.wait()
        except TimeoutError:
            for end in self.ends:
                end.lose(self, "timed out")
            return
        self._stall = None
        for pipe in self.pipes:
            if pipe.onward is not None:
                self._net.hand_over(pipe)


# --- the product's circuits on the simulated network


class Visitor(RelayTransport, Protocol):
    """Transport of a peer that uses circuits."""

    async def send_over(self, link: SimLink, frame: Frame) -> bool:
        """Send a frame over a link; return False if the link is lost."""
        ...


@dataclass(frozen=True, slots=True)
class _Neighbour:
    """Link of a peer, as the product's circuits see it."""

    end: Visitor
    link: SimLink

    @property
    def dialled(self) -> bool:
        return self.link.ends[0] is self.end

    @property
    def relay(self) -> PeerId:
        return self.link.relay

    @property
    def gates(self) -> tuple[str, ...]:
        record = self.end.known.get(self.link.other(self.end).peer_id)
        return record.addresses if record is not None else ()

    async def send(self, frame: Frame) -> bool:
        return await self.end.send_over(self.link, frame)


class _Neighbours(Mapping[PeerId, _Neighbour]):
    """Links of a peer by the peer at the other end."""

    def __init__(self, end: Visitor) -> None:
        self._end = end

    def __getitem__(self, peer: PeerId) -> _Neighbour:
        return _Neighbour(self._end, self._end.links[peer])

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self._end.links)

    def __len__(self) -> int:
        return len(self._end.links)


Connect = Callable[[str], Awaitable[RelayTransport | Refuse]]
"""Connect to an address, and return the transport that listens there."""


def circuits_of(
    net: CircuitFabric, end: Visitor, limits: CircuitLimits, connect: Connect, draw: Callable[[int], bytes]
) -> Circuits:
    """Return the circuits of a peer, which makes connections with `connect`."""

    async def enter(gates: Iterable[str], token: bytes, factory: Factory) -> tuple[Connection, asyncio.BaseProtocol]:
        error = ConnectionError("the relay has no address")
        for gate in gates:
            relay = await connect(gate)
            if isinstance(relay, Refuse):
                error = ConnectionError(f"relay at {gate}: {relay.detail}")
                continue
            await asyncio.sleep(net.latency(end.peer_id, relay.peer_id))  # the ticket
            await relay.awake.wait()
            theirs = relay.circuits.relay.enter(name_of(token)) if relay.circuits is not None else None
            if not isinstance(theirs, End):
                raise ConnectionError("the relay has closed the circuit")
            connection = Connection(net, end, relay, theirs)
            theirs.connection_made(connection)
            try:
                if not await connection.opened:
                    raise ConnectionError("the relay has closed the circuit")
            except BaseException:
                connection.leave()
                raise
            return connection, factory()
        raise error

    found = Circuits(end.peer_id, limits, LOAN, RateLimit(), draw, enter=enter)
    found.links = _Neighbours(end)
    found.listeners[GATE] = lambda relay: asyncio.Protocol()
    return found
