"""Electorate of a round: the members of the last round, and those of them that this peer can reach."""

from __future__ import annotations

from collections.abc import Collection

from thinwire.collectives.consensus.farewells import Farewells, departed
from thinwire.collectives.consensus.proposal import RoundTerms
from thinwire.collectives.consensus.quorum import enough, possible, tolerated
from thinwire.swarm.lineage import Verify
from thinwire.swarm.messages.registry import Open, PeerId


class Electorate:
    """Members of a round. `live`: peers with a link, and ourselves. `mute`: peers without a vote in it.

    `farewells`: of the members that have left.
    """

    def __init__(self, me: PeerId, terms: RoundTerms, live: Collection[PeerId], verify: Verify) -> None:
        self.me, self.terms = me, terms
        self.live, self.mute = set(live) | {me}, set[PeerId]()
        self.farewells = Farewells(terms, verify)

    def enough(self, agreeing: Collection[PeerId], left: Collection[PeerId] | None = None) -> bool:
        """Return True if a quorum of the members without `left` agrees (default: all with a farewell)."""
        left = set(self.farewells) if left is None else left
        return enough(agreeing, self.terms.seniors or self.terms.members, left, fraction=self.terms.fraction)

    def possible(self, agreeing: Collection[PeerId], left: Collection[PeerId]) -> bool:
        """Return True if these members and the tolerated liars may be a quorum of the members without `left`."""
        return possible(agreeing, self.terms.seniors or self.terms.members, left, fraction=self.terms.fraction)

    @property
    def liars(self) -> int:
        """Number of members that may lie."""
        return tolerated(len(self.terms.members), self.terms.fraction)

    def suffice(self, agreeing: Collection[PeerId], opened: Open) -> bool:
        """Return True if these peers can commit a proposal."""
        return self.enough(agreeing, departed(opened))

    @property
    def able(self) -> bool:
        """True if the members that this peer can reach, and that have a vote, are a quorum."""
        return self.enough(self.live - self.mute)

    @property
    def absent(self) -> tuple[PeerId, ...]:
        """Members that this peer cannot reach, or that have no vote, in leader order."""
        here = self.live - self.mute
        return tuple(peer for peer in self.terms.members if peer not in here and peer not in self.farewells)

    def waiting_for(self, ready: Collection[PeerId]) -> tuple[PeerId, ...]:
        """Return the reachable members that are not ready yet."""
        return tuple(
            peer
            for peer in self.terms.members
            if peer in self.live and peer not in ready and peer not in self.mute and peer not in self.farewells
        )

    def order(self, leader: PeerId) -> list[PeerId]:
        """Return the reachable members in the order in which they lead; `leader` is the first of them."""
        order = [peer for peer in self.terms.members if peer in self.live and peer not in self.farewells]
        return [leader, *[peer for peer in order if peer != leader]] if leader in order else order
