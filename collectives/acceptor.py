"""What one peer has promised and voted for in a round: the memory that makes verdicts unique.

An acceptor must not forget, and others must not wait for one that did: a peer that restarted may have voted before, so it
passes `witness=False`, says so in its Ready, and neither votes, promises nor leads in that round; everyone counts it as gone.
Quorums intersect because whoever is counted as gone in a round never votes in it again, and because a candidate that counts
members as gone, who may have voted before, asks all others that are left (see Candidate).
"""

from __future__ import annotations

from thinwire.collectives.proposal import Terms, sound
from thinwire.swarm.protocol import Ballot, Digest, Open, PeerId, Prepare, Promise

LEAP = 10_000
"""Most terms that one ballot may be ahead of the last: numbers must not run out."""


class Acceptor:
    """`promised`: no lower ballot gets our vote."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.promised = Ballot(0, bytes(32))
        self._voted: tuple[Open, Digest] | None = None

    @property
    def leader(self) -> PeerId:
        """Whose ballot we have promised to follow; empty when there is none."""
        return self.promised.leader if self.promised.term else b""

    def follows(self, sender: PeerId, message: Open) -> bool:
        """Whether an Open may be followed. The first term belongs to the first member: it needs no promises."""
        term = message.ballot.term
        far = term < 1 or term > self.promised.term + LEAP or (term == 1 and sender != self._terms.members[0])
        return (
            sender == message.ballot.leader
            and message.ballot >= self.promised
            and not far
            and sound(message, self._terms)
        )

    def heeds(self, sender: PeerId, message: Prepare) -> bool:
        """Whether a Prepare gets our promise."""
        far = message.ballot.term > self.promised.term + LEAP
        return sender == message.ballot.leader and message.ballot > self.promised and not far

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
