"""Arrival of the data of one peer in one round, compared with that of others.

Three kinds of rounds give different information. If all peers send at once, those of one round are compared with each
other. If only one peer sends to us in a round (a partner, or the predecessor in a ring), it is compared with the
senders of the last RECENT rounds. Data that comes in one or a few pieces has no typical gap: it is timed from the
opening of the round, with an allowance of some round trips.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low

from thinwire.swarm.messages.registry import PeerId

OTHERS = 2
"""Minimum number of others to compare with."""

RECENT = 16
"""Number of recent rounds with one sender each in which others are looked up."""

SLOW = 4.0
"""An upload is slow if it is this factor slower than the others', and takes long (FELT, TRIPS)."""

FELT = 0.2
"""Minimum duration in seconds of a slow upload."""

TRIPS = 4.0
"""Additional minimum duration of a single piece, in round trips.

The latency of a single piece does not depend on the rate of the link.
"""

FEW = 3
"""Minimum number of gaps between chunks to know a typical one.

With fewer gaps, the chunks are timed as one piece.
"""

STALL, STALLS = 0.15, 8.0
"""A gap between two chunks of more than STALL seconds and STALLS times the typical one is a stall.

It means that something was retransmitted.
"""

LATE = 3.0
"""A single piece is late if it comes STALL seconds after this multiple of its sender's usual time."""

KNOWN = 6
"""Minimum number of known rounds of a sender to judge a single late piece."""

MEMORY = 16
"""Number of rounds per sender whose times are stored."""

AWAY = 256
"""Number of senders whose times are stored."""


@dataclass(slots=True)
class ChunkFlow:
    """Chunks of one peer in one round.

    start: time of the request, None if unknown. head: bytes of the first chunk. nbytes: bytes of all others.
    """

    start: float | None
    first: float
    last: float
    head: int
    nbytes: int = 0
    gaps: list[float] = field(default_factory=list)

    def add(self, nbytes: int, now: float) -> None:
        """Add one more chunk."""
        self.gaps.append(now - self.last)
        self.nbytes, self.last = self.nbytes + nbytes, now


@dataclass(frozen=True, slots=True)
class ChunkArrival:
    """Evaluation of one flow. `stalled`, `slow`: None if unknown. `single`: it was one piece."""

    single: bool
    stalled: bool | None
    slow: bool | None
    stall: str
    pace: str


class ArrivalTimes:
    """Memory of earlier rounds, against which flows are judged."""

    def __init__(self) -> None:
        self._recent: deque[tuple[PeerId, bool, float]] = deque(maxlen=RECENT)
        self._delays: OrderedDict[PeerId, deque[float]] = OrderedDict()

    def judge(self, flows: Mapping[PeerId, ChunkFlow], trips: Mapping[PeerId, float]) -> dict[PeerId, ChunkArrival]:
        """Evaluate the flows of one round. trips: round-trip times to the senders over idle links, in seconds."""
        pieces = {peer: flow for peer, flow in flows.items() if len(flow.gaps) < FEW and flow.start is not None}
        whole = {peer: flow for peer, flow in flows.items() if peer not in pieces and flow.gaps}
        found = self._several(whole) | self._single(pieces, trips)
        return {peer: found[peer] for peer in flows if peer in found}

    def _several(self, flows: Mapping[PeerId, ChunkFlow]) -> dict[PeerId, ChunkArrival]:
        rates = {peer: flow.nbytes / max(1e-3, flow.last - flow.first) for peer, flow in flows.items()}
        gaps = [gap for flow in flows.values() for gap in flow.gaps]
        usual, found = median(gaps) if gaps else 0.0, {}
        for peer, flow in flows.items():
            others = self._others(peer, rates, single=False)
            if len(others) < OTHERS:
                continue
            # If most chunks are late, the rate is low and there is no stall.
            often = median(flow.gaps)
            stalled = max(flow.gaps) > max(STALL, STALLS * usual) and often < STALL
            slow = SLOW * rates[peer] < median_low(others) and flow.last - flow.first > FELT
            stall = f"chunks come every {1e3 * often:.0f} ms and stall for {max(flow.gaps):.1f} s"
            found[peer] = ChunkArrival(False, stalled, slow and not stalled, stall, _pace(rates[peer], others))
        self._remember(rates, single=False)
        return found

    def _single(self, flows: Mapping[PeerId, ChunkFlow], trips: Mapping[PeerId, float]) -> dict[PeerId, ChunkArrival]:
        took = {peer: max(0.0, flow.last - (flow.start or 0.0)) for peer, flow in flows.items()}
        if len(took) == 1 and not any(took.values()):
            return {}  # a single flow defines the opening of the round itself
        late = {peer: took[peer] > STALL + LATE * self._usual(peer, took[peer]) for peer in flows}
        rates = {peer: (flow.head + flow.nbytes) / max(1e-3, took[peer]) for peer, flow in flows.items()}
        found = {}
        for peer in flows:
            others = self._others(peer, rates, single=True)
            if len(others) < OTHERS:
                continue
            same = [late[other] for other in flows if other != peer]
            # If most are late, this peer itself is the cause.
            stalled = late[peer] and 2 * sum(same) < max(1, len(same))
            slow = SLOW * rates[peer] < median_low(others) and took[peer] > FELT + TRIPS * trips.get(peer, 0.0)
            known = len(self._delays.get(peer, ())) >= KNOWN
            usual = self._usual(peer, took[peer])
            stall = f"chunks that usually arrive within {1e3 * usual:.0f} ms of the round came after {took[peer]:.1f} s"
            pace = _pace(rates[peer], others)
            found[peer] = ChunkArrival(True, stalled if known else None, slow and not late[peer], stall, pace)
        for peer, seconds in took.items():
            self._delays.setdefault(peer, deque(maxlen=MEMORY)).append(seconds)
            self._delays.move_to_end(peer)
        while len(self._delays) > AWAY:
            self._delays.popitem(last=False)
        self._remember(rates, single=True)
        return found

    def _usual(self, peer: PeerId, otherwise: float) -> float:
        known = self._delays.get(peer)
        return median_low(known) if known else otherwise

    def _others(self, peer: PeerId, rates: Mapping[PeerId, float], *, single: bool) -> Sequence[float]:
        """Return the rates to compare with: the others of this round, or the last of each other before."""
        others = [rate for other, rate in rates.items() if other != peer]
        if len(others) >= OTHERS:
            return others
        known = {other: rate for other, one, rate in self._recent if one == single} | dict(rates)
        return [rate for other, rate in known.items() if other != peer]

    def _remember(self, rates: Mapping[PeerId, float], *, single: bool) -> None:
        if len(rates) <= OTHERS:
            self._recent.extend((peer, single, rate) for peer, rate in rates.items())


def _pace(rate: float, others: Sequence[float]) -> str:
    return f"upload {_rate(rate)}, the others' median {_rate(median_low(others))}"


def _rate(value: float) -> str:
    return f"{value / 1e6:.1f} MB/s" if value >= 1e5 else f"{value / 1e3:.1f} kB/s"
