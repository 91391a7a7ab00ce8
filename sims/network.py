"""A network inside one process and in virtual time, with faults that tests script.

Frames are encoded and decoded as on a real wire. A link is like a TCP connection: nothing on it is lost silently or
reordered; loss shows as delay; a killed peer's links reset one latency later; across a cut frames stall, and the link
breaks when the cut lasts. Control and bulk are separate streams that share a peer's uplink and downlink.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from math import log
from typing import TypeVarTuple, Unpack

from thinwire.collectives.transport import Admit, Arrival
from thinwire.sims.clock import current
from thinwire.sims.holds import Holds, Pair
from thinwire.sims.link import Pipe, spoil
from thinwire.sims.packets import Packet
from thinwire.sims.transport import SimTransport
from thinwire.swarm import frame as frames
from thinwire.swarm.frame import Frame, FrameError
from thinwire.swarm.identity import Identity
from thinwire.swarm.protocol import NUMBERS, PeerId

Ts = TypeVarTuple("Ts")

_MARKS = {kind: number.to_bytes(1, "big") for kind, number in NUMBERS.items()}

EPOCH = 1_750_000_000
"""Unix time at virtual time 0: records carry wall time."""

SPOILED = 0.2
"""Share of the frames that a hostile relay spoils."""

Latency = Callable[[PeerId, PeerId], float]
Rate = Callable[[PeerId, PeerId], float | None]
Corrupt = Callable[[PeerId, PeerId, bytes], bytes]


class SimNet:
    """The network of one simulation; made inside `clock.run`.

    `latency`: one-way seconds, or a function of (sender, receiver); the part `jitter` of it is exponentially
    distributed. `bandwidth`: bytes/s of every peer's uplink and of its downlink (None: unlimited); a transport's own
    `uplink.rate` and `downlink.rate` may be set. `loss`: probability that a frame needs one more retransmission (may be set).
    `window`: bulk frames in flight per direction before `send` waits. `patience`: seconds after which a link breaks that is
    cut or clogged. `deadline`: seconds after which a knock at a gate is given up. `encode`: False passes messages by
    reference, only votes signed (sizes are still counted), for large swarms. `stream`: bytes/s that one connection from a
    sender to a receiver reaches at most (None or 0: as much as the links give); it and `latency` are asked when a link opens.
    Transports have a `loss` and a `jitter` (mean extra seconds) of their own, too. `corrupt`, when set, gets (sender, receiver,
    bytes) and returns what arrives.
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
    ) -> None:
        self.loop = current()
        self.context = Context()
        """What the network does itself belongs to no peer's process, and goes on when that is stopped."""
        self.latency: Latency = latency if callable(latency) else lambda sender, receiver: latency
        self.window, self.deadline, self.encode, self.stream = window, deadline, encode, stream
        self.corrupt: Corrupt | None = None
        self.peers: dict[PeerId, SimTransport] = {}
        self.places: dict[str, SimTransport] = {}
        self.loss = loss
        self.lossy: dict[PeerId, list[tuple[float, float]]] = {}
        self.holds = Holds(self, patience)
        self.relays: dict[Pair, str] = {}
        self._rng = random.Random(seed)
        self._jitter, self._bandwidth = jitter, bandwidth

    def at(self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts) -> None:
        """Call back as the network, in whosever process this is called."""
        self.loop.call_at(when, callback, *args, context=self.context)

    def wall(self) -> int:
        """Unix time in seconds."""
        return EPOCH + int(self.loop.time())

    def transport(self, identity: Identity, run_id: bytes, admit: Admit, address: str) -> SimTransport:
        """A peer's transport at a free address. A peer that was killed or closed may come back. Raises OSError."""
        if address in self.places and self.places[address].alive:
            raise OSError(f"{address} is in use")
        transport = SimTransport(self, identity, run_id, admit, address, self._bandwidth)
        self.peers[identity.peer_id] = self.places[address] = transport
        return transport

    # --- faults

    def kill(self, peer: PeerId) -> None:
        """SIGKILL: its sends and receives never return, the others see resets one latency later.

        Whoever calls this also cancels the peer's tasks.
        """
        self.peers[peer].vanish()

    def pause(self, peer: PeerId) -> None:
        """SIGSTOP: links stay up and fill, the peer neither reads nor sends until `resume`. Its timers do run."""
        self.peers[peer].awake.clear()

    def resume(self, peer: PeerId) -> None:
        if self.peers[peer].alive:
            self.peers[peer].awake.set()

    def cut(self, a: PeerId, b: PeerId, *, one_way: bool = False) -> None:
        """Stall what a sends to b and, unless `one_way`, what b sends to a, until as many `mend`s."""
        for pair in ((a, b),) if one_way else ((a, b), (b, a)):
            self.holds.add(pair, cut=True)

    def mend(self, a: PeerId, b: PeerId, *, one_way: bool = False) -> None:
        """End a cut. What was held back arrives one latency later, in order."""
        for pair in ((a, b),) if one_way else ((a, b), (b, a)):
            self.holds.remove(pair, cut=True)

    def partition(self, groups: Sequence[Sequence[PeerId]], *, end: bool = False) -> None:
        """Cut every pair of peers that are in different groups, or mend these cuts."""
        for i, group in enumerate(groups):
            for a in group:
                for other in groups[i + 1 :]:
                    for b in other:
                        self.mend(a, b) if end else self.cut(a, b)

    def heal(self) -> None:
        """End all cuts and clogs."""
        self.holds.clear()

    def clog(self, a: PeerId, b: PeerId) -> None:
        """Bytes of the connections between two peers stop until as many `unclog`s; new ones can be made."""
        for pair in ((a, b), (b, a)):
            self.holds.add(pair, cut=False)

    def unclog(self, a: PeerId, b: PeerId) -> None:
        """End a clog. What was held back arrives one latency later, in order."""
        for pair in ((a, b), (b, a)):
            self.holds.remove(pair, cut=False)

    def half_open(self, a: PeerId, b: PeerId, seconds: float) -> None:
        """`a` loses its link to `b`, who learns of it after `seconds`, or when `a` dials anew."""
        link = self.peers[a].links.get(b)
        if link is not None:
            other = link.other(self.peers[a])
            self.peers[a].lose(link, "reset")
            self.at(self.loop.time() + seconds, other.lose, link, "timed out")

    def slow_close(self, a: PeerId, b: PeerId, seconds: float) -> None:
        """`a` closes its link to `b`: what it had sent still arrives, and `b` learns after `seconds`."""
        link = self.peers[a].links.get(b)
        if link is not None:
            other = link.other(self.peers[a])
            self.peers[a].lose(link, "closed")
            self.at(self.loop.time() + seconds, other.lose, link, "closed by the peer")

    def lose(self, peers: Iterable[PeerId], amount: float, until: float) -> None:
        """Until then a packet from or to these peers is lost with probability `amount`, whatever else may lose it."""
        for peer in peers:
            self.lossy.setdefault(peer, []).append((until, amount))

    def keep(self, peers: Iterable[PeerId], amount: float, until: float) -> None:
        """The end of what `lose` began with the same arguments."""
        for peer in peers:
            self.lossy[peer].remove((until, amount))
            if not self.lossy[peer]:
                del self.lossy[peer]

    def relay(self, a: PeerId, b: PeerId, how: str) -> None:
        """Somebody between two peers spoils frames: `how` is "corrupt", "duplicate", "reorder", or "" for an end of it."""
        for pair in ((a, b), (b, a)):
            if how:
                self.relays[pair] = how
            else:
                self.relays.pop(pair, None)

    def sever(self, a: SimTransport, b: SimTransport, reason: str) -> None:
        """Break the link between two peers, now and for both ends."""
        for end, other in ((a, b), (b, a)):
            link = end.links.get(other.peer_id)
            if link is not None and link.other(end) is other:
                end.lose(link, reason)

    # --- the way of a packet: uplink, latency, downlink, inbox

    def delay(self, sender: PeerId, receiver: PeerId) -> float:
        """One-way seconds of one packet."""
        return self._delay(self.latency(sender, receiver), self.peers[sender], self.peers[receiver])

    def _delay(self, base: float, a: SimTransport, b: SimTransport) -> float:
        """With chance; lost transmissions add time-outs that double, as in TCP (RFC 6298)."""
        # What is exponentially distributed is computed here as by random.expovariate(1).
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

    def _loss(self, a: SimTransport, b: SimTransport, when: float) -> float:
        """The probability that a packet between two peers is lost at that moment, as far as it is known now."""
        kept = (1.0 - self.loss) * (1.0 - a.loss) * (1.0 - b.loss)
        if self.lossy:
            first = self.lossy.get(a.peer_id, [])
            for until, amount in first + [one for one in self.lossy.get(b.peer_id, []) if one not in first]:
                if when < until:
                    kept *= 1.0 - amount
        return 1.0 - kept

    def depart(self, pipe: Pipe, packet: Packet, seconds: float) -> None:
        """The first byte leaves now, the last one after `seconds`, or later where one connection is slower than that."""
        source, sink = pipe.pair
        first = self.loop.now + self._delay(pipe.latency, self.peers[source], self.peers[sink])
        if first < pipe.last:
            first = pipe.last
        if pipe.rate:
            seconds = max(seconds, packet.size / pipe.rate)
        packet.number, pipe.sent = pipe.sent, pipe.sent + 1
        pipe.flying.append(packet)
        if self.relays and pipe.pair in self.relays and self._rng.random() < SPOILED:
            spoil(pipe, self.relays[pipe.pair])
        if pipe.bulk:
            pipe.source.traffic.bulk_up += packet.size
            if pipe.exit is not None:
                pipe.exit.bulk += packet.size
            pipe.last = packet.done = first + seconds
            self.at(first, self._arrive, pipe)
        else:
            pipe.source.traffic.control_up += packet.size
            if pipe.exit is not None:
                pipe.exit.control += packet.size
            # Control does not wait for bulk, but delays it; one event is enough for that.
            rate = pipe.downlink.rate
            pipe.last = packet.done = first + (max(seconds, packet.size / rate) if rate else seconds)
            self.loop.call_at(packet.done, self._control, pipe, context=self.context)

    def _arrive(self, pipe: Pipe) -> None:
        """The first byte of a bulk packet arrives."""
        packet = pipe.flying.pop(0)  # not an argument: of events at one moment any may come first
        pipe.downlink.take(pipe, packet)

    def _control(self, pipe: Pipe) -> None:
        """The last byte of a control packet arrives."""
        packet = pipe.flying.pop(0)
        pipe.downlink.charge(packet)
        pipe.arrived.append(packet)
        self.hand_over(pipe)

    def whole(self, pipe: Pipe, packet: Packet) -> None:
        """The last byte arrives when the packet says."""
        pipe.arrived.append(packet)
        if packet.done <= self.loop.now:
            self.hand_over(pipe)
        else:
            self.at(packet.done, self.hand_over, pipe)

    def hand_over(self, pipe: Pipe) -> None:
        """Hand over, in order, what has arrived whole and is not held back."""
        source, sink = pipe.pair
        if self.holds.pairs and self.holds.held(source, sink):
            return
        now, links, traffic = self.loop.now, pipe.sink.links, pipe.sink.traffic
        while pipe.arrived and pipe.arrived[0].done <= now and links.get(source) is pipe.link:
            packet = pipe.arrived.pop(0)
            try:
                frame = self._received(pipe, packet)
            except FrameError as error:
                self.sever(pipe.sink, pipe.source, f"malformed frame: {error}")
                return
            if pipe.bulk:
                traffic.bulk_down += packet.size
            else:
                traffic.control_down += packet.size
            self.loop.record(source, sink, _MARKS[type(frame.message)], packet.wire, packet.payload)
            pipe.sink.accept(Arrival(source, frame), pipe)

    def _received(self, pipe: Pipe, packet: Packet) -> Frame:
        # CURVE and the sealed streams number and authenticate everything, so that a relay can break a link and no more.
        if packet.spoiled or packet.number != pipe.taken:
            raise FrameError("the seal is broken")
        pipe.taken += 1
        if packet.frame is not None:
            return packet.frame
        wire, payload = packet.wire, packet.payload
        if self.corrupt is not None:
            whole = self.corrupt(pipe.source.peer_id, pipe.sink.peer_id, wire + payload)
            wire, payload = whole[: len(wire)], whole[len(wire) :]
        header = frames.parse_header(wire[: frames.HEADER_BYTES])
        key = pipe.sink.known[pipe.source.peer_id].public_key
        return frames.decode(header, wire[frames.HEADER_BYTES :], payload, public_key=key, run_id=pipe.sink.run_id)
