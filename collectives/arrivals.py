"""How one peer's data came in one round, and how that compares with what others' did.

Three kinds of rounds tell different things. Where all send at once, all of one round are compared with each other. Where one
sends to us in a round, a partner or the one before us in a ring, it is compared with those that did in the last RECENT rounds.
What comes in one piece, or a few, has no usual gap: it is timed from when the round opened, some round trips allowed for.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low

from thinwire.swarm.protocol import PeerId

OTHERS = 2
"""Fewest others to compare with."""

RECENT = 16
"""Rounds of one sender each in which others are looked for."""

SLOW = 4.0
"""An upload that is so many times slower than the others' stands out,"""

FELT = 0.2
"""when it took so many seconds,"""

TRIPS = 4.0
"""and so many round trips where it is one piece, which is as long under way however fast the link is."""

FEW = 3
"""With fewer gaps between chunks than that nobody can tell a usual one: they are timed as one piece."""

STALL, STALLS = 0.15, 8.0
"""A gap between two chunks of so many seconds, and so many times the usual one, is a stall: something was sent again."""

LATE = 3.0
"""So is one piece that comes STALL later than so many times what is usual of its sender,"""

KNOWN = 6
"""of which so many rounds are known."""

MEMORY = 16
"""Rounds of each sender of which that is known."""

AWAY = 256
"""Senders of which that is kept."""


@dataclass(slots=True)
class Flow:
    """Chunks of one peer in one round. `start`: when it was asked for, None: not known. nbytes: of all but the first."""

    start: float | None
    first: float
    last: float
    head: int
    nbytes: int = 0
    gaps: list[float] = field(default_factory=list)

    def add(self, nbytes: int, now: float) -> None:
        """One more chunk."""
        self.gaps.append(now - self.last)
        self.nbytes, self.last = self.nbytes + nbytes, now


@dataclass(frozen=True, slots=True)
class Arrival:
    """What one flow shows. `stalled`, `slow`: None where nobody can tell. `single`: it was one piece."""

    single: bool
    stalled: bool | None
    slow: bool | None
    stall: str
    pace: str


class Arrivals:
    """What is remembered of earlier rounds."""

    def __init__(self) -> None:
        self._recent: deque[tuple[PeerId, bool, float]] = deque(maxlen=RECENT)
        self._delays: OrderedDict[PeerId, deque[float]] = OrderedDict()

    def judge(self, flows: Mapping[PeerId, Flow], trips: Mapping[PeerId, float]) -> dict[PeerId, Arrival]:
        """What the flows of one round show. `trips`: seconds to each sender and back, over an idle link."""
        pieces = {peer: flow for peer, flow in flows.items() if len(flow.gaps) < FEW and flow.start is not None}
        whole = {peer: flow for peer, flow in flows.items() if peer not in pieces and flow.gaps}
        found = self._several(whole) | self._single(pieces, trips)
        return {peer: found[peer] for peer in flows if peer in found}

    def _several(self, flows: Mapping[PeerId, Flow]) -> dict[PeerId, Arrival]:
        rates = {peer: flow.nbytes / max(1e-3, flow.last - flow.first) for peer, flow in flows.items()}
        gaps = [gap for flow in flows.values() for gap in flow.gaps]
        usual, found = median(gaps) if gaps else 0.0, {}
        for peer, flow in flows.items():
            others = self._others(peer, rates, single=False)
            if len(others) < OTHERS:
                continue
            # Where most chunks are late, it is the rate that is low.
            often = median(flow.gaps)
            stalled = max(flow.gaps) > max(STALL, STALLS * usual) and often < STALL
            slow = SLOW * rates[peer] < median_low(others) and flow.last - flow.first > FELT
            stall = f"chunks come every {1e3 * often:.0f} ms and stall for {max(flow.gaps):.1f} s"
            found[peer] = Arrival(False, stalled, slow and not stalled, stall, _pace(rates[peer], others))
        self._remember(rates, single=False)
        return found

    def _single(self, flows: Mapping[PeerId, Flow], trips: Mapping[PeerId, float]) -> dict[PeerId, Arrival]:
        took = {peer: max(0.0, flow.last - (flow.start or 0.0)) for peer, flow in flows.items()}
        if len(took) == 1 and not any(took.values()):
            return {}  # it is its own sign that the round opened
        late = {peer: took[peer] > STALL + LATE * self._usual(peer, took[peer]) for peer in flows}
        rates = {peer: (flow.head + flow.nbytes) / max(1e-3, took[peer]) for peer, flow in flows.items()}
        found = {}
        for peer in flows:
            others = self._others(peer, rates, single=True)
            if len(others) < OTHERS:
                continue
            same = [late[other] for other in flows if other != peer]
            # Where most are late, it is we that are.
            stalled = late[peer] and 2 * sum(same) < max(1, len(same))
            slow = SLOW * rates[peer] < median_low(others) and took[peer] > FELT + TRIPS * trips.get(peer, 0.0)
            known = len(self._delays.get(peer, ())) >= KNOWN
            usual = self._usual(peer, took[peer])
            stall = f"what comes within {1e3 * usual:.0f} ms of the round's beginning came after {took[peer]:.1f} s"
            pace = _pace(rates[peer], others)
            found[peer] = Arrival(True, stalled if known else None, slow and not late[peer], stall, pace)
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
        """What to compare with: the others of this round, or the last of each other in the rounds before."""
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
