"""Who is asked for results that are missing: a part of each of some sources, and never twice in a row the same one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from thinwire.swarm.protocol import PeerId

MAX_SOURCES = 4
"""Peers that a repair asks at once."""


class Repair:
    """Remembers who was asked for what. `at` is when that was last, `tries` how often it was."""

    def __init__(self) -> None:
        self.at = 0.0
        self.tries = 0
        self._asked: dict[int, PeerId] = {}

    def plan(self, missing: Iterable[int], sources: Sequence[PeerId], now: float) -> dict[PeerId, list[int]]:
        """Which source to ask for which chunks; there must be one."""
        self.at = now
        first, self.tries = self.tries, self.tries + 1
        chosen = [sources[(first + i) % len(sources)] for i in range(min(MAX_SOURCES, len(sources)))]
        parts: dict[PeerId, list[int]] = {}
        for at, index in enumerate(missing):
            peer = chosen[at % len(chosen)]
            if peer == self._asked.get(index):
                peer = chosen[(at + 1) % len(chosen)]  # it has not answered
            self._asked[index] = peer
            parts.setdefault(peer, []).append(index)
        return parts

    def owed(self, peer: PeerId) -> set[int]:
        """What this source was asked for last."""
        return {index for index, one in self._asked.items() if one == peer}
