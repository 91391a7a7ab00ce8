"""Doubt: how long a suspected peer may take to answer for itself, and how far to trust accusers, and ourselves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .preset import Preset
from .protocol import PeerId


@dataclass(slots=True)
class Suspicion:
    """One suspected peer. Lifeguard's local health aware suspicion: each accuser shortens it, logarithmically.

    `shortest`, `longest`: seconds; `needed`: accusers for the shortest (0: as if they were there). `lead`: we look for
    ourselves this long before the shortest time is up, and note that in `checked`. `failed_at`: when a probe of ours last
    failed. `asked`: time is up, and a last probe is to decide. `accusers` keeps the order of arrival.
    """

    start: float
    shortest: float
    longest: float
    needed: int
    lead: float
    failed_at: float = -math.inf
    checked: bool = False
    asked: bool = False
    accusers: dict[PeerId, None] = field(default_factory=dict)

    @classmethod
    def begin(cls, preset: Preset, n: int, now: float) -> Suspicion:
        """In a swarm of n that has too few others to confirm anything, the shortest time applies at once."""
        shortest = preset.suspicion_min(n)
        needed = preset.confirmations if n - 2 >= preset.confirmations else 0
        return cls(now, shortest, preset.suspicion_stretch * shortest, needed, preset.probe_period)

    @property
    def deadline(self) -> float:
        if not self.needed:
            return self.start + self.shortest
        share = math.log(len(self.accusers) + 1) / math.log(self.needed + 1)
        return self.start + max(self.shortest, self.longest - (self.longest - self.shortest) * share)

    @property
    def check_at(self) -> float:
        return self.start + self.shortest - self.lead

    @property
    def next_step(self) -> float:
        """When there is something to do about it, as things stand."""
        if self.asked:
            return math.inf
        return self.deadline if self.checked else min(self.deadline, self.check_at)

    @property
    def confirmed(self) -> bool:
        """Enough accusers to believe it without evidence of our own. Never so in a tiny swarm: one liar would do."""
        return self.needed > 0 and len(self.accusers) >= self.needed

    def evident(self, now: float) -> bool:
        """A probe of ours has failed, and lately: the suspect may have answered since, and its answer been lost to us."""
        return self.failed_at > now - self.shortest / 2


class Awareness:
    """Our own health, 0 (well) to `most`: the slower we are ourselves, the more time we give others (Lifeguard)."""

    def __init__(self, most: int) -> None:
        self.score = 0
        self._most = most

    def add(self, delta: int) -> None:
        self.score = min(self._most, max(0, self.score + delta))


@dataclass(slots=True)
class Bucket:
    """A token bucket: `rate` per second, at most `depth` saved up."""

    rate: float
    depth: float
    level: float
    at: float

    def _refill(self, now: float) -> None:
        self.level = min(self.depth, self.level + self.rate * max(0.0, now - self.at))
        self.at = max(self.at, now)

    def take(self, now: float) -> bool:
        """Take one token, if there is one."""
        self._refill(now)
        if self.level < 1.0:
            return False
        self.level -= 1.0
        return True

    def empty(self, now: float) -> bool:
        self._refill(now)
        return self.level < 1.0


class Docket:
    """Who accuses whom: open accusations per accuser, and the credit of accusers."""

    def __init__(self, preset: Preset) -> None:
        self._preset = preset
        self._open: dict[PeerId, int] = {}
        self._credit: dict[PeerId, Bucket] = {}

    def admits(self, accuser: PeerId, now: float) -> bool:
        """Whether another accusation of this accuser may count."""
        if self._open.get(accuser, 0) >= self._preset.open_accusations:
            return False
        return accuser not in self._credit or not self._credit[accuser].empty(now)

    def open(self, accuser: PeerId) -> None:
        self._open[accuser] = self._open.get(accuser, 0) + 1

    def close(self, suspicion: Suspicion, *, refuted: bool, now: float) -> None:
        """A suspicion ended; when the suspect has refuted it, its accusers lose credit."""
        for accuser in suspicion.accusers:
            self._open[accuser] -= 1
            if not self._open[accuser]:
                del self._open[accuser]
            if refuted:
                depth = float(self._preset.credit)
                fresh = Bucket(1.0 / self._preset.credit_period, depth, depth, now)
                self._credit.setdefault(accuser, fresh).take(now)
