"""Checks of the proposals of leaders, before an acceptor follows one.

A leader may lie. A proposal needs the leader's signature, from the second ballot on a justification, and members and
contributors that an honest leader could have proposed.
"""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.collectives.consensus.acceptor import BALLOTS
from thinwire.collectives.consensus.announcements import Announcements
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.farewells import departed
from thinwire.collectives.consensus.justification import justified
from thinwire.collectives.consensus.members.lives import lives_of
from thinwire.collectives.consensus.proposal import DISTRUSTED, ON_TRIAL, announced_lives, statement, vote_for
from thinwire.swarm.evidence import Equivocation
from thinwire.swarm.lineage import Verify
from thinwire.swarm.messages.registry import (
    Commit,
    PeerId,
    Proposal,
    Propose,
    Ready,
    Vote,
)


class ProposalCheck:
    """Checks of one round, and the signed statements of leaders and voters that a peer has seen.

    life: our life before we announce one.
    """

    def __init__(
        self,
        me: PeerId,
        life: bytes,
        electorate: Electorate,
        announcements: Announcements,
        equivocation: Equivocation,
        *,
        verify: Verify,
    ) -> None:
        self.refused: set[PeerId] = set()
        """Leaders that made a proposal no honest leader makes: they lead no further ballot of this round."""
        self.deferred: tuple[PeerId, Propose] | None = None
        """Proposal with members of which announcements are missing here, and its sender."""
        self._me, self._life, self._electorate = me, life, electorate
        self._ready, self._equivocation = announcements.newest, equivocation
        self._verify = verify

    def admits(self, sender: PeerId, message: Propose, present: Proposal | None) -> bool:
        """Return True if a proposal is newer than the present one and valid, its justification aside.

        A proposal with members of which announcements are missing here is deferred, because they may arrive soon.
        """
        proposal = message.proposal
        sealed = self.note(proposal)
        if (present is not None and proposal.ballot <= present.ballot) or sender in self.refused:
            return False
        if sender != proposal.ballot.leader:
            return False  # Another peer has shown it as evidence.
        first, free = proposal.ballot.term == 1, proposal.adopted is None
        if not sealed or bool(message.reports or message.earlier) == first:
            return False
        if first and not free:
            return False  # No results exist before the first ballot.
        if free and not set(proposal.alive).isdisjoint(self._electorate.banned()):
            return False
        # A liar can report a vote for results with any members. With more votes an honest member takes the results, too.
        doubted = self._electorate.liars > 0 and not self._electorate.confirmed(proposal.sources)
        if (free or doubted) and not self._members_known(proposal):
            self.deferred = sender, message
            return False
        self.deferred = None
        if free and proposal.ballot.term <= BALLOTS and self._misplaced(proposal):
            self.refused.add(proposal.ballot.leader)
            return False
        mine = self._ready.get(self._me)
        agree = _lives_agree(proposal, self._me, mine.life if mine is not None else self._life, self._ready)
        return agree and self._electorate.farewells.valid(proposal)

    def _members_known(self, proposal: Proposal) -> bool:
        """Return True if the next members that are known here are enough, see `Electorate.retained`.

        A known member has the life that it had, or has announced this one here in this round. Otherwise a leader could take the
        vote of an absent member. Newcomers on trial need endorsements. A free proposal may have newcomers that are not known
        here: their announcements may not have reached all members.
        """
        electorate, terms, free = self._electorate, self._electorate.terms, proposal.adopted is None
        if ON_TRIAL in electorate.uncounted(proposal.members, self._ready).values():
            return False
        lives = lives_of(proposal.members, proposal.lives)
        announced = {peer: self._ready[peer].life for peer in proposal.members if peer in self._ready}
        newcomers, known = set(proposal.members).difference(terms.members), set[PeerId]()
        for peer in proposal.members:
            if (free and peer in newcomers) or lives.get(peer) in (announced.get(peer), terms.lives.get(peer)):
                known.add(peer)
        return newcomers <= known and not electorate.retained(known, {*departed(proposal), *electorate.banned()})

    def justified(self, message: Propose) -> bool:
        """Return True if the value of a proposal follows from its promises; otherwise refuse the leader."""
        if justified(message, self._electorate, self._verify):
            return True
        # An honest leader sends no such proposal. Its further ballots in this round would only take time.
        self.refused.add(message.proposal.ballot.leader)
        return False

    def _misplaced(self, proposal: Proposal) -> bool:
        """Return True if contributors that the members distrust count, and enough others are there.

        The leader has the announcements of all of `alive`, so an honest one knows at least the distrust that we know of
        these. (Not if a member sends different announcements; so only a few ballots of a round are refused.)
        """
        announced = {peer: self._ready[peer] for peer in proposal.alive if peer in self._ready}
        peers = [entry.peer for entry in proposal.contributors]
        enough = len(peers) > self._electorate.terms.min_peers
        return enough and DISTRUSTED in self._electorate.uncounted(peers, announced).values()

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


def _lives_agree(proposal: Proposal, me: PeerId, life: bytes, ready: Mapping[PeerId, Ready]) -> bool:
    """Return False if a proposal gives us another life than ours, or contradicts our announcements.

    A leader could otherwise take the votes of the next round from all other peers. If the proposal adopts results, the lives
    were decided with them, and other peers may have lost their folders since. Absent members keep the life that they had.
    """
    if proposal.adopted is not None:
        return not life or me not in proposal.members or lives_of(proposal.members, proposal.lives).get(me) == life
    found = announced_lives(proposal)
    known = {peer: ready[peer].life for peer in proposal.alive if peer in ready} | {me: life}
    return all(found.get(peer) == known[peer] for peer in proposal.alive if any(known.get(peer, b"")))
