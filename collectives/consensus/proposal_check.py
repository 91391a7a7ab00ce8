"""Announcements of a round, and checks of the proposals of leaders before an acceptor follows one.

A leader may lie. A proposal needs the leader's signature, from the second ballot on a justification, and members and
contributors that an honest leader could have proposed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from thinwire.collectives.consensus.acceptor import BALLOTS
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.justification import justified
from thinwire.collectives.consensus.proposal import (
    DISTRUSTED,
    ON_TRIAL,
    lives_of,
    names,
    statement,
    vote_for,
)
from thinwire.swarm.evidence import Accuse, Equivocation
from thinwire.swarm.lineage import Verify
from thinwire.swarm.messages.registry import (
    Announced,
    Blame,
    Commit,
    Contribution,
    Digest,
    Message,
    PeerId,
    Proposal,
    Propose,
    Ready,
    Said,
    ShownReady,
    Vote,
)


class ProposalCheck:
    """Checks and announcements of one round, and the signed statements of others that a peer has seen.

    life: our life before we announce one. accuse: see Equivocation. banned: returns peers that must not become members.
    """

    def __init__(
        self,
        me: PeerId,
        life: bytes,
        electorate: Electorate,
        *,
        sign: Callable[[Message], bytes],
        verify: Verify,
        accuse: Accuse,
        banned: Callable[[], Collection[PeerId]],
    ) -> None:
        self.refused: set[PeerId] = set()
        """Leaders that made a proposal no honest leader makes: they lead no further ballot of this round."""
        self.deferred: tuple[PeerId, Propose] | None = None
        """Proposal with a newcomer that lacks endorsements here, and its sender."""
        self.ready: dict[PeerId, Ready] = {}
        """The newest announcement of each peer, our own included."""
        self._named: dict[Digest, ShownReady] = {}  # by digest, see `keep`
        self._me, self._life, self._electorate = me, life, electorate
        self._differ = False
        self._sign, self._verify, self._banned = sign, verify, banned
        self._equivocation = Equivocation(accuse)

    def admits(self, sender: PeerId, message: Propose, present: Proposal | None) -> bool:
        """Return True if a proposal is newer than the present one and valid, its justification aside.

        A proposal with a newcomer that lacks endorsements here is deferred, because they may arrive soon.
        """
        opened = message.proposal
        sealed = self.note(opened)
        if (present is not None and opened.ballot <= present.ballot) or sender in self.refused:
            return False
        first, free = opened.ballot.term == 1, opened.adopted is None
        if not sealed or bool(message.reports or message.earlier) == first:
            return False
        if first and not free:
            return False  # No results exist before the first ballot.
        if free and not set(opened.alive).isdisjoint(self._banned()):
            return False
        if free and ON_TRIAL in self._electorate.uncounted(opened.alive, self.ready).values():
            self.deferred = sender, message
            return False
        self.deferred = None
        if free and opened.ballot.term <= BALLOTS and self._misplaced(opened):
            self.refused.add(opened.ballot.leader)
            return False
        mine = self.ready.get(self._me)
        agree = _lives_agree(opened, self._me, mine.life if mine is not None else self._life, self.ready)
        return agree and self._electorate.farewells.valid(opened)

    def justified(self, message: Propose) -> bool:
        """Return True if the value of a proposal follows from its promises; otherwise refuse the leader."""
        if justified(message, self._electorate, self._verify):
            return True
        # An honest leader sends no such proposal. Its further ballots in this round would only take time.
        self.refused.add(message.proposal.ballot.leader)
        return False

    def _misplaced(self, opened: Proposal) -> bool:
        """Return True if contributors that the members distrust count, and enough others are there.

        The leader has the announcements of all of `alive`, so an honest one knows at least the distrust that we know of
        these. (Not if a member sends different announcements; so only a few ballots of a round are refused.)
        """
        announced = {peer: self.ready[peer] for peer in opened.alive if peer in self.ready}
        peers = [entry.peer for entry in opened.contributors]
        enough = len(peers) > self._electorate.terms.min_peers
        return enough and DISTRUSTED in self._electorate.uncounted(peers, announced).values()

    # --- signed statements

    def note(self, opened: Proposal) -> bool:
        """Note the leader's signature of a proposal; return False if it is invalid."""
        lineage = self._electorate.terms.lineage
        if not lineage:
            return True
        signed, leader = statement(opened), opened.ballot.leader
        if opened.lineage != lineage or not self._verify(leader, signed, opened.seal):
            return False
        self._equivocation.note(leader, signed, opened.seal)
        return True

    def note_vote(self, voter: PeerId, vote: Vote, signature: bytes) -> None:
        """Note a vote with a valid signature."""
        self._equivocation.note(voter, vote, signature)

    def announced(self, entry: Contribution) -> Ready | None:
        """Return the announcement that an entry of a proposal names; None if it is not known here, or differs."""
        ready = self.ready.get(entry.peer)
        if ready is not None and names(entry, ready):
            return ready
        shown = self._named.get(entry.announced)
        return shown.ready if shown is not None else None

    def keep(self, opened: Proposal, voted: Proposal | None) -> None:
        """Keep the announcements that a proposal and our last vote name.

        Their peers may replace them, but the results depend on these, and a later ballot may adopt those of our vote.
        """
        before, self._named = self._named, {}
        for entry in (*opened.contributors, *(voted.contributors if voted is not None else ())):
            if entry.announced and (shown := before.get(entry.announced) or self._present(entry)) is not None:
                self._named[entry.announced] = shown

    def _present(self, entry: Contribution) -> ShownReady | None:
        ready = self.ready.get(entry.peer)
        if ready is None or not names(entry, ready):
            return None
        said = ready.statement()
        signature = self._sign(said) if entry.peer == self._me else self._equivocation.signature_of(entry.peer, said)
        return ShownReady(entry.peer, ready, signature or b"")

    @property
    def named(self) -> list[ShownReady]:
        """Announcements that are kept, for a peer that may lack them."""
        return [shown for shown in self._named.values() if shown.signature]

    def take_shown(self, shown: ShownReady, opened: Proposal) -> None:
        """Store an announcement that the proposal in progress names, and that another peer shows."""
        peer, ready = shown.peer, shown.ready
        entry = next((one for one in opened.contributors if one.peer == peer), None)
        if entry is None or not entry.announced or not names(entry, ready) or self.announced(entry) is not None:
            return
        if self._verify(peer, ready.statement(), shown.signature):
            self.note_announcement(peer, ready.statement(), shown.signature)
            self._named[entry.announced] = shown

    def hear(self, sender: PeerId, message: Ready, signature: bytes) -> bool:
        """Note an announcement; return True if it replaces an earlier one of its sender."""
        known, terms = self.ready.get(sender), self._electorate.terms
        if sender != self._me and (known is None or message.attempt >= known.attempt):
            self.note_announcement(sender, message.statement(), signature)
        if known is not None and message.attempt <= known.attempt:
            return False
        self.ready[sender] = message
        if not message.witness or terms.other_life(sender, message.life):
            self._electorate.mute.add(sender)
        self._differ |= message.base != terms.base
        return known is not None

    @property
    def outnumbered(self) -> bool:
        """True if most members have announced another state than ours."""
        if not self._differ:
            return False
        terms = self._electorate.terms
        bases = Counter(self.ready[peer].base for peer in terms.members if peer in self.ready)
        del bases[terms.base]
        return 2 * max(bases.values(), default=0) > len(terms.members)

    def note_announcement(self, peer: PeerId, announced: Announced, signature: bytes) -> None:
        """Note an announcement with a valid signature."""
        self._equivocation.note(peer, announced, signature)

    def contradicted(self, opened: Proposal) -> list[PeerId]:
        """Return the other contributors of which a free proposal names another announcement than we have."""
        if opened.adopted is not None:
            return []  # The results are settled.
        pairs = [(entry, self.ready.get(entry.peer)) for entry in opened.contributors if entry.peer != self._me]
        return [one.peer for one, ready in pairs if ready and ready.attempt == one.attempt and not names(one, ready)]

    def other_life(self, opened: Proposal) -> tuple[PeerId, Said | None]:
        """Return a member whose life in a free proposal contradicts its announcement, and that announcement.

        Return an empty id and None if there is no such member.
        """
        lives = lives_of(opened.members, opened.lives) if opened.adopted is None else {}
        for peer, life in lives.items():
            ready = self.ready.get(peer)
            if (
                peer != self._me
                and ready is not None
                and ready.life != life
                and (announced := self.shown(peer)) is not None
            ):
                return peer, announced
        return b"", None

    def shown(self, peer: PeerId) -> Said | None:
        """Return the last announcement that we know of a peer, with its signature."""
        ready = self.ready.get(peer)
        signature = None if ready is None else self._equivocation.signature_of(peer, ready.statement())
        return Said(ready.statement(), signature) if ready is not None and signature is not None else None

    def proves(self, blame: Blame, opened: Proposal) -> bool:
        """Return True if a complaint shows an announcement that contradicts the proposal.

        It has other data under the same number, or another life. Adopted results name the lives at their decision, which
        may have ended since.
        """
        if blame.said is None:
            return False
        announced, signature = blame.said.statement, blame.said.signature
        if (announced.round, announced.fragment) != (opened.round, opened.fragment):
            return False
        named = next((entry for entry in opened.contributors if entry.peer == blame.peer), None)
        other_data = named is not None and announced.attempt == named.attempt and announced.digest != named.announced
        life = lives_of(opened.members, opened.lives).get(blame.peer, announced.life)
        other_life = opened.adopted is None and life != announced.life
        if not (other_data or other_life) or not self._verify(blame.peer, announced, signature):
            return False
        self.note_announcement(blame.peer, announced, signature)
        return True

    def note_commit(self, commit: Commit) -> None:
        """Note the signatures in a commit."""
        self.note(commit.opened)
        vote = vote_for(commit.opened, commit.digest)
        for proof in commit.votes:
            if self._verify(proof.peer, vote, proof.signature):
                self._equivocation.note(proof.peer, vote, proof.signature)


def _lives_agree(opened: Proposal, me: PeerId, life: bytes, ready: Mapping[PeerId, Ready]) -> bool:
    """Return False if a proposal gives us another life than ours, or contradicts our announcements.

    A leader could otherwise take the votes of the next round from all other peers. If the proposal adopts results, the lives
    were decided with them, and other peers may have lost their folders since.
    """
    found = lives_of(opened.members, opened.lives)
    if life and me in opened.members and found.get(me) != life:
        return False
    known = {} if opened.adopted is not None else {peer: ready[peer].life for peer in opened.members if peer in ready}
    return all(found.get(peer) == announced for peer, announced in known.items() if any(announced))
