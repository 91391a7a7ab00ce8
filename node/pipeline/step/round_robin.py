"""Choice of a stage's peer for the next micro-batch without a plan: weighted round robin.

SWARM (Ryabinin et al. 2023, arXiv 2301.11913, section 3.2): the peer with the least assigned time is next; assigned
time is counted in seconds at the peer's own measured speed, so load follows speed.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

Peer = TypeVar("Peer", bound=Hashable)

SMOOTHING = 0.1
"""Weight of the newest measurement."""

BACKWARD = 2.5
"""Cost of a backward pass in forward passes, including what is recomputed for it."""

UNKNOWN = 1.0
"""Samples per second of unmeasured peers; once peers are measured, the mean of these is used."""


class SpeedEstimate:
    """Moving mean of samples per second, without the bias of its start."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, size: float, seconds: float) -> None:
        """Add a measurement: `size` samples took `seconds`."""
        self._sum += SMOOTHING * (size / max(seconds, 1e-6) - self._sum)
        self._count += 1

    @property
    def known(self) -> bool:
        return self._count > 0

    @property
    def value(self) -> float:
        return max(self._sum / (1 - (1 - SMOOTHING) ** self._count), 1e-6)


class RoundRobin(Generic[Peer]):
    """Peers of one stage as one sender sees them. Callers pass seconds; turns are virtual time."""

    def __init__(self) -> None:
        self._turn: dict[Peer, tuple[float, int]] = {}
        self._speed: dict[Peer, SpeedEstimate] = {}
        self._banned: set[Peer] = set()
        self._ties = 0

    @property
    def peers(self) -> frozenset[Peer]:
        """All peers, including banned ones."""
        return frozenset(self._turn)

    def join(self, peer: Peer) -> None:
        """Add a peer at the least virtual time of all; a known peer keeps its own."""
        if peer not in self._turn:
            self._speed[peer] = SpeedEstimate()
            self._enter(peer, 0.0)

    def leave(self, peer: Peer) -> None:
        self._turn.pop(peer, None)
        self._speed.pop(peer, None)
        self._banned.discard(peer)

    def ban(self, peer: Peer) -> None:
        """Exclude a peer that failed until `refresh`."""
        if peer in self._turn:
            self._banned.add(peer)

    def refresh(self, peer: Peer) -> None:
        """Admit a peer with a new record again; it does not make up for the time away."""
        if peer in self._banned:
            self._banned.discard(peer)
            self._enter(peer, self._turn[peer][0])

    def choose(self, size: float, *, backward: bool = False, but: Collection[Peer] = ()) -> Peer | None:
        """Return the peer for `size` samples, not one of `but`, where it has failed; None if there is none."""
        able = [peer for peer in self._turn if peer not in self._banned and peer not in but]
        if not able:
            return None
        peer = min(able, key=self._turn.__getitem__)
        seconds = size * (BACKWARD if backward else 1.0) / self.speed(peer)
        self._turn[peer] = (self._turn[peer][0] + seconds, self._tie())
        return peer

    def done(self, peer: Peer, size: float, seconds: float, *, backward: bool = False) -> None:
        """Record that `peer` was busy with `size` samples for `seconds`."""
        if peer not in self._speed:
            return
        first = not any(speed.known for speed in self._speed.values())
        self._speed[peer].add(size * (BACKWARD if backward else 1.0), seconds)
        if first:  # Assigned time so far was counted at an unmeasured speed.
            scale = UNKNOWN / self._speed[peer].value
            self._turn = {other: (turn * scale, tie) for other, (turn, tie) in self._turn.items()}

    def speed(self, peer: Peer) -> float:
        """Return the forward speed in samples per second, as far as it is known."""
        if self._speed[peer].known:
            return self._speed[peer].value
        known = [speed.value for speed in self._speed.values() if speed.known]
        return sum(known) / len(known) if known else UNKNOWN

    def _enter(self, peer: Peer, least: float) -> None:
        others = [turn for other, (turn, _) in self._turn.items() if other != peer and other not in self._banned]
        self._turn[peer] = (max(least, min(others, default=least)), self._tie())

    def _tie(self) -> int:
        self._ties += 1
        return self._ties
