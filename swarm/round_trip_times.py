"""Round-trip times to other peers, measured from probes, and the selection of link data to share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

from thinwire.swarm.messages.announcement import MAX_SPANS, SPAN_PREFIX, Span
from thinwire.swarm.messages.registry import PeerId
from thinwire.swarm.quantized_links import LEAST_RATE, LEAST_RTT, step

SAMPLES = 8
"""Number of recent round trips per peer. The shortest counts, because load only makes them longer."""

NEAREST = 16
"""Number of shortest links that are shared. The rest are links that were shared before, then new ones."""

LEAST_CHANGE = 3
"""Smallest change of an announced value, in steps (3 are about a third).

Smaller changes are suppressed so that plans stay stable.
"""

Steps: TypeAlias = tuple[int, int]
"""Step of the round-trip time, and step of the rate; 0 means unknown."""


class Distances:
    """Round-trip times of one peer to the peers that it probes."""

    def __init__(self) -> None:
        self._trips: dict[PeerId, tuple[float, ...]] = {}  # smaller than deques
        self._announced: dict[PeerId, Steps] = {}

    def add(self, peer: PeerId, seconds: float) -> None:
        """Add a measured round-trip time of a peer, in seconds."""
        self._trips[peer] = (*self._trips.get(peer, ())[-SAMPLES + 1 :], seconds)

    def forget(self, peer: PeerId) -> None:
        """Forget a departed peer."""
        self._trips.pop(peer, None)

    def rtt(self, peer: PeerId) -> float:
        """Return the round-trip time to a peer over an idle link in seconds; 0.0 means unknown."""
        return min(self._trips.get(peer, ()), default=0.0)

    def spans(self, live: Collection[PeerId], rates: Mapping[PeerId, float]) -> tuple[Span, ...]:
        """Return the announcements of this peer's links to the peers in `live`.

        rates: measured bytes/s to some of them. Values that changed little are announced as before.
        """
        now = dict[PeerId, Steps]()
        for peer in live:
            found = step(self.rtt(peer), LEAST_RTT), step(rates.get(peer, 0.0), LEAST_RATE)
            if any(found):
                announced = self._announced.get(peer, (0, 0))
                now[peer] = _either(announced[0], found[0]), _either(announced[1], found[1])
        nearest = sorted((peer for peer in now if now[peer][0]), key=lambda peer: (now[peer][0], peer))[:NEAREST]
        rest = sorted(now.keys() - set(nearest), key=lambda peer: (peer not in self._announced, peer))
        self._announced = {peer: now[peer] for peer in [*nearest, *rest[: MAX_SPANS - len(nearest)]]}
        return tuple(Span(peer[:SPAN_PREFIX], *steps) for peer, steps in sorted(self._announced.items()))


def _either(announced: int, found: int) -> int:
    """Return the announced step, or the new one if the announced is unknown or far off."""
    return announced if announced and found and abs(found - announced) < LEAST_CHANGE else found
