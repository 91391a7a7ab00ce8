"""Checks of the proposals of leaders, before an acceptor follows one.

A leader may lie. A proposal needs the leader's signature, from the second ballot on a justification, and members and
contributors that an honest leader could have proposed.
"""

from __future__ import annotations

from thinwire.collectives.consensus.acceptor import BALLOTS
from thinwire.collectives.consensus.announcements import Announcements
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.justification import justified, reported
from thinwire.collectives.consensus.proposal import DISTRUSTED, name_of, sound, statement, vote_for
from thinwire.swarm.evidence import Equivocation
from thinwire.swarm.lineage import Verify
from thinwire.swarm.messages.registry import (
    MAX_PROPOSALS,
    Commit,
    Digest,
    PeerId,
    Proposal,
    Propose,
    Vote,
)

MAX_GENUINE = 4 * MAX_PROPOSALS
"""Number of genuine proposals whose signatures are not checked again."""


class ProposalCheck:
    """Checks of one round, and the signed statements of leaders and voters that a peer has seen."""

    def __init__(
        self, electorate: Electorate, announcements: Announcements, equivocation: Equivocation, verify: Verify
    ) -> None:
        self.refused: set[PeerId] = set()
        """Leaders that made a proposal no honest leader makes: they lead no further ballot of this round."""
        self._electorate, self._announcements, self._equivocation = electorate, announcements, equivocation
        self._verify = verify
        self._genuine: set[Digest] = set()
        """Names of genuine proposals."""

    def concerns(self, sender: PeerId, message: Propose, present: Proposal | None) -> bool:
        """Return True if a leader sends a proposal that is newer than the present one, and may lead."""
        proposal = message.proposal
        sealed = self.note(proposal)
        if (present is not None and proposal.ballot <= present.ballot) or sender in self.refused:
            return False
        if sender != proposal.ballot.leader:
            return False  # Another peer has shown it as evidence.
        first = proposal.ballot.term == 1
        if not sealed or bool(message.reports or message.earlier) == first:
            return False
        return not first or proposal.adopted is None  # No results exist before the first ballot.

    def valid(self, message: Propose) -> bool:
        """Return True if an honest leader can have made a sound proposal.

        A leader that cannot be honest is refused. The promises are checked before the new members: only a leader whose ballot
        a quorum has promised has those.
        """
        proposal = message.proposal
        if not self._electorate.farewells.valid(proposal):
            return False  # An honest leader may know keys that this peer does not know yet.
        if proposal.ballot.term > 1 and not self.justified(message):
            return False
        if not self._electorate.keeps_enough(proposal):
            return False
        if not self.genuine(proposal):
            self.refused.add(proposal.ballot.leader)
            return False
        return True

    def accepts(self, proposal: Proposal) -> bool:
        """Return True if this peer knows nothing against the leader and the peers of a valid proposal.

        The answer may change: announcements that endorse newcomers may arrive later.
        """
        free = proposal.adopted is None
        if proposal.ballot.leader in self.refused:
            return False
        if free and not set(proposal.alive).isdisjoint(self._electorate.standing.banned()):
            return False
        if free and proposal.ballot.term <= BALLOTS and self._misplaced(proposal):
            self.refused.add(proposal.ballot.leader)
            return False
        # A liar can report a vote for results with any members. With more votes an honest member takes the results, too.
        if not free and self._electorate.accepted(proposal.sources):
            return True
        return self._electorate.accepts_newcomers(proposal, self._announcements.newest, voted=not free)

    def justified(self, message: Propose) -> bool:
        """Return True if the value of a proposal follows from its promises; otherwise refuse the leader."""
        if (reports := reported(message, self._electorate, self._verify)) is not None:
            # Only proposals that members have signed are checked: a liar alone could name many with keys that it has made.
            if not all(self.genuine(one.voted) for part in reports for one in part.values() if one.voted is not None):
                return False  # An honest leader may know keys that this peer does not know yet.
            if justified(message.proposal, *reports, self._electorate):
                return True
        # An honest leader sends no such proposal. Its further ballots in this round would only take time.
        self.refused.add(message.proposal.ballot.leader)
        return False

    def _misplaced(self, proposal: Proposal) -> bool:
        """Return True if contributors that the members distrust count, and enough others are there.

        The leader has the announcements of all of `alive`, so an honest one knows at least the distrust that we know of
        these. (Not if a member sends different announcements; so only a few ballots of a round are refused.)
        """
        newest = self._announcements.newest
        announced = {peer: newest[peer] for peer in proposal.alive if peer in newest}
        peers = [entry.peer for entry in proposal.contributors]
        enough = len(peers) > self._electorate.terms.min_peers
        return enough and DISTRUSTED in self._electorate.uncounted(peers, announced).values()

    def genuine(self, proposal: Proposal) -> bool:
        """Return True if a proposal is sound and proves its members. An honest peer votes for no other one.

        New members are proven by announcements, and missing ones by farewells.
        """
        name = name_of(proposal)
        if name in self._genuine:
            return True
        sensible = sound(proposal, self._electorate.terms) and self._electorate.keeps_enough(proposal)
        if sensible and self._announcements.members_proven(proposal):
            if len(self._genuine) >= MAX_GENUINE:
                self._genuine.clear()
            self._genuine.add(name)
            return True
        return False

    # --- signed statements of leaders and voters

    def note(self, proposal: Proposal) -> bool:
        """Note the leader's signature of a proposal; return False if it is invalid."""
        lineage = self._electorate.terms.lineage
        if not lineage:
            return True
        signed, leader = statement(proposal), proposal.ballot.leader
        if proposal.lineage != lineage or not self._verify(leader, signed, proposal.seal):
            return False
        self._equivocation.note(leader, signed, proposal.seal)
        return True

    def note_vote(self, voter: PeerId, vote: Vote, signature: bytes) -> None:
        """Note a vote with a valid signature."""
        self._equivocation.note(voter, vote, signature)

    def note_commit(self, commit: Commit) -> None:
        """Note the signatures in a commit."""
        self.note(commit.proposal)
        vote = vote_for(commit.proposal, commit.digest)
        for proof in commit.votes:
            if self._verify(proof.peer, vote, proof.signature):
                self._equivocation.note(proof.peer, vote, proof.signature)
