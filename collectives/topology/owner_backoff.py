"""Back-off of owners: peers that cost a round its time own no chunks in the next rounds.

A round finds out which owners fail, moves their chunks to others and commits. Without memory, the next round would
start with the same owners and lose the same patience again. So a peer that ended a round without its chunks pauses for
2 rounds, then 4, 8 and so on; each round in which it owns chunks and keeps them takes one step back. For an honest peer
whose link was bad, or that was accused falsely, the only cost is ownership: its contributions and votes count as ever.
The same applies to a peer that got many chunks because it announced a fast link, and then took much longer than it
should.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median

from thinwire.collectives.topology.bandwidth_shares import PeerLoad, filled, seconds
from thinwire.swarm.messages.registry import Open, PeerId

STEPS = 6
"""Binary logarithm of the longest pause, in rounds."""


LATE, FELT = 1.5, 0.5
"""An owner of many chunks is slower than announced if it takes LATE times its time, plus FELT seconds."""


def overdue(opened: Open, links: Sequence[PeerLoad], took: Mapping[PeerId, float], nbytes: int) -> set[PeerId]:
    """Return the peers that own more than an equal share and finished much later than they should.

    That is, much later than the others and than the announced links allow. links: loads of the group, in its order.
    took: seconds until the last result of each owner. nbytes: size of one chunk.
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


class OwnerBackoff:
    """One peer's memory of the failures of others.

    The leader's own memory decides; all peers have seen much the same.
    """

    def __init__(self) -> None:
        self._steps: dict[PeerId, int] = {}
        self._until: dict[PeerId, int] = {}

    def resting(self, round: int) -> set[PeerId]:
        """Return the peers that are to own no chunks in this round."""
        return {peer for peer, until in self._until.items() if round <= until}

    @property
    def remembered(self) -> set[PeerId]:
        """Peers whose failures are not forgotten yet."""
        return {*self._steps, *self._until}

    def settle(self, opened: Open, failed: Collection[PeerId]) -> None:
        """Record that a round has committed with this ballot; `failed` lost their chunks or lied about them."""
        for peer in failed:
            self._steps[peer] = min(STEPS, self._steps.get(peer, 0) + 1)
            self._until[peer] = opened.round + 2 ** self._steps[peer]
        for peer in set(self._until) - set(failed) - self.resting(opened.round):
            kept = peer in opened.alive and peer not in opened.idle
            self._steps[peer] -= kept
            if not self._steps[peer] or peer not in opened.alive:
                del self._steps[peer], self._until[peer]
