"""Estimates of the bulk bytes that have moved, including those of packets in flight."""

from __future__ import annotations

from thinwire.sims.network.handshake import Network
from thinwire.sims.network.link import Pipe
from thinwire.swarm.messages.registry import PeerId


class BulkProgress:
    """Bulk bytes that have arrived from other peers, and at them.

    Real sockets count the bytes of incomplete frames. Simulated packets arrive whole, so for those in flight the bytes follow
    from the rates of the links on their route. Nothing moves between peers whose packets are held.
    """

    def __init__(self, net: Network) -> None:
        self._net = net
        self._came: dict[PeerId, tuple[float, float]] = {}
        """Bytes from each peer, and the time for which they hold."""

    def received(self, peer: PeerId, pipe: Pipe) -> int:
        """Return the bytes that have arrived so far from a peer, through the pipe of its bulk data to us."""
        now = self._net.loop.now
        came, then = self._came.get(peer, (0.0, now))
        for hop in (pipe,) if pipe.onward is None else (pipe, pipe.onward):
            # Packets in flight have not arrived; while one is retransmitted after a loss, those behind it wait too.
            moving = hop.waiting or hop.arrived or (hop.queue and not hop.in_flight)
            busy = moving and not self._net.holds.held(*hop.pair)
            if busy and hop.uplink.rate:
                came += (now - then) * hop.uplink.rate / max(1, hop.uplink.flows)
                break
        self._came[peer] = (came, now)
        return int(came)

    def delivered(self, pipe: Pipe) -> tuple[int, int]:
        """Return the bytes that a pipe of ours has taken, and those that have arrived at its end."""
        arrived = pipe.given - pipe.in_transit
        last = pipe.onward or pipe
        # A packet that is arriving has arrived in part, at the rate of the slowest link on its route.
        rates = [rate for rate in (last.uplink.rate, last.downlink.rate, last.rate) if rate]
        if last.arrived and rates and not self._net.holds.held(*last.pair):
            packet = last.arrived[0]
            left = round((packet.done - self._net.loop.now) * min(rates))
            arrived += packet.size - min(packet.size, max(0, left))
        return pipe.given, arrived
