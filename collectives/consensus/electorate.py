"""Electorate of a round: the members of the last round, and those of them that this peer can reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from thinwire.collectives.consensus.farewells import Farewells, departed
from thinwire.collectives.consensus.proposal import DISTRUSTED, ON_TRIAL, RoundTerms
from thinwire.collectives.consensus.quorum import enough, possible, tolerated
from thinwire.swarm.lineage import Verify
from thinwire.swarm.messages.registry import PeerId, Proposal, Ready


class Electorate:
    """Members of a round. `live`: peers with a link, and ourselves.

    `nonvoters`: peers without a vote in it. `farewells`: of the members that have left. `trial`: returns True for a peer
    that needs an endorsement to become a member.
    """

    def __init__(
        self,
        me: PeerId,
        terms: RoundTerms,
        live: Collection[PeerId],
        verify: Verify,
        trial: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        self.me, self.terms, self._trial = me, terms, trial
        self.live, self.nonvoters = set(live) | {me}, set[PeerId]()
        self.farewells = Farewells(terms, verify)

    def enough(self, agreeing: Collection[PeerId], left: Collection[PeerId] | None = None) -> bool:
        """Return True if a quorum of the members without `left` agrees (default: all with a farewell)."""
        left = set(self.farewells) if left is None else left
        return enough(agreeing, self.terms.seniors or self.terms.members, left, fraction=self.terms.fraction)

    def on_trial(self, peer: PeerId) -> bool:
        """Return True if a peer is no member and needs an endorsement to become one."""
        return peer not in self.terms.members and self._trial(peer)

    def uncounted(self, peers: Iterable[PeerId], ready: Mapping[PeerId, Ready]) -> dict[PeerId, str]:
        """Return those of `peers` whose contributions should not count, with reasons.

        It is the opinion of the members. ON_TRIAL: the peer needs endorsements of a quorum to become a member, and lacks
        them. DISTRUSTED: more than half of the other members distrust it, at least two, so a minority cannot take the weight
        of a member. The opinions are those in the announcements of the round, which their members have signed.
        """
        announced = {one: ready[one] for one in self.terms.members if one in ready}
        against = Counter(peer for one in announced for peer in set(announced[one].distrusts) - {one})
        found: dict[PeerId, str] = {}
        for peer in peers:
            others = len(self.terms.members) - (peer in self.terms.members)
            if self.on_trial(peer) and not self.enough({one for one in announced if peer in announced[one].endorses}):
                found[peer] = ON_TRIAL
            elif against[peer] > 1 and 2 * against[peer] > others:
                found[peer] = DISTRUSTED
        return found

    def possible(self, agreeing: Collection[PeerId], left: Collection[PeerId]) -> bool:
        """Return True if these members and the tolerated liars may be a quorum of the members without `left`."""
        return possible(agreeing, self.terms.seniors or self.terms.members, left, fraction=self.terms.fraction)

    @property
    def liars(self) -> int:
        """Number of members that may lie."""
        return tolerated(len(self.terms.members), self.terms.fraction)

    def suffice(self, agreeing: Collection[PeerId], proposal: Proposal) -> bool:
        """Return True if these peers can commit a proposal."""
        return self.enough(agreeing, departed(proposal))

    @property
    def spares_me(self) -> bool:
        """True if the other members that this peer can reach are a quorum after its farewell."""
        reached = self.live.intersection(self.terms.members) - {self.me}
        return bool(reached) and self.enough(reached, {*self.farewells, self.me})

    def confirmed(self, voters: Collection[PeerId]) -> bool:
        """Return True if more members report votes for some results than may lie: at least two.

        Then an honest one has checked them.
        """
        return len(voters) > max(1, self.liars)

    @property
    def able(self) -> bool:
        """True if the members that this peer can reach, and that have a vote, are a quorum."""
        return self.enough(self.live - self.nonvoters)

    @property
    def absent(self) -> tuple[PeerId, ...]:
        """Members that this peer cannot reach, or that have no vote, in leader order."""
        here = self.live - self.nonvoters
        return tuple(peer for peer in self.terms.members if peer not in here and peer not in self.farewells)

    def waiting_for(self, ready: Collection[PeerId]) -> tuple[PeerId, ...]:
        """Return the reachable members and applicants that are not ready yet.

        An applicant is a peer with a grace that is no member.
        """
        applicants = self.terms.graces.keys() - set(self.terms.members)
        return tuple(
            peer
            for peer in (*self.terms.members, *sorted(applicants))
            if peer in self.live and peer not in ready and peer not in self.nonvoters and peer not in self.farewells
        )

    def order(self, leader: PeerId) -> list[PeerId]:
        """Return the reachable members in the order in which they lead; `leader` is the first of them."""
        order = [peer for peer in self.terms.members if peer in self.live and peer not in self.farewells]
        return [leader, *[peer for peer in order if peer != leader]] if leader in order else order
