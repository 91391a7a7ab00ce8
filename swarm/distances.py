"""How far others are, told from probes that are answered anyway; and what of it others are told."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import TypeAlias

from .ballots import MAX_SPANS, SPAN_PREFIX, Span
from .measures import LEAST_RATE, LEAST_RTT, step
from .protocol import PeerId

SAMPLES = 8
"""Round trips of one peer that count: the shortest of them, because links that are busy only ever look longer."""

NEAREST = 16
"""Of the links that are told, so many are the shortest; the others are those that were told before, then new ones."""

NEWS = 3
"""Steps by which a measure must have changed to be told anew: a third, more or less. Plans are to stay as they are."""

Steps: TypeAlias = tuple[int, int]
"""Of the round-trip time and of the rate; 0: not known."""


class Distances:
    """One peer's, to those that it probes."""

    def __init__(self) -> None:
        self._trips: dict[PeerId, deque[float]] = {}
        self._told: dict[PeerId, Steps] = {}

    def add(self, peer: PeerId, seconds: float) -> None:
        """A peer has answered after so many seconds."""
        self._trips.setdefault(peer, deque(maxlen=SAMPLES)).append(seconds)

    def forget(self, peer: PeerId) -> None:
        """A peer is no more."""
        self._trips.pop(peer, None)

    def rtt(self, peer: PeerId) -> float:
        """Seconds to a peer and back, over an idle link; 0.0: not known."""
        return min(self._trips.get(peer, ()), default=0.0)

    def spans(self, live: Collection[PeerId], rates: Mapping[PeerId, float]) -> tuple[Span, ...]:
        """What to announce of our links to these peers; `rates`: bytes/s of the ways to some of them.

        What has changed by little is told as before.
        """
        now = dict[PeerId, Steps]()
        for peer in live:
            found = step(self.rtt(peer), LEAST_RTT), step(rates.get(peer, 0.0), LEAST_RATE)
            if any(found):
                told = self._told.get(peer, (0, 0))
                now[peer] = _either(told[0], found[0]), _either(told[1], found[1])
        nearest = sorted((peer for peer in now if now[peer][0]), key=lambda peer: (now[peer][0], peer))[:NEAREST]
        rest = sorted(now.keys() - set(nearest), key=lambda peer: (peer not in self._told, peer))
        self._told = {peer: now[peer] for peer in [*nearest, *rest[: MAX_SPANS - len(nearest)]]}
        return tuple(Span(peer[:SPAN_PREFIX], *steps) for peer, steps in sorted(self._told.items()))


def _either(told: int, found: int) -> int:
    """What was told, but where it was not known or is far off."""
    return told if told and found and abs(found - told) < NEWS else found
