"""Comparison of a peer's wall clock with those of the others."""

from __future__ import annotations

from bisect import bisect_left, insort

from thinwire.collectives.health.data_lateness import OTHERS
from thinwire.swarm.messages.registry import PeerId


class Clocks:
    """Seconds by which the wall clocks of other peers are ahead of ours, in order."""

    def __init__(self) -> None:
        self._ahead: dict[PeerId, float] = {}
        self._sorted = [0.0]  # those of all peers, our own clock included

    def compare(self, peer: PeerId, ahead: float) -> float | None:
        """Store the value of a peer; return its distance to the median of the others, if they suffice.

        Returns None if they are too few. With an even number, the nearer one of the two middle values counts.
        """
        self.forget(peer)
        others, half = self._sorted, len(self._sorted) // 2
        away = None
        if len(others) >= OTHERS:
            away = min(ahead - others[(len(others) - 1) // 2], ahead - others[half], key=abs)
        self._ahead[peer] = ahead
        insort(self._sorted, ahead)
        return away

    def forget(self, peer: PeerId) -> None:
        """Forget a peer."""
        ahead = self._ahead.pop(peer, None)
        if ahead is not None:
            del self._sorted[bisect_left(self._sorted, ahead)]
