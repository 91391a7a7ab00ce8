"""Estimate of the rate of the path to each peer, from frames of real rounds.

It sends no probes and needs no clock or socket. While frames wait for one peer only, the rate of its path is
the number of bytes handed to the transport divided by the time. While frames wait for several peers, they
share our uplink and nothing is measured.
"""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.swarm.messages.registry import PeerId

LEAST = 1 << 18
"""Bytes below which nothing is measured."""

SHORTEST = 0.2
"""Shortest stretch, in seconds, that counts as a measurement."""

FOLLOW = 0.3
"""Smoothing factor for a new measurement."""

KEPT = 256
"""Most peers with a stored rate; the one measured longest ago is dropped first."""

FADES = 900.0
"""Seconds after which a rate is forgotten.

Otherwise a peer that avoids a slow path would never notice that it has recovered.
"""


class LinkRates:
    """Rates of the paths to peers, fed with events of the send queue.

    Call `wait` when frames begin to wait for a peer, `over` when none does any more, `sent` for each sent frame.
    """

    def __init__(self) -> None:
        self._rates: dict[PeerId, tuple[float, float]] = {}
        self._waiting: set[PeerId] = set()
        self._began, self._nbytes = 0.0, 0

    def rates(self, now: float) -> Mapping[PeerId, float]:
        """Return the known rates of the paths to other peers, in bytes/s."""
        return {peer: rate for peer, (rate, at) in self._rates.items() if now < at + FADES}

    def wait(self, peer: PeerId, now: float) -> None:
        """Note that frames wait for a peer."""
        self._learn(now)
        self._waiting.add(peer)
        self._began, self._nbytes = now, 0

    def over(self, peer: PeerId, now: float) -> None:
        """Note that all frames for a peer were sent or dropped."""
        self._learn(now)
        self._waiting.discard(peer)
        self._began, self._nbytes = now, 0

    def sent(self, peer: PeerId, nbytes: int, now: float) -> None:
        """Count a sent frame.

        A frame sent at once to another peer while frames wait uses the same uplink and restarts the measurement.
        """
        if peer in self._waiting:
            self._nbytes += nbytes
        elif self._waiting and nbytes:
            self._began, self._nbytes = now, 0

    def _learn(self, now: float) -> None:
        if len(self._waiting) != 1 or self._nbytes < LEAST or now - self._began < SHORTEST:
            return
        (peer,) = self._waiting
        found, known = self._nbytes / (now - self._began), self.rates(now).get(peer, 0.0)
        self._rates.pop(peer, None)
        if len(self._rates) >= KEPT:
            del self._rates[next(iter(self._rates))]
        self._rates[peer] = (known + FOLLOW * (found - known) if known else found, now)
