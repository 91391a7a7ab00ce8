"""A network inside one process and in virtual time, with faults that tests script.

Frames are encoded and decoded as on a real wire. A link is like a TCP connection: nothing on it is lost silently or
reordered; loss shows as delay; a killed peer's links reset one latency later; across a cut frames stall, and the link
breaks when the cut lasts. Control and bulk are separate streams that share a peer's uplink and downlink.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from thinwire.collectives.transport import Admit, Arrival
from thinwire.sims.clock import current
from thinwire.sims.link import Packet, Pipe
from thinwire.sims.transport import SimTransport
from thinwire.swarm import frame as frames
from thinwire.swarm.frame import Frame, FrameError
from thinwire.swarm.identity import Identity
from thinwire.swarm.protocol import NUMBERS, PeerId

EPOCH = 1_750_000_000
"""Unix time at virtual time 0: records carry wall time."""

Latency = Callable[[PeerId, PeerId], float]
Corrupt = Callable[[PeerId, PeerId, bytes], bytes]


class SimNet:
    """The network of one simulation; made inside `clock.run`.

    `latency`: one-way seconds, or a function of (sender, receiver); the part `jitter` of it is exponentially
    distributed. `bandwidth`: bytes/s of every peer's uplink and of its downlink (None: unlimited); a transport's own
    `uplink.rate` and `down` may be set. `loss`: probability that a frame needs one more retransmission. `window`: bulk
    frames in flight per direction before `send` waits. `patience`: seconds after which a cut link breaks. `deadline`:
    seconds after which a knock at a gate is given up. `encode`: False passes messages by reference, unsigned (sizes are
    still counted), for large swarms. `corrupt`, when set, gets (sender, receiver, bytes) and returns what arrives.
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
    ) -> None:
        self.loop = current()
        self.latency: Latency = latency if callable(latency) else lambda sender, receiver: latency
        self.window, self.deadline, self.encode = window, deadline, encode
        self.corrupt: Corrupt | None = None
        self.peers: dict[PeerId, SimTransport] = {}
        self.places: dict[str, SimTransport] = {}
        self.cuts: dict[tuple[PeerId, PeerId], int] = {}
        self._rng = random.Random(seed)
        self._jitter, self._bandwidth, self._loss, self._patience = jitter, bandwidth, loss, patience
        self._cut_number = 0

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
        """Stall what a sends to b and, unless `one_way`, what b sends to a."""
        for pair in ((a, b),) if one_way else ((a, b), (b, a)):
            if pair not in self.cuts:
                self._cut_number += 1
                self.cuts[pair] = self._cut_number
                self.loop.call_later(self._patience, self._expire, pair, self._cut_number)

    def partition(self, groups: Sequence[Sequence[PeerId]]) -> None:
        """Cut every pair of peers that are in different groups."""
        for i, group in enumerate(groups):
            for a in group:
                for other in groups[i + 1 :]:
                    for b in other:
                        self.cut(a, b)

    def heal(self) -> None:
        """End all cuts. What was held back arrives one latency later, in order."""
        self.cuts.clear()
        for peer in self.peers.values():
            for link in peer.links.values():
                for pipe in link.pipes:
                    if pipe.source is peer and pipe.arrived:
                        self.loop.call_later(self.latency(peer.peer_id, pipe.sink.peer_id), self._hand_over, pipe)

    def _expire(self, pair: tuple[PeerId, PeerId], number: int) -> None:
        if self.cuts.get(pair) == number and pair[0] in self.peers and pair[1] in self.peers:
            self.sever(self.peers[pair[0]], self.peers[pair[1]], "timed out")

    def sever(self, a: SimTransport, b: SimTransport, reason: str) -> None:
        """Break the link between two peers, now and for both ends."""
        for end, other in ((a, b), (b, a)):
            link = end.links.get(other.peer_id)
            if link is not None and link.other(end) is other:
                end.lose(link, reason)

    # --- the way of a packet: uplink, latency, downlink, inbox

    def delay(self, sender: PeerId, receiver: PeerId) -> float:
        """One-way seconds of one packet; lost transmissions add time-outs that double, as in TCP (RFC 6298)."""
        base = self.latency(sender, receiver)
        delay = base * (1.0 - self._jitter + self._jitter * self._rng.expovariate(1.0)) if self._jitter else base
        timeout = max(0.2, 3 * base)
        while self._loss and self._rng.random() < self._loss:
            delay += timeout
            timeout = min(2 * timeout, 60.0)
        return delay

    def depart(self, pipe: Pipe, packet: Packet, seconds: float) -> None:
        """The first byte leaves now, the last one after `seconds`."""
        first = max(self.loop.time() + self.delay(pipe.source.peer_id, pipe.sink.peer_id), pipe.last)
        pipe.last = packet.done = first + seconds
        pipe.source.traffic.count(packet.size, bulk=pipe.bulk, up=True)
        pipe.flying.append(packet)
        self.loop.call_at(first, self._arrive, pipe)

    def _arrive(self, pipe: Pipe) -> None:
        """A first byte arrives: take a share of the downlink. Control does not wait for bulk, but delays it."""
        packet = pipe.flying.popleft()  # not an argument: of events at one moment any may come first
        sink, now = pipe.sink, self.loop.time()
        seconds = packet.size / sink.down if sink.down else 0.0
        sink.down_busy = max(sink.down_busy, now) + seconds
        packet.done = max(packet.done, sink.down_busy if pipe.bulk else now + seconds)
        pipe.arrived.append(packet)
        self.loop.call_at(packet.done, self._hand_over, pipe)

    def _hand_over(self, pipe: Pipe) -> None:
        """Hand over, in order, what has arrived whole and is not held back by a cut."""
        if (pipe.source.peer_id, pipe.sink.peer_id) in self.cuts:
            return
        while pipe.arrived and pipe.arrived[0].done <= self.loop.time() and pipe.sink.has(pipe.link):
            packet = pipe.arrived.popleft()
            try:
                frame = self._received(pipe, packet)
            except FrameError as error:
                self.sever(pipe.sink, pipe.source, f"malformed frame: {error}")
                return
            pipe.sink.traffic.count(packet.size, bulk=pipe.bulk, up=False)
            number = NUMBERS[type(frame.message)].to_bytes(1, "big")
            self.loop.record(pipe.source.peer_id, pipe.sink.peer_id, number, packet.wire, packet.payload)
            pipe.sink.accept(Arrival(pipe.source.peer_id, frame), pipe)

    def _received(self, pipe: Pipe, packet: Packet) -> Frame:
        if packet.frame is not None:
            return packet.frame
        wire, payload = packet.wire, packet.payload
        if self.corrupt is not None:
            whole = self.corrupt(pipe.source.peer_id, pipe.sink.peer_id, wire + payload)
            wire, payload = whole[: len(wire)], whole[len(wire) :]
        header = frames.parse_header(wire[: frames.HEADER_BYTES])
        key = pipe.sink.known[pipe.source.peer_id].public_key
        return frames.decode(header, wire[frames.HEADER_BYTES :], payload, public_key=key, run_id=pipe.sink.run_id)
