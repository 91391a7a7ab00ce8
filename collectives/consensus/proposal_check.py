"""Checks of the proposals of leaders, before an acceptor follows one.

A leader may lie. A proposal needs the leader's signature, from the second ballot on a justification, and members and
contributors that an honest leader could have proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from thinwire.collectives.consensus.acceptor import BALLOTS
from thinwire.collectives.consensus.announcements import Announcements
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.justification import justified
from thinwire.collectives.consensus.proposal import (
    DISTRUSTED,
    ON_TRIAL,
    lives_of,
    statement,
    vote_for,
)
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

    life: our life before we announce one. banned: returns peers that must not become members.
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
        banned: Callable[[], Collection[PeerId]],
    ) -> None:
        self.refused: set[PeerId] = set()
        """Leaders that made a proposal no honest leader makes: they lead no further ballot of this round."""
        self.deferred: tuple[PeerId, Propose] | None = None
        """Proposal with a newcomer that lacks endorsements here, and its sender."""
        self._me, self._life, self._electorate = me, life, electorate
        self._ready, self._equivocation = announcements.newest, equivocation
        self._verify, self._banned = verify, banned

    def admits(self, sender: PeerId, message: Propose, present: Proposal | None) -> bool:
        """Return True if a proposal is newer than the present one and valid, its justification aside.

        A proposal with a newcomer that lacks endorsements here is deferred, because they may arrive soon.
        """
        proposal = message.proposal
        sealed = self.note(proposal)
        if (present is not None and proposal.ballot <= present.ballot) or sender in self.refused:
            return False
        first, free = proposal.ballot.term == 1, proposal.adopted is None
        if not sealed or bool(message.reports or message.earlier) == first:
            return False
        if first and not free:
            return False  # No results exist before the first ballot.
        if free and not set(proposal.alive).isdisjoint(self._banned()):
            return False
        if free and ON_TRIAL in self._electorate.uncounted(proposal.alive, self._ready).values():
            self.deferred = sender, message
            return False
        self.deferred = None
        if free and proposal.ballot.term <= BALLOTS and self._misplaced(proposal):
            self.refused.add(proposal.ballot.leader)
            return False
        mine = self._ready.get(self._me)
        agree = _lives_agree(proposal, self._me, mine.life if mine is not None else self._life, self._ready)
        return agree and self._electorate.farewells.valid(proposal)

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
    were decided with them, and other peers may have lost their folders since.
    """
    found = lives_of(proposal.members, proposal.lives)
    if life and me in proposal.members and found.get(me) != life:
        return False
    known = (
        {} if proposal.adopted is not None else {peer: ready[peer].life for peer in proposal.members if peer in ready}
    )
    return all(found.get(peer) == announced for peer, announced in known.items() if any(announced))
