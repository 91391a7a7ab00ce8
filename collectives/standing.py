"""Who is to own no chunks in the next rounds, because it has cost one its time: a round's complaints, remembered.

A round finds out who owes what, moves the chunks to others and commits. Without a memory the next one would begin with the same
owners and lose the same patience again. So who ended a round without its chunks rests for 2 rounds, then 4, 8 and so on;
each round in which it owns chunks and keeps them takes one step back. It costs an honest peer, whose link was bad or
about whom somebody lied, nothing but work: contributions and votes count as ever.

The same goes for who was given many chunks, because it says that its link is fast, and then took much longer than it should.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median

from thinwire.collectives.allotment import Load, filled, seconds
from thinwire.swarm.protocol import Open, PeerId

STEPS = 6
"""The longest rest is two to this power, in rounds."""


LATE, FELT = 1.5, 0.5
"""An owner of many chunks is not as fast as it said when it needs so many times what it should, and so many seconds more."""


def overdue(opened: Open, links: Sequence[Load], took: Mapping[PeerId, float], nbytes: int) -> set[PeerId]:
    """Who owns more than an equal part and was done much later than others, and than what all say of their links allows.

    `links`: of the group, in its order; `took`: seconds until the last result of each owner; `nbytes`: of one chunk.
    """
    known, owners = filled(links), set(opened.alive) - set(opened.idle)
    if not opened.shares or not known:
        return set()
    planned, equal = max(seconds(known, opened.shares)) * nbytes, sum(opened.shares) / len(owners)
    late = set()
    for peer, own in zip(opened.group, opened.shares, strict=True):
        others = [spent for other, spent in took.items() if other != peer]
        if own > equal and others and took.get(peer, 0.0) > LATE * max(planned, median(others)) + FELT:
            late.add(peer)
    return late


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
