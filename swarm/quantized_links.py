"""Shared link data in quantized form: steps of an eighth of a doubling.

A peer can lie about its own links only, and two peers must collude to appear nearer to each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from thinwire.swarm.messages.announcement import MAX_STEP, SPAN_PREFIX, Span
from thinwire.swarm.messages.registry import PeerId

DOUBLING = 8
"""Number of steps per doubling."""

LEAST_RTT = 1e-4
"""Round-trip time of the first step in seconds; shorter times are rounded up. The last step is a day."""

LEAST_RATE = 1024.0
"""Rate of the first step in bytes/s; the last step is an eighth of a doubling below CEILING."""

CEILING = 2**40
"""Rate in bytes/s; faster links are announced as this rate."""


class Measure(NamedTuple):
    """Measurement of a link: round-trip time in seconds, and rate in bytes/s from one end to the other.

    0 means unknown.
    """

    rtt: float = 0.0
    rate: float = 0.0


Links: TypeAlias = Callable[[PeerId, PeerId], Measure]
"""Function that returns the known data of the link from one peer to another."""


def step(value: float, least: float) -> int:
    """Return the nearest step, or 0 for a value that is not > 0."""
    if not (value > 0 and math.isfinite(value)):
        return 0
    return min(MAX_STEP, max(1, 1 + round(DOUBLING * (math.log2(value) - math.log2(least)))))


def value(step: int, least: float) -> float:
    """Return the value of a step; 0.0 for step 0."""
    return float(least * 2.0 ** ((step - 1) / DOUBLING)) if step else 0.0


def links(announced: Mapping[PeerId, Sequence[Span]]) -> Links:
    """Return the link data that follows from these announcements.

    The round-trip time of two peers is the longer of their two announcements, so a peer that claims to be near another
    needs the other's confirmation. The rate is the one announced by the sender, since only the sender knows whether it
    had more to send.
    """
    announced_spans = {peer: {span.peer: span for span in spans} for peer, spans in announced.items()}

    def between(sender: PeerId, receiver: PeerId) -> Measure:
        there = announced_spans.get(sender, {}).get(receiver[:SPAN_PREFIX])
        back = announced_spans.get(receiver, {}).get(sender[:SPAN_PREFIX])
        rtt = max(there.rtt, back.rtt) if there and back and there.rtt and back.rtt else 0
        return Measure(value(rtt, LEAST_RTT), value(there.rate, LEAST_RATE) if there else 0.0)

    return between
