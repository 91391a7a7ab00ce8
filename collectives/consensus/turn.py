"""Turn of a peer: the time at which it begins a ballot, and the ballots that may stop another one.

A ballot is the first one of the round, or takes the place of a leader that has departed or makes no progress.

With crashes only, the first peer that notices is the fastest. But a liar could stop each ballot with another one. So a
round that does not end passes through leader views (`LeaderViews`). In each of them another member has **precedence**: only
it begins ballots. Departures from PBFT: before the first change of the view, and while that member cannot be reached, each
member may begin ballots in its turn.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from thinwire.collectives.consensus.acceptor import Acceptor
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.proposer import Proposer
from thinwire.swarm.messages.registry import PeerId, Proposal, Ready


class Turn:
    """Patience of one peer in a round: first with announcements, then with the leader of each ballot.

    ready: see `Announcements.newest`. hasty: peers whose ballots were in vain in rounds before.
    """

    def __init__(
        self,
        electorate: Electorate,
        acceptor: Acceptor,
        proposer: Proposer,
        ready: Mapping[PeerId, Ready],
        hasty: Collection[PeerId],
    ) -> None:
        self._hasty = hasty
        self._electorate, self._acceptor, self._proposer, self._ready = electorate, acceptor, proposer, ready
        self._terms = electorate.terms
        self._quorum_since: float | None = None
        self._moved = self._followed = 0.0

    def progress(self, now: float) -> None:
        """Restart the patience: data or a vote has arrived, or this peer leads."""
        self._moved = max(self._moved, now)
        if self._acceptor.promised.term == 1:
            self._electorate.views.extend(now)

    def follow(self, leader: PeerId, now: float) -> None:
        """Restart the patience with a leader, unless it has begun so many ballots that only data counts.

        Even such a leader has two patiences, one for the promises and one for its proposal. If peers began ballots of their
        own at once after a promise, two of them could stop each other for ever.
        """
        self._followed = now
        if self._acceptor.trusts(leader):
            self._moved = now

    def waiting_for(self) -> tuple[PeerId, ...]:
        """Return the reachable members and applicants that the round waits for before it opens."""
        return self._electorate.waiting_for(self._given())

    def too_early(self, sender: PeerId, proposal: Proposal | None, now: float) -> bool:
        """Return True if a ballot of this sender would only delay the round.

        That is so while another member has precedence. Otherwise it is so for a peer whose ballots were in vain, in this round
        or in rounds before, if the proposal in progress has made progress within the patience, or if the first one is still to
        come. The leader in progress may begin another ballot in any case. A ballot without a proposal does not delay another
        one: several peers may begin ballots at a time, and the highest wins.
        """
        preceding = self._electorate.views.member
        if self._electorate.reaches(preceding):
            return sender != preceding
        in_vain = sender in self._hasty or sender in self._acceptor.heeded
        others = sender not in (self._electorate.me, self._acceptor.leader)
        return in_vain and others and self._moves(proposal, now)

    def _moves(self, proposal: Proposal | None, now: float) -> bool:
        promised = self._acceptor.promised
        if promised.term == 0:
            if self._terms.members[0] not in self._electorate.live:
                return False
            if self._quorum_since is None:
                return self._electorate.able  # Otherwise the peer may have announcements that we lack.
            return now < self._quorum_since + self._terms.grace + self._terms.patience
        if promised.leader not in self._electorate.live:
            return False
        return proposal is not None and proposal.ballot == promised and now < self._moved + self._terms.patience

    def early(self, proposal: Proposal | None) -> bool:
        """Return True if the round clearly needs, or waits for, more announcements before it opens."""
        if proposal is not None or self._proposer.preparing or self._proposer.urged:
            return False
        ready, members = len(self._ready), len(self._terms.members)
        too_few = ready < self._terms.fraction * (members - len([*self._electorate.farewells]))
        return too_few or (self._quorum_since is not None and ready < members)

    def has_come(self, proposal: Proposal | None, refused: Collection[PeerId], now: float) -> bool:
        """Return True if this peer should begin a ballot. refused: peers that must not lead."""
        if self.too_early(self._electorate.me, proposal, now):
            return False  # Others would refuse the ballot, and our promise of it would keep us from another one.
        if self._proposer.urged and self._proposer.leads(proposal):
            return True
        due = self._due(proposal, refused, now)
        return due is not None and now >= due

    def _due(self, proposal: Proposal | None, refused: Collection[PeerId], now: float) -> float | None:
        """Return the time of our turn to begin a ballot, None without one."""
        electorate, terms, leader = self._electorate, self._terms, self._acceptor.leader
        order = electorate.order(leader)
        if electorate.me not in order:
            return None
        turn = order.index(electorate.me)
        if proposal is not None or self._acceptor.promised.term > 1:
            able = leader in electorate.live and leader not in refused
            return self._stuck(turn, proposal, trusted=able and self._acceptor.trusts(leader), able=able, now=now)
        ready = electorate.live & self._ready.keys()
        few = terms.buffered and len(ready.intersection(self._given())) < max(1, terms.min_peers)
        if few or not electorate.enough(ready):
            self._quorum_since = None
            return None
        if self._quorum_since is None:
            self._quorum_since = now
        turn -= sum(self._absent(peer) for peer in order[:turn])
        graces = [terms.graces.get(peer, terms.grace) for peer in self.waiting_for()]
        grace = max(graces, default=0.0) if turn == 0 or not graces else max(*graces, terms.limit)
        if terms.buffered and not all(map(self._absent, electorate.waiting_for(self._ready))):
            grace = max(grace, terms.patience)  # They only need to announce their presence to stay members.
        return self._quorum_since + grace + turn * terms.patience

    def _absent(self, peer: PeerId) -> bool:
        """Return True if an asynchronous round does not wait for this member, see RoundStarter."""
        return self._terms.buffered and self._terms.graces.get(peer) == 0.0 and peer not in self._ready

    def _stuck(self, turn: int, proposal: Proposal | None, *, trusted: bool, able: bool, now: float) -> float:
        """Return the time of our turn to begin a ballot in place of another one."""
        views, patience = self._electorate.views, self._terms.patience
        views.begin(now)
        if trusted:
            due = self._moved + (2 + turn) * self._proposer.growth * patience
        else:
            answer = self._followed + (1 + turn) * patience if able else 0.0
            due = max(answer, self._moved + turn * patience)
        if views.member == self._electorate.me:
            # Peers complain about a peer that stops an open ballot within three patiences, see DataPlane.complaint_patiences.
            opened = proposal is not None and proposal.ballot == self._acceptor.promised
            due = min(due, self._moved + (1.0 + trusted + (trusted and opened)) * patience)
        return due

    def _given(self) -> Collection[PeerId]:
        """Return the peers that have announced what the round waits for."""
        return [peer for peer, ready in self._ready.items() if ready.weight] if self._terms.buffered else self._ready
