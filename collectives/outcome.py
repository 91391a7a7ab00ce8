"""What a collective returns: a value for every remote failure, never an exception."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thinwire.compression.codec import Buffer
from thinwire.swarm.protocol import Commit, PeerId


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one round for one peer.

    results: the encoded chunks of the aggregate in grid order, equal on all peers that committed; empty unless committed.
    commit: the verdict with its proof, None when the round did not commit here.
    missing: peers that are out of the round, each with a reason. diverged: our state differs from the majority's; fetch it.
    dropped: without a commit, and what was given for the round will be in none: the model has been set anew.
    kept: of the weight that was given for a round that committed, what is not in it and is still in the model, for the next.
    taken: with or without a commit, the weight that was given is booked for later rounds and not to be given again.
    """

    results: tuple[Buffer, ...] = ()
    commit: Commit | None = None
    missing: Mapping[PeerId, str] = field(default_factory=dict)
    diverged: bool = False
    kept: int = 0
    dropped: bool = False
    taken: bool = False

    @property
    def contributors(self) -> tuple[PeerId, ...]:
        """Peers whose contribution is in the aggregate, in peer-id order."""
        return tuple(entry.peer for entry in self.commit.opened.contributors) if self.commit else ()
