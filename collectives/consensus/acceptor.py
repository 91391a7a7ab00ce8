"""What one peer has promised and voted for in a round: the memory that makes verdicts unique.

An acceptor must not forget, and others must not wait for one that did: a peer that restarted may have voted before, so it
passes `witness=False`, says so in its Ready, and neither votes, promises nor leads in that round; everyone counts it as gone.
Quorums intersect because whoever is counted as gone in a round never votes in it again, and because a candidate that counts
members as gone, who may have voted before, asks all others that are left (see Candidate).

To ignore a ballot is always safe. So one peer's ballots are heeded only as often as an honest candidate begins them: some at
once, then one after pauses that double. Else whoever asks most would win, and no ballot of others would come to an end.
"""

from __future__ import annotations

from thinwire.collectives.consensus.proposal import RoundTerms, sound
from thinwire.swarm.messages.registry import Ballot, Digest, Open, PeerId, Prepare, Promise

LEAP = 10_000
"""Most terms that one ballot may be ahead of the last: as many as the sides of a partition may be apart after a day."""

LAST_TERM = 2**31
"""No ballot has a higher term: numbers must not run out on the wire."""

BALLOTS = 4
"""Ballots of one round that may follow each other at once: for deaths and complaints of an ordinary bad moment."""

REST = 8.0
"""Patiences that a leader waits at most between two of its own ballots; a quarter of one at first, and twice that each time."""


def rest(ballots: int) -> float:
    """Patiences to wait after so many ballots of a round. It may see thousands, so the power is bounded, not only its use."""
    return min(REST, 0.125 * 2.0 ** min(ballots - BALLOTS, 16)) if ballots > BALLOTS else 0.0


class Acceptor:
    """`promised`: no lower ballot gets our vote."""

    def __init__(self, terms: RoundTerms) -> None:
        self._terms = terms
        self.promised = Ballot(0, bytes(32))
        self._voted: tuple[Open, Digest] | None = None
        # Of each peer: how many of its ballots we have heeded, and when it is too early for another one.
        self._heeded: dict[PeerId, tuple[int, float]] = {}

    @property
    def leader(self) -> PeerId:
        """Whose ballot we have promised to follow; empty when there is none."""
        return self.promised.leader if self.promised.term else b""

    @property
    def voted(self) -> Open | None:
        """The ballot that we voted for last."""
        return self._voted[0] if self._voted is not None else None

    def follows(self, sender: PeerId, message: Open, now: float) -> bool:
        """Whether an Open is to be followed; notes it. The first term belongs to the first member: it needs no promises."""
        ballot, first = message.ballot, message.ballot.term == 1
        if sender != ballot.leader or ballot < self.promised or not sound(message, self._terms):
            return False
        if ballot.term < 1 or (first and sender != self._terms.members[0]):
            return False
        return first or ballot == self.promised or self._heeds(ballot, now)

    def heeds(self, sender: PeerId, message: Prepare, now: float) -> bool:
        """Whether a Prepare gets our promise; notes it."""
        return sender == message.ballot.leader and message.ballot > self.promised and self._heeds(message.ballot, now)

    def _heeds(self, ballot: Ballot, now: float) -> bool:
        count, until = self._heeded.get(ballot.leader, (0, 0.0))
        if ballot.term > min(self.promised.term + LEAP, LAST_TERM) or (count >= BALLOTS and now < until):
            return False
        # Somewhat less than an honest one rests: messages overtake each other, and patience is not equal everywhere.
        self._heeded[ballot.leader] = (count + 1, now + 0.75 * rest(count + 1) * self._terms.patience)
        return True

    def trusts(self, peer: PeerId) -> bool:
        """Whether a ballot of this peer makes us patient: after some, only what moves does."""
        return self._heeded.get(peer, (0, 0.0))[0] <= BALLOTS

    def vote(self, opened: Open, digest: Digest) -> bool:
        """Vote for a ballot; False when we must not, or have already."""
        if opened.ballot < self.promised or (self._voted is not None and self._voted[0].ballot == opened.ballot):
            return False
        self._voted = (opened, digest)
        return True

    def promise(self, ballot: Ballot) -> Promise:
        """Promise this ballot that no lower one gets our vote from now on, and say what we voted for."""
        self.promised = ballot
        voted, digest = self._voted if self._voted is not None else (None, None)
        return Promise(self._terms.round, self._terms.fragment, ballot, voted, digest)

    def void(self) -> None:
        """What we voted for cannot be had any more."""
        self._voted = None
