"""Who has a say in a round, who of them is here, and who counts as gone, as one peer knows it.

When every member is gone the swarm is orphaned: nobody left had a say in the last round. After `ORPHANED` patiences those that
are here and hold its state go on, by a majority of themselves. Here alone a partition of the survivors could go two ways; the
comparison of digests then brings the smaller part back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from thinwire.collectives.consensus.proposal import RoundTerms, gone_in
from thinwire.collectives.consensus.quorum import enough
from thinwire.swarm.messages.registry import Open, PeerId

ORPHANED = 5
"""Patiences that pass before a swarm without members goes on by those that are left."""


class Electorate:
    """The members of the last round, while they last; then those that are here. `live`: peers with a link, and ourselves."""

    def __init__(self, me: PeerId, terms: RoundTerms, live: Collection[PeerId], gone: Collection[PeerId]) -> None:
        self.me, self.terms = me, terms
        self.live, self.gone = set(live) | {me}, set(gone)
        self._orphaned_since: float | None = None

    def orphaned(self, now: float) -> bool:
        """Whether every member has been gone for so long that those who are left go on; they all vote then."""
        if not self.terms.members or not self.gone.issuperset(self.terms.members):
            self._orphaned_since = None
            return False
        if self._orphaned_since is None:
            self._orphaned_since = now
        return now >= self._orphaned_since + ORPHANED * self.terms.patience

    def enough(
        self, agreeing: Collection[PeerId], gone: Collection[PeerId] | None = None, present: Sequence[PeerId] = ()
    ) -> bool:
        """Whether a quorum agrees: of the members that are not `gone` (default: as far as we know), or of those `present`
        when all members are gone."""
        members, gone = self.terms.members, self.gone if gone is None else gone
        if present and set(members) <= set(gone):
            members, gone = tuple(sorted(present)), ()
        return enough(agreeing, members, gone, fraction=self.terms.fraction)

    def here(self, agreeing: Collection[PeerId], now: float) -> bool:
        """Whether a quorum agrees, of those that are here when the swarm is orphaned."""
        return self.enough(agreeing, present=tuple(self.live) if self.orphaned(now) else ())

    def suffice(self, agreeing: Collection[PeerId], opened: Open) -> bool:
        """Whether these can commit a ballot alone."""
        return self.enough(agreeing, gone_in(opened), opened.alive)

    def waiting_for(self, ready: Collection[PeerId]) -> tuple[PeerId, ...]:
        """Members that we can reach and that are not ready yet."""
        absent = self.gone | set(ready)
        return tuple(peer for peer in self.terms.members if peer in self.live and peer not in absent)

    def order(self, leader: PeerId) -> list[PeerId]:
        """Members that are here, in the order in which they replace `leader`, who is the first when it is here."""
        order = [peer for peer in self.terms.members if peer in self.live]
        return [leader, *[peer for peer in order if peer != leader]] if leader in self.live else order
