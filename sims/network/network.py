"""Simulated network in one process and in virtual time, with scripted faults.

Frames are encoded and decoded as on a real wire. A link behaves like a TCP connection: frames are never lost silently
or reordered; loss shows as delay; the links of a killed peer reset one latency later; during a cut frames stall, and
the link breaks if the cut lasts. Control and bulk data are separate streams that share a peer's uplink and downlink.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from math import log
from typing import TypeVarTuple, Unpack

from thinwire.collectives.transport.circuits.limits import CircuitLimits
from thinwire.collectives.transport.interface import Admit, Arrival
from thinwire.sims.engine.virtual_loop import current
from thinwire.sims.network.circuits import Connection
from thinwire.sims.network.link import Endpoint, Latency, Path, Pipe, Rate, spoil
from thinwire.sims.network.packets import Packet
from thinwire.sims.network.partitions import Pair, Partitions
from thinwire.sims.network.transport import SimTransport
from thinwire.swarm import frame as frames
from thinwire.swarm.frame import Frame, FrameError
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.messages.registry import NUMBERS, PeerId

Ts = TypeVarTuple("Ts")

_MARKS = {kind: number.to_bytes(1, "big") for kind, number in NUMBERS.items()}

EPOCH = 1_750_000_000
"""Unix time at virtual time 0, because records carry wall time."""

SPOILED = 0.2
"""Share of the frames that a hostile relay damages."""

Corrupt = Callable[[PeerId, PeerId, bytes], bytes]


class SimNet:
    """Network of one simulation; constructed inside `virtual_loop.run`.

    latency: one-way seconds, or a function of (sender, receiver). jitter: share of the latency that is exponentially
    distributed. bandwidth: bytes/s of every peer's uplink and downlink (None: unlimited); `uplink.rate` and
    `downlink.rate` of a transport may be set. loss: probability that a frame needs one more retransmission (may be
    set). window: bulk frames in flight per direction before `send` waits, more if they are small (`BURST`). patience:
    seconds after which a link that is cut or clogged breaks. deadline: seconds after which a connection attempt at a
    gate fails. encode: False passes messages by reference and signs only votes (sizes still count), for large swarms.
    stream: maximum bytes/s of one connection from a sender to a receiver (None or 0: no limit other than the links).
    `stream` and `latency` are evaluated when a link opens. Transports also have a `loss` and a `jitter` (mean
    additional seconds).
    circuits: limits of circuits between peers that cannot reach each other; None: there are no circuits.
    payload_factor: bytes on the links for each byte of a payload, so that a small model stands for a large one.
    corrupt: if set, a function that gets (sender, receiver, bytes) and returns the bytes that arrive.
    """

    def __init__(
        self,
        seed: int,
        *,
        latency: float | Latency = 0.02,
        jitter: float = 0.0,
        bandwidth: float | None = None,
        loss: float = 0.0,
        window: int = 8,
        patience: float = 30.0,
        deadline: float = 5.0,
        encode: bool = True,
        stream: Rate | None = None,
        circuits: CircuitLimits | None = None,
        payload_factor: float = 1.0,
    ) -> None:
        self.loop = current()
        self.context = Context()
        """Context of the network's own callbacks, which belong to no peer and run while peers are stopped."""
        self.latency: Latency = latency if callable(latency) else lambda sender, receiver: latency
        self.window, self.deadline, self.encode, self.stream = window, deadline, encode, stream
        self.paths: dict[Path, Path] = {}
        self.patience, self.circuits, self.payload_factor = patience, circuits, payload_factor
        self.corrupt: Corrupt | None = None
        self.peers: dict[PeerId, SimTransport] = {}
        self.places: dict[str, SimTransport] = {}
        self.loss = loss
        self.lossy: dict[PeerId, list[tuple[float, float]]] = {}
        self.holds = Partitions(self, patience)
        self.relays: dict[Pair, str] = {}
        self.connections: dict[Connection, None] = {}
        self._rng = random.Random(seed)
        self._circuit_rng = random.Random(f"{seed}/circuits")
        self._jitter, self._bandwidth = jitter, bandwidth

    def at(self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts) -> None:
        """Schedule a callback of the network, in whichever process this is called."""
        self.loop.call_at(when, callback, *args, context=self.context)

    def draw(self, count: int) -> bytes:
        """Return random bytes for circuits, from a separate generator."""
        return self._circuit_rng.randbytes(count)

    def wall(self) -> int:
        """Return the unix time in seconds."""
        return EPOCH + int(self.loop.time())

    def transport(self, identity: Identity, run_id: bytes, admit: Admit, address: str) -> SimTransport:
        """Create a peer's transport at a free address. A killed or closed peer may return. Raises OSError."""
        if address in self.places and self.places[address].alive:
            raise OSError(f"{address} is in use")
        transport = SimTransport(self, identity, run_id, admit, address, self._bandwidth)
        self.peers[identity.peer_id] = self.places[address] = transport
        return transport

    # --- faults

    def kill(self, peer: PeerId) -> None:
        """Kill a peer (SIGKILL): its sends and receives never return, and others see resets one latency later.

        The caller also cancels the peer's tasks.
        """
        self.peers[peer].vanish()

    def pause(self, peer: PeerId) -> None:
        """Stop a peer (SIGSTOP): links stay up and fill; it neither reads nor sends until `resume`.

        Its timers do run.
        """
        self.peers[peer].awake.clear()

    def resume(self, peer: PeerId) -> None:
        if self.peers[peer].alive:
            self.peers[peer].awake.set()

    def cut(self, a: PeerId, b: PeerId, *, one_way: bool = False) -> None:
        """Stall what a sends to b and, unless `one_way`, what b sends to a, until an equal number of `mend`s."""
        for pair in ((a, b),) if one_way else ((a, b), (b, a)):
            self.holds.add(pair, cut=True)

    def mend(self, a: PeerId, b: PeerId, *, one_way: bool = False) -> None:
        """End a cut. Frames that were held back arrive one latency later, in order."""
        for pair in ((a, b),) if one_way else ((a, b), (b, a)):
            self.holds.remove(pair, cut=True)

    def refuse(self, a: PeerId, b: PeerId, *, one_way: bool = False) -> None:
        """Reset the link of two peers and refuse new ones, until an equal number of `admit`s.

        `one_way`: refuse what a opens, reset the link for a only, and cut what b sends: b notices nothing.
        """
        self.holds.refuse((a, b))
        if one_way:
            self.cut(b, a, one_way=True)
            link = self.peers[a].links.get(b) if a in self.peers else None
            if link is not None and not link.relay:
                self.peers[a].lose(link, "reset")
        else:
            self.holds.refuse((b, a))
            if a in self.peers and b in self.peers:
                self.sever(self.peers[a], self.peers[b], "reset")

    def admit(self, a: PeerId, b: PeerId, *, one_way: bool = False) -> None:
        """End a refusal. With `one_way`, b notices two latencies later that its old link was reset."""
        self.holds.admit((a, b))
        if not one_way:
            self.holds.admit((b, a))
            return
        self.mend(b, a, one_way=True)
        link = self.peers[b].links.get(a) if b in self.peers else None
        if link is not None and not link.relay and a in self.peers and not link.other(self.peers[b]).has(link):
            self.at(self.loop.time() + 2 * self.latency(b, a), self.peers[b].lose, link, "reset")

    def partition(self, groups: Sequence[Sequence[PeerId]], *, end: bool = False, refuse: bool = False) -> None:
        """Cut every pair of peers in different groups; with `end`, mend these cuts.

        `refuse`: refuse and admit connections instead.
        """
        act = (self.admit if refuse else self.mend) if end else (self.refuse if refuse else self.cut)
        for i, group in enumerate(groups):
            for a in group:
                for other in groups[i + 1 :]:
                    for b in other:
                        act(a, b)

    def heal(self) -> None:
        """End all cuts, clogs and refusals."""
        self.holds.clear()

    def clog(self, a: PeerId, b: PeerId) -> None:
        """Stall the connections between two peers until an equal number of `unclog`s; new ones can be made."""
        for pair in ((a, b), (b, a)):
            self.holds.add(pair, cut=False)

    def unclog(self, a: PeerId, b: PeerId) -> None:
        """End a clog. Frames that were held back arrive one latency later, in order."""
        for pair in ((a, b), (b, a)):
            self.holds.remove(pair, cut=False)

    def half_open(self, a: PeerId, b: PeerId, seconds: float) -> None:
        """Break the link for `a` at once; `b` notices after `seconds`, or when `a` dials again."""
        link = self.peers[a].links.get(b)
        if link is not None:
            other = link.other(self.peers[a])
            self.peers[a].lose(link, "reset")
            self.at(self.loop.time() + seconds, other.lose, link, "timed out")

    def slow_close(self, a: PeerId, b: PeerId, seconds: float) -> None:
        """Close the link of `a` to `b`: frames already sent still arrive, and `b` notices after `seconds`."""
        link = self.peers[a].links.get(b)
        if link is not None:
            other = link.other(self.peers[a])
            self.peers[a].lose(link, "closed")
            self.at(self.loop.time() + seconds, other.lose, link, "closed by the peer")

    def lose(self, peers: Iterable[PeerId], amount: float, until: float) -> None:
        """Lose packets of these peers with probability `amount` until `until`, in addition to other loss."""
        for peer in peers:
            self.lossy.setdefault(peer, []).append((until, amount))

    def keep(self, peers: Iterable[PeerId], amount: float, until: float) -> None:
        """End a `lose` with the same arguments."""
        for peer in peers:
            self.lossy[peer].remove((until, amount))
            if not self.lossy[peer]:
                del self.lossy[peer]

    def relay(self, a: PeerId, b: PeerId, how: str) -> None:
        """Put a hostile relay between two peers: "corrupt", "duplicate", "reorder", or "" to remove it."""
        for pair in ((a, b), (b, a)):
            if how:
                self.relays[pair] = how
            else:
                self.relays.pop(pair, None)

    def sever(self, a: Endpoint, b: Endpoint, reason: str) -> None:
        """Break the link between two peers and their connections to each other's gates, now and for both ends."""
        for connection in list(self.connections):
            if {connection.visitor, connection.relay} == {a, b}:
                connection.sever(reason)
        for end, other in ((a, b), (b, a)):
            link = end.links.get(other.peer_id)
            if link is not None and not link.relay and link.other(end) is other:
                end.lose(link, reason)

    # --- route of a packet: uplink, latency, downlink, inbox

    def delay(self, sender: PeerId, receiver: PeerId) -> float:
        """Return the one-way seconds of one packet."""
        return self._delay(self.latency(sender, receiver), self.peers[sender], self.peers[receiver])

    def _delay(self, base: float, a: Endpoint, b: Endpoint) -> float:
        """Return a random delay in seconds. Each lost transmission adds a time-out, which doubles (RFC 6298)."""
        # The exponential distribution is computed in the same way as by random.expovariate(1).
        delay, draw = base, self._rng.random
        if self._jitter:
            delay = base * (1.0 - self._jitter + self._jitter * -log(1.0 - draw()))
        if a.jitter or b.jitter:
            delay += (a.jitter + b.jitter) * -log(1.0 - draw())
        if self.loss or a.loss or b.loss or self.lossy:
            timeout, now = max(0.2, 3 * base), self.loop.time()
            while draw() < self._loss(a, b, now + delay):
                delay += timeout
                timeout = min(2 * timeout, 60.0)
        return delay

    def _loss(self, a: Endpoint, b: Endpoint, when: float) -> float:
        """Return the probability that a packet is lost at time `when`, as far as known now."""
        kept = (1.0 - self.loss) * (1.0 - a.loss) * (1.0 - b.loss)
        if self.lossy:
            first = self.lossy.get(a.peer_id, [])
            for until, amount in first + [one for one in self.lossy.get(b.peer_id, []) if one not in first]:
                if when < until:
                    kept *= 1.0 - amount
        return 1.0 - kept

    def depart(self, pipe: Pipe, packet: Packet, seconds: float) -> None:
        """Send a packet: the first byte leaves now, the last one after `seconds`.

        The last byte leaves later if the connection is slower than that.
        """
        loop, size = self.loop, packet.size
        first = loop.now + self._delay(pipe.latency, pipe.source, pipe.sink)
        if pipe.entry is None:
            packet.number = pipe.sent
            pipe.sent += 1
        pipe.in_flight += (packet,)
        if self.relays and pipe.pair in self.relays and self._rng.random() < SPOILED:
            spoil(pipe, self.relays[pipe.pair])
        slowest = size / pipe.rate if pipe.rate else 0.0
        if pipe.bulk:
            pipe.source.traffic.bulk_up += size
            if pipe.exit is not None:
                pipe.exit.bulk += size
            first = max(first, pipe.last)
            done = first + max(seconds, slowest)
            if pipe.entry is not None:  # at a relay, where the last byte may still be missing
                done = max(done, packet.done + pipe.latency)
            pipe.last = packet.done = done
            self.at(first, self._arrive, pipe)
        else:
            pipe.source.traffic.control_up += size
            if pipe.exit is not None:
                pipe.exit.control += size
            # Control packets do not wait for bulk packets, but delay them; one event is enough for that. `seconds` has the
            # time of the control packets before this one in the uplink, so it must not be added to their arrival.
            if (rate := pipe.downlink.rate) and size / rate > slowest:
                slowest = size / rate
            done, last = first + (seconds if seconds > slowest else slowest), pipe.last + slowest
            pipe.last = packet.done = done if done > last else last
            loop.call_at(packet.done, self._control, pipe, context=self.context)

    def _arrive(self, pipe: Pipe) -> None:
        """Handle the arrival of the first byte of a bulk packet."""
        # The packet is not an argument, as simultaneous events may run in any order.
        packet, pipe.in_flight = pipe.in_flight[0], pipe.in_flight[1:]
        pipe.downlink.take(pipe, packet)

    def _control(self, pipe: Pipe) -> None:
        """Handle the arrival of the last byte of a control packet."""
        packet, pipe.in_flight = pipe.in_flight[0], pipe.in_flight[1:]
        pipe.downlink.charge(packet)
        if pipe.arrived or packet.done > self.loop.now or self.holds.pairs or pipe.onward is not None:
            pipe.arrived += (packet,)
            self.hand_over(pipe)
        elif pipe.sink.links.get((entry := pipe.entry or pipe).pair[0]) is pipe.link:
            self._deliver(pipe, packet, entry)
        else:
            pipe.arrived += (packet,)

    def whole(self, pipe: Pipe, packet: Packet) -> None:
        """Schedule the delivery of a packet at the time of its last byte."""
        pipe.arrived += (packet,)
        if packet.done <= self.loop.now or pipe.onward is not None:
            self.hand_over(pipe)
        else:
            self.at(packet.done, self.hand_over, pipe)

    def hand_over(self, pipe: Pipe) -> None:
        """Deliver, in order, the packets that have arrived completely and are not held back."""
        if self.holds.pairs and self.holds.held(*pipe.pair):
            return
        if pipe.onward is not None:
            pipe.link.pass_on(pipe)
            return
        entry = pipe if pipe.entry is None else pipe.entry
        source = entry.pair[0]
        now, links = self.loop.now, pipe.sink.links
        while pipe.arrived and pipe.arrived[0].done <= now and links.get(source) is pipe.link:
            packet, pipe.arrived = pipe.arrived[0], pipe.arrived[1:]
            if not self._deliver(pipe, packet, entry):
                return

    def _deliver(self, pipe: Pipe, packet: Packet, entry: Pipe) -> bool:
        """Pass a packet to the receiver; return False if it breaks the link."""
        sink, (source, receiver) = pipe.sink, (entry.pair[0], pipe.pair[1])
        try:
            frame = self._received(pipe, packet, entry.source)
        except FrameError as error:
            for end in (sink, entry.source):
                end.lose(pipe.link, f"malformed frame: {error}")
            return False
        if pipe.bulk:
            sink.traffic.bulk_down += packet.size
        else:
            sink.traffic.control_down += packet.size
        self.loop.record(source, receiver, _MARKS[type(frame.message)], packet.wire, packet.payload)
        sink.accept(Arrival(source, frame), entry, packet.size)
        return True

    def _received(self, pipe: Pipe, packet: Packet, source: Endpoint) -> Frame:
        # CURVE and the bulk streams number and authenticate everything, so a relay can only break a link.
        if packet.spoiled or packet.number != pipe.taken:
            raise FrameError("the seal is broken")
        pipe.taken += 1
        if packet.frame is not None:
            return packet.frame
        wire, payload = packet.wire, packet.payload
        if self.corrupt is not None:
            whole = self.corrupt(source.peer_id, pipe.sink.peer_id, wire + payload)
            wire, payload = whole[: len(wire)], whole[len(wire) :]
        header = frames.parse_header(wire[: frames.HEADER_BYTES])
        key = pipe.sink.known[source.peer_id].public_key
        return frames.decode(header, wire[frames.HEADER_BYTES :], payload, public_key=key, run_id=pipe.sink.run_id)
