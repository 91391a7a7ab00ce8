"""What peers have measured of their links, as they announce it: in steps of an eighth of a doubling, small changes are none.

A peer can lie about its own links only, and about how near somebody is only together with that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from .ballots import MAX_STEP, SPAN_PREFIX, Span
from .protocol import PeerId

DOUBLING = 8
"""Steps that a doubling has."""

LEAST_RTT = 1e-4
"""Seconds of the first step of round-trip times; nearer is as near. The last one is a day."""

LEAST_RATE = 1024.0
"""Bytes/s of the first step of rates; the last one is 2**40."""


class Measure(NamedTuple):
    """A link: round-trip time in seconds, and the bytes/s that its way carries from one end to the other. 0: not known."""

    rtt: float = 0.0
    rate: float = 0.0


Links: TypeAlias = Callable[[PeerId, PeerId], Measure]
"""What is known of the link from one peer to another."""


def step(value: float, least: float) -> int:
    """The nearest step; 0 for what is not above 0."""
    if not (value > 0 and math.isfinite(value)):
        return 0
    return min(MAX_STEP, max(1, 1 + round(DOUBLING * (math.log2(value) - math.log2(least)))))


def value(step: int, least: float) -> float:
    """What a step stands for."""
    return float(least * 2.0 ** ((step - 1) / DOUBLING)) if step else 0.0


def links(announced: Mapping[PeerId, Sequence[Span]]) -> Links:
    """What is known by these announcements.

    The round-trip time of two peers is the longer of what both say: who says that it is near somebody needs that one's word.
    The rate is the sender's word, who alone knows whether it had more to send.
    """
    said = {peer: {span.peer: span for span in spans} for peer, spans in announced.items()}

    def between(sender: PeerId, receiver: PeerId) -> Measure:
        there = said.get(sender, {}).get(receiver[:SPAN_PREFIX])
        back = said.get(receiver, {}).get(sender[:SPAN_PREFIX])
        rtt = max(there.rtt, back.rtt) if there and back and there.rtt and back.rtt else 0
        return Measure(value(rtt, LEAST_RTT), value(there.rate, LEAST_RATE) if there else 0.0)

    return between
