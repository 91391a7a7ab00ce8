"""Result of a collective operation: remote failures are values, never exceptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thinwire.compression.core.types import Buffer
from thinwire.swarm.messages.registry import Certificate, Commit, PeerId


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of one round for one peer.

    results: encoded chunks of the aggregate in grid order, equal on all peers that committed; empty unless committed.
    commit: end of the round, or None if it did not commit here. certificate: the commit with its members and their keys, in
    methods with agreement. missing: peers that are out of the round, with reasons. diverged: this peer's state differs from the
    majority's and must be fetched. dropped: the round did not commit, and its contribution will not be part of any later round,
    because the model was reset. kept: weight of our contribution that is not part of the committed round, but is still in the
    model and counts in the next round. merged: weight of earlier rounds, in a lineage that gave way, that is still in the model
    and counts in the next round. taken: with or without a commit, the weight of our contribution is recorded for later rounds,
    and the caller must not pass it again. began_late: other peers had completed the round before it began here.
    """

    results: tuple[Buffer, ...] = ()
    commit: Commit | None = None
    missing: Mapping[PeerId, str] = field(default_factory=dict)
    diverged: bool = False
    kept: int = 0
    merged: int = 0
    dropped: bool = False
    taken: bool = False
    began_late: bool = False
    certificate: Certificate | None = None

    @property
    def contributors(self) -> tuple[PeerId, ...]:
        """Peers whose contribution is in the aggregate, in peer-id order."""
        return tuple(entry.peer for entry in self.commit.proposal.contributors) if self.commit else ()
