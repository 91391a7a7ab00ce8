"""Which peer of a stage takes the next micro-batch where there is no plan: interleaved weighted round robin.

SWARM (Ryabinin et al. 2023, arXiv 2301.11913, section 3.2): whoever has been given least time so far is next, and what it is
given is counted in seconds at its own measured speed; so load follows speed.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

Peer = TypeVar("Peer", bound=Hashable)

SMOOTHING = 0.1
"""Weight of the newest measurement."""

BACKWARD = 2.5
"""A backward counts as so many forwards (with what is computed once more for it)."""

UNKNOWN = 1.0
"""Samples per second of everybody before anybody is measured; then, of who is not, the mean of the others."""


class Speed:
    """Moving mean of samples per second, free of the bias of its beginning."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, size: float, seconds: float) -> None:
        """So many samples took so long."""
        self._sum += SMOOTHING * (size / max(seconds, 1e-6) - self._sum)
        self._count += 1

    @property
    def known(self) -> bool:
        return self._count > 0

    @property
    def value(self) -> float:
        return max(self._sum / (1 - (1 - SMOOTHING) ** self._count), 1e-6)


class Wiring(Generic[Peer]):
    """One stage's peers as one sender sees them. No clock: seconds are told, and turns are virtual time."""

    def __init__(self) -> None:
        self._turn: dict[Peer, tuple[float, int]] = {}
        self._speed: dict[Peer, Speed] = {}
        self._banned: set[Peer] = set()
        self._ties = 0

    @property
    def peers(self) -> frozenset[Peer]:
        """Everybody, the banned too."""
        return frozenset(self._turn)

    def join(self, peer: Peer) -> None:
        """It enters at the least virtual time that anybody has; who is known already stays where it is."""
        if peer not in self._turn:
            self._speed[peer] = Speed()
            self._enter(peer, 0.0)

    def leave(self, peer: Peer) -> None:
        self._turn.pop(peer, None)
        self._speed.pop(peer, None)
        self._banned.discard(peer)

    def ban(self, peer: Peer) -> None:
        """It failed: it gets nothing until its record is new."""
        if peer in self._turn:
            self._banned.add(peer)

    def refresh(self, peer: Peer) -> None:
        """Its record is new: it may work again, and does not make up for the time it was away."""
        if peer in self._banned:
            self._banned.discard(peer)
            self._enter(peer, self._turn[peer][0])

    def choose(self, size: float, *, backward: bool = False, but: Collection[Peer] = ()) -> Peer | None:
        """Who takes `size` samples; None when nobody may. `but`: those that this micro-batch has failed on."""
        able = [peer for peer in self._turn if peer not in self._banned and peer not in but]
        if not able:
            return None
        peer = min(able, key=self._turn.__getitem__)
        seconds = size * (BACKWARD if backward else 1.0) / self.speed(peer)
        self._turn[peer] = (self._turn[peer][0] + seconds, self._tie())
        return peer

    def done(self, peer: Peer, size: float, seconds: float, *, backward: bool = False) -> None:
        """`peer` was `seconds` busy with `size` samples."""
        if peer not in self._speed:
            return
        first = not any(speed.known for speed in self._speed.values())
        self._speed[peer].add(size * (BACKWARD if backward else 1.0), seconds)
        if first:  # what was given so far was counted in seconds that nobody had measured
            scale = UNKNOWN / self._speed[peer].value
            self._turn = {other: (turn * scale, tie) for other, (turn, tie) in self._turn.items()}

    def speed(self, peer: Peer) -> float:
        """Samples per second forward, as far as is known."""
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
