"""Requests for missing chunks, divided among the peers that have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from thinwire.swarm.messages.registry import PeerId

MAX_SOURCES = 4
"""Peers that are asked at once."""


class ChunkRequests:
    """Memory of the peer that was asked last for each chunk.

    Each of a few sources is asked for a part, and never the same source twice in a row for the same chunk. `at`: time of
    the last request, in seconds; `tries`: number of requests.
    """

    def __init__(self) -> None:
        self.at = 0.0
        self.tries = 0
        self._asked: dict[int, PeerId] = {}

    def plan(self, missing: Iterable[int], sources: Sequence[PeerId], now: float) -> dict[PeerId, list[int]]:
        """Return which source to ask for which chunks. `sources` must not be empty."""
        self.at = now
        first, self.tries = self.tries, self.tries + 1
        chosen = [sources[(first + i) % len(sources)] for i in range(min(MAX_SOURCES, len(sources)))]
        parts: dict[PeerId, list[int]] = {}
        for at, index in enumerate(missing):
            peer = chosen[at % len(chosen)]
            if peer == self._asked.get(index):
                peer = chosen[(at + 1) % len(chosen)]  # that peer has not answered
            self._asked[index] = peer
            parts.setdefault(peer, []).append(index)
        return parts

    def owed(self, peer: PeerId) -> set[int]:
        """Return the chunks that this source was asked for last."""
        return {index for index, one in self._asked.items() if one == peer}
