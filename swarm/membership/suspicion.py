"""Suspicion: time for a suspected peer to refute, and limits on the trust in accusers and ourselves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from thinwire.swarm.membership.presets import Preset
from thinwire.swarm.messages.registry import PeerId


@dataclass(slots=True)
class Suspicion:
    """Suspicion of one peer: Lifeguard's local health aware suspicion.

    Each accuser shortens it, logarithmically. shortest, longest: seconds. needed: number of accusers for the shortest
    time (0: the shortest time applies at once). lead: time before the end of the shortest time at which this peer
    probes the suspect, which sets `checked`. failed_at: time of the last failure of our own probe. final_probe: the time is
    over, and a final probe is to decide. accusers: in order of arrival.
    """

    start: float
    shortest: float
    longest: float
    needed: int
    lead: float
    failed_at: float = -math.inf
    checked: bool = False
    final_probe: bool = False
    accusers: dict[PeerId, None] = field(default_factory=dict)

    @classmethod
    def begin(cls, preset: Preset, n: int, now: float) -> Suspicion:
        """Start a suspicion in a swarm of n peers.

        If there are too few other peers to confirm anything, the shortest time applies at once.
        """
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
        """Time of the next action on this suspicion, as things stand."""
        if self.final_probe:
            return math.inf
        return self.deadline if self.checked else min(self.deadline, self.check_at)

    @property
    def confirmed(self) -> bool:
        """True if enough peers accuse the suspect to believe it without evidence of our own.

        Never true in a tiny swarm, where one liar would be enough.
        """
        return self.needed > 0 and len(self.accusers) >= self.needed

    def has_own_evidence(self, now: float) -> bool:
        """Return True if a probe of ours has failed recently.

        After an older failure, the suspect may have answered, and its answer may have been lost.
        """
        return self.failed_at > now - self.shortest / 2


class Awareness:
    """Health score of this peer, 0 (healthy) to `most`: a slow peer gives others more time (Lifeguard)."""

    def __init__(self, most: int) -> None:
        self.score = 0
        self._most = most

    def add(self, delta: int) -> None:
        self.score = min(self._most, max(0, self.score + delta))


@dataclass(slots=True)
class TokenBucket:
    """Token bucket that gains `rate` tokens per second and holds at most `depth`."""

    rate: float
    depth: float
    level: float
    at: float

    def _refill(self, now: float) -> None:
        self.level = min(self.depth, self.level + self.rate * max(0.0, now - self.at))
        self.at = max(self.at, now)

    def take(self, now: float) -> bool:
        """Take one token. Returns False if there is none."""
        self._refill(now)
        if self.level < 1.0:
            return False
        self.level -= 1.0
        return True

    def empty(self, now: float) -> bool:
        self._refill(now)
        return self.level < 1.0


class AccuserCredits:
    """Open accusations per accuser, and the credit of each accuser."""

    def __init__(self, preset: Preset) -> None:
        self._preset = preset
        self._open: dict[PeerId, int] = {}
        self._credit: dict[PeerId, TokenBucket] = {}

    def admits(self, accuser: PeerId, now: float) -> bool:
        """Return True if one more accusation of this accuser may count."""
        if self._open.get(accuser, 0) >= self._preset.open_accusations:
            return False
        return accuser not in self._credit or not self._credit[accuser].empty(now)

    def open(self, accuser: PeerId) -> None:
        self._open[accuser] = self._open.get(accuser, 0) + 1

    def close(self, suspicion: Suspicion, *, refuted: bool, now: float) -> None:
        """End a suspicion. If the suspect has refuted it, its accusers lose credit."""
        for accuser in suspicion.accusers:
            self._open[accuser] -= 1
            if not self._open[accuser]:
                del self._open[accuser]
            if refuted:
                depth = float(self._preset.credit)
                fresh = TokenBucket(1.0 / self._preset.credit_period, depth, depth, now)
                self._credit.setdefault(accuser, fresh).take(now)


class Suspects:
    """Open suspicions by peer, with limits on the accusers of each."""

    def __init__(self, preset: Preset) -> None:
        self._preset = preset
        self._credits = AccuserCredits(preset)
        self._open: dict[PeerId, Suspicion] = {}

    def __len__(self) -> int:
        return len(self._open)

    def admits(self, peer: PeerId, accuser: PeerId, now: float) -> bool:
        """Return True if an accusation of a live peer may count."""
        suspicion = self._open.get(peer)
        if suspicion is not None:
            if accuser in suspicion.accusers or len(suspicion.accusers) >= self._preset.confirmations:
                return False
        return self._credits.admits(accuser, now)

    def begin(self, peer: PeerId, size: int, now: float) -> bool:
        """Suspect a peer of a swarm with `size` peers; return False if it is suspected already."""
        if peer in self._open:
            return False
        self._open[peer] = Suspicion.begin(self._preset, size, now)
        return True

    def accuse(self, peer: PeerId, accuser: PeerId) -> None:
        """Add an accuser of a suspected peer."""
        self._open[peer].accusers[accuser] = None
        self._credits.open(accuser)

    def on_probe_failed(self, peer: PeerId, now: float) -> None:
        """Note that our own probe of a suspected peer has failed."""
        self._open[peer].failed_at = now

    def on_answer(self, peer: PeerId) -> bool:
        """Clear our own evidence against a peer; return True if a final probe was to decide its suspicion."""
        suspicion = self._open.get(peer)
        if suspicion is None:
            return False
        suspicion.failed_at = -math.inf
        return suspicion.final_probe

    def due(self, now: float) -> tuple[list[PeerId], list[PeerId]]:
        """Return the peers that are dead, and the peers to probe now because evidence is missing.

        Every peer probes each suspect once more before the shortest time is over. This makes up for refutations that
        were lost in transit, and for missing accusers.
        """
        dead: list[PeerId] = []
        doubtful: list[PeerId] = []
        for peer, suspicion in self._open.items():
            if suspicion.deadline <= now:
                if suspicion.has_own_evidence(now) or suspicion.confirmed:
                    dead.append(peer)
                elif not suspicion.final_probe:
                    suspicion.final_probe = True
                    doubtful.append(peer)
            elif not suspicion.checked and suspicion.check_at <= now:
                suspicion.checked = True
                doubtful.append(peer)
        return dead, doubtful

    def end(self, peer: PeerId, now: float, *, refuted: bool) -> Suspicion | None:
        """End the suspicion of a peer, if there is one, and return it."""
        suspicion = self._open.pop(peer, None)
        if suspicion is not None:
            self._credits.close(suspicion, refuted=refuted, now=now)
        return suspicion

    def deadline(self) -> float:
        """Return the time of the next action on a suspicion, as things stand."""
        return min((suspicion.next_step for suspicion in self._open.values()), default=math.inf)

    def shift(self, lag: float, now: float) -> None:
        """Exclude the last `lag` seconds, in which we did not listen, from the time of suspicions."""
        for suspicion in self._open.values():
            # A suspicion may have begun just now, with an accusation that arrived during the stall.
            suspicion.start = min(suspicion.start + lag, now)
