"""Acceptor: promises and votes of one peer in a round; its memory makes the result unique.

A promise or vote is durable before it is sent (see `members.vote_store`), so a peer that restarts remembers it. If the
store fails, the peer does not promise or vote. A peer that has lost its store has a new life, which is no member (see
`Proposal.lives`).

An acceptor may always ignore a ballot. The ballots of one peer are followed only as often as an honest proposer begins
them: some at once, then one after pauses that double. Otherwise the peer that asks most often would win, and no ballot of
other peers would end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from thinwire.collectives.consensus.electorate import LeaderViews
from thinwire.collectives.consensus.farewells import signed
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.members.vote_store import VoteRecord, VoteStore
from thinwire.collectives.consensus.proposal import name_of, sound
from thinwire.swarm.messages.registry import (
    Ballot,
    Digest,
    Farewell,
    Leave,
    Message,
    PeerId,
    Prepare,
    Promise,
    Proposal,
)

LEAP = 10_000
"""Terms that peers may use in one view, far more than honest ones need.

The member with precedence may use those of the next view, too. So it can lead above any ballot of a liar that another
acceptor has promised.
"""

LAST_TERM = 2**31
"""Highest term of a ballot, so that no term exceeds the 32 bits that it has in a message."""

BALLOTS = 4
"""Ballots of a leader that may follow each other without a pause: the usual failures need as many."""

MAX_PAUSE = 8.0
"""Maximum patiences between two ballots of one leader; pauses begin with a quarter and double."""


def ballot_pause(ballots: int) -> float:
    """Return the patiences that a leader waits after this number of its ballots."""
    # There may be thousands, so the exponent is bounded as well as the result.
    return min(MAX_PAUSE, 0.125 * 2.0 ** min(ballots - BALLOTS, 16)) if ballots > BALLOTS else 0.0


class BallotCount:
    """Ballots of each leader: in the round, or in the view for the member with precedence."""

    def __init__(self, views: LeaderViews) -> None:
        self._views = views
        self._in_round: Counter[PeerId] = Counter()
        self._in_view = (0, 0)
        """View, and ballots of its member in it."""

    def of(self, leader: PeerId) -> int:
        """Return the number of ballots that sets the pause of a leader."""
        if leader != self._views.member:
            return self._in_round[leader]
        view, ballots = self._in_view
        return ballots if view == self._views.number else 0

    def add(self, leader: PeerId) -> None:
        """Count a ballot."""
        if leader == self._views.member:
            self._in_view = self._views.number, self.of(leader) + 1
        self._in_round[leader] += 1

    @property
    def in_round(self) -> Mapping[PeerId, int]:
        """Number of ballots of each leader in the round."""
        return self._in_round


class Acceptor:
    """Promises and votes in the round of `terms`. `promised`: no lower ballot gets our vote.

    `abstains`: this peer has no vote in the round. It may have voted in a later one, or has left it.
    """

    def __init__(self, terms: RoundTerms, store: VoteStore, views: LeaderViews, *, abstains: bool) -> None:
        self._terms, self._store, self._life, self._views = terms, store, store.life, views
        record = store.record
        if record is not None and (record.lineage, record.round) != (terms.lineage, terms.round):
            # A record of a later round of this lineage means that we have returned with an older state.
            abstains |= record.lineage == terms.lineage and record.round > terms.round
            record = None
        self._record = record or VoteRecord(terms.lineage, terms.round, Ballot(0, bytes(32)), None, None)
        self.abstains = abstains or self._record.left
        self._heeded, self._heeded_at = BallotCount(views), dict[PeerId, float]()
        self._followed = self._record.promised
        self._proposed: dict[PeerId, int] = {}
        """Term of the last proposal of each leader that has counted."""
        views.resume(self.promised.term // LEAP)  # Its terms are in use.

    @property
    def promised(self) -> Ballot:
        """Highest ballot that was promised or followed."""
        return max(self._record.promised, self._followed)

    @property
    def leader(self) -> PeerId:
        """Leader of the ballot that we follow; empty if there is none."""
        return self.promised.leader if self.promised.term else b""

    @property
    def bound(self) -> bool:
        """True if we have promised, followed or voted anything in this round."""
        return self.promised.term > 0 or self.voted is not None

    @property
    def voted(self) -> Proposal | None:
        """Proposal that we voted for last."""
        return self._record.voted

    def heed_proposal(self, sender: PeerId, message: Proposal, now: float) -> bool:
        """Count the ballot of a proposal; return False if the proposal must not be followed.

        Its signatures, which take time to check, are not checked here. An honest leader makes one proposal in each ballot,
        so the first one of a ballot is the only one that counts, whether it is valid or not.
        """
        ballot, first = message.ballot, message.ballot.term == 1
        if sender != ballot.leader or ballot < self.promised or not sound(message, self._terms):
            return False
        if ballot.term < 1 or (first and sender != self._terms.members[0]):
            return False
        if ballot.term <= self._proposed.get(sender, 0):
            return False
        # The first term belongs to the first member. The promises that justify a later one prove that it is in use.
        if not (first or ballot == self.promised or self._heed(ballot, now, LAST_TERM)):
            return False
        self._proposed[sender] = ballot.term
        return True

    def follow(self, ballot: Ballot) -> bool:
        """Follow the valid proposal of a ballot; return False if a higher one is promised."""
        if ballot < self.promised:
            return False
        # In memory only: a peer that restarts has voted for no ballot that it only followed.
        self._followed = ballot
        return True

    def heed_prepare(self, sender: PeerId, message: Prepare, now: float) -> bool:
        """Count the ballot of a Prepare; return False if it gets no promise."""
        ballot = message.ballot
        fresh = sender == ballot.leader and ballot.term > 1 and ballot > self.promised
        return fresh and self._heed(ballot, now, self.highest(sender))

    def highest(self, leader: PeerId) -> int:
        """Return the highest term that a ballot of this leader may have in the present view."""
        views = self._views.number + 1 + (self._views.member == leader)
        return min(LEAP * views, LAST_TERM)

    def _heed(self, ballot: Ballot, now: float, highest: int) -> bool:
        # Somewhat less than an honest leader pauses: messages overtake each other, and patiences differ.
        pause = 0.75 * ballot_pause(self._heeded.of(ballot.leader)) * self._terms.patience
        if ballot.term > highest or now < self._heeded_at.get(ballot.leader, 0.0) + pause:
            return False
        self._heeded.add(ballot.leader)
        self._heeded_at[ballot.leader] = now
        return True

    def trusts(self, peer: PeerId) -> bool:
        """Return True if a ballot of this peer restarts our patience: after some ballots only progress does."""
        return self._heeded.in_round.get(peer, 0) <= BALLOTS

    @property
    def heeded(self) -> tuple[PeerId, ...]:
        """Leaders of the ballots above the first that we have followed or promised."""
        return tuple(self._heeded_at)

    def vote(self, proposal: Proposal, digest: Digest) -> bool:
        """Store a vote for a ballot; return False if it is not allowed, repeated, or could not be stored."""
        voted = self._record.voted
        if self.abstains or proposal.ballot < self.promised or (voted is not None and voted.ballot == proposal.ballot):
            return False
        return self._save(proposal.ballot, proposal, digest)

    def promise(self, ballot: Ballot) -> Promise | None:
        """Promise that no lower ballot gets our vote, with our last vote; None if it could not be stored."""
        if self.abstains or not self._save(ballot, self._record.voted, self._record.digest):
            return None
        terms, record = self._terms, self._record
        return Promise(terms.round, terms.fragment, ballot, record.voted, record.digest, terms.lineage)

    def use_number(self, number: int) -> bytes:
        """Note the number of an announcement; return the life that it must name.

        If the number could not be stored, that is another life than before, in memory, and we have no vote in this round.
        """
        try:
            self._store.use_number(number)
        except OSError:
            self.abstains = True
        self.abstains |= self._store.life != self._life
        return self._store.life

    def farewell(self, me: PeerId, sign: Callable[[Message], bytes]) -> Leave | None:
        """Return our farewell if we have left this round, in this process or an earlier one."""
        record = self._record
        if not record.left:
            return None
        name = name_of(record.voted) if record.voted is not None else None
        farewell = Farewell(me, record.promised, name, record.digest, b"")
        return signed(Leave(self._terms.round, self._terms.fragment, self._terms.lineage, farewell, record.voted), sign)

    def abstain(self) -> bool:
        """Leave this round: vote and promise nothing more in it. Return False if that could not be stored.

        Without a store nothing is announced, because the next process may vote in this round.
        """
        if self.abstains:
            return self._record.left
        return self._save(self._record.promised, self._record.voted, self._record.digest, left=True)

    def _save(self, promised: Ballot, voted: Proposal | None, digest: Digest | None, *, left: bool = False) -> bool:
        record = VoteRecord(self._terms.lineage, self._terms.round, promised, voted, digest, left)
        try:
            self._store.save(record)
        except OSError:
            self.abstains = True
            return False
        self._record, self.abstains = record, self.abstains or left
        return True
