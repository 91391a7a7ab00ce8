"""Pace of the chunk owners of a round: which of them must not own chunks in the next rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from thinwire.collectives.topology.bandwidth_shares import PeerLoad, filled, seconds
from thinwire.collectives.topology.placement import loads
from thinwire.swarm.messages.registry import PeerId, Proposal, Ready

LATE, FELT = 1.5, 0.5
"""An owner of many chunks is slower than announced if it takes LATE times its time, plus FELT seconds."""


class OwnerPace:
    """Owners of a round's first ballot, and the time when the last result of each was here."""

    def __init__(self) -> None:
        self.first: Proposal | None = None
        """The first ballot that this peer has followed."""
        self._began = 0.0
        self._done: dict[PeerId, float] = {}

    def open(self, proposal: Proposal, now: float) -> None:
        """Note a ballot that begins at the time `now`, in seconds."""
        if self.first is None:
            self.first, self._began = proposal, now

    def note_result(self, owner: PeerId, now: float) -> None:
        """Note that a result of an owner is here."""
        self._done[owner] = now

    def failed(self, last: Proposal, ready: Mapping[PeerId, Ready], nbytes: int) -> set[PeerId]:
        """Return the owners of the first ballot that own nothing in the last one, or that were overdue.

        The pace is only judged if the first ballot is the last one. ready: announcements, with the rates of links; nbytes:
        size of one encoded chunk.
        """
        first = self.first
        if first is None:
            return set()
        if first is last:
            contributors = {entry.peer for entry in first.contributors}
            took = {peer: at - self._began for peer, at in self._done.items()}
            return overdue(first, loads(first.group, contributors, first.idle, ready), took, nbytes)
        return set(first.alive).difference(first.idle, set(last.alive).difference(last.idle))


def overdue(proposal: Proposal, links: Sequence[PeerLoad], took: Mapping[PeerId, float], nbytes: int) -> set[PeerId]:
    """Return the peers that own more than an equal share and finished much later than they should.

    That is, much later than the others and than the announced links allow. links: loads of the group, in its order.
    took: seconds until the last result of each owner. nbytes: size of one chunk.
    """
    known, owners = filled(links), set(proposal.alive) - set(proposal.idle)
    if not proposal.shares or not known:
        return set()
    planned, equal = max(seconds(known, proposal.shares)) * nbytes, sum(proposal.shares) / len(owners)
    late = set()
    for peer, own in zip(proposal.group, proposal.shares, strict=True):
        others = [spent for other, spent in took.items() if other != peer]
        if own > equal and others and took.get(peer, 0.0) > LATE * max(planned, median(others)) + FELT:
            late.add(peer)
    return late
