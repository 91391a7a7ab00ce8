"""Who is to own no chunks in the next rounds, because it has cost one its time: a round's complaints, remembered.

A round finds out who owes what, moves the chunks to others and commits. Without a memory the next one would begin with the same
owners and lose the same patience again. So who ended a round without its chunks rests for 2 rounds, then 4, 8 and so on;
each round in which it owns chunks and keeps them takes one step back. It costs an honest peer, whose link was bad or
about whom somebody lied, nothing but work: contributions and votes count as ever.
"""

from __future__ import annotations

from collections.abc import Collection

from thinwire.swarm.protocol import Open, PeerId

STEPS = 6
"""The longest rest is two to this power, in rounds."""


class Standing:
    """One peer's memory of others. Whoever leads counts its own; all have seen much the same."""

    def __init__(self) -> None:
        self._steps: dict[PeerId, int] = {}
        self._until: dict[PeerId, int] = {}

    def resting(self, round: int) -> set[PeerId]:
        """Who is to own no chunks in this round."""
        return {peer for peer, until in self._until.items() if round <= until}

    def settle(self, opened: Open, failed: Collection[PeerId]) -> None:
        """A round has committed with this ballot; `failed` lost their chunks in it, or lied about them."""
        for peer in failed:
            self._steps[peer] = min(STEPS, self._steps.get(peer, 0) + 1)
            self._until[peer] = opened.round + 2 ** self._steps[peer]
        for peer in set(self._until) - set(failed) - self.resting(opened.round):
            kept = peer in opened.alive and peer not in opened.idle
            self._steps[peer] -= kept
            if not self._steps[peer] or peer not in opened.alive:
                del self._steps[peer], self._until[peer]
