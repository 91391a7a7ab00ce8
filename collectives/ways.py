"""What the way to one peer carries, told from frames of real rounds: no probe, no clock, no socket.

While frames wait for one peer only, all that leaves goes there, and as fast as the way lets it: what is handed to the
transport meanwhile, by the time, is the rate of that way. While several wait they share our uplink, and nothing is learnt.
"""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.swarm.protocol import PeerId

LEAST = 1 << 18
"""Bytes below which nothing is learnt."""

SHORTEST = 0.2
"""Seconds: a stretch that is over sooner is no measure."""

FOLLOW = 0.3
"""Part by which a rate follows a new measure."""

KEPT = 256
"""Peers whose rates are kept; the one that was measured longest ago goes first."""

FADES = 900.0
"""Seconds after which a rate is forgotten: who avoids a slow way would else never learn that it is not slow any more."""


class Ways:
    """Feed it `wait` when frames begin to wait for a peer, `over` when none does any more, `sent` for each that left."""

    def __init__(self) -> None:
        self._rates: dict[PeerId, tuple[float, float]] = {}
        self._waiting: set[PeerId] = set()
        self._began, self._moved = 0.0, 0

    def rates(self, now: float) -> Mapping[PeerId, float]:
        """Bytes/s of the ways to others, as far as they are known."""
        return {peer: rate for peer, (rate, at) in self._rates.items() if now < at + FADES}

    def wait(self, peer: PeerId, now: float) -> None:
        """Frames wait for a peer."""
        self._learn(now)
        self._waiting.add(peer)
        self._began, self._moved = now, 0

    def over(self, peer: PeerId, now: float) -> None:
        """All of a peer's have left, or are forgotten."""
        self._learn(now)
        self._waiting.discard(peer)
        self._began, self._moved = now, 0

    def sent(self, peer: PeerId, nbytes: int, now: float) -> None:
        """A frame has left; what goes to others at once, while somebody's wait, uses up the link as well."""
        if peer in self._waiting:
            self._moved += nbytes
        elif self._waiting and nbytes:
            self._began, self._moved = now, 0

    def _learn(self, now: float) -> None:
        if len(self._waiting) != 1 or self._moved < LEAST or now - self._began < SHORTEST:
            return
        (peer,) = self._waiting
        found, known = self._moved / (now - self._began), self.rates(now).get(peer, 0.0)
        self._rates.pop(peer, None)
        if len(self._rates) >= KEPT:
            del self._rates[next(iter(self._rates))]
        self._rates[peer] = (known + FOLLOW * (found - known) if known else found, now)
