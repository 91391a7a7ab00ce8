"""Announcements of a round at one peer, and the comparison of proposals with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.proposal import announced_lives, names
from thinwire.swarm.evidence import Equivocation
from thinwire.swarm.lineage import Verify
from thinwire.swarm.messages.registry import (
    Blame,
    Contribution,
    Digest,
    Message,
    PeerId,
    Proposal,
    Ready,
    ShownReady,
    SignedAnnouncement,
)


class Announcements:
    """Announcements of one round: the newest of each peer, and those that its proposals name.

    equivocation: gets each announcement with a valid signature, because two with one number are evidence.
    """

    def __init__(
        self,
        me: PeerId,
        electorate: Electorate,
        equivocation: Equivocation,
        *,
        sign: Callable[[Message], bytes],
        verify: Verify,
    ) -> None:
        self.newest: dict[PeerId, Ready] = {}
        """The newest announcement of each peer, our own included."""
        self._named: dict[Digest, ShownReady] = {}  # by digest, see `keep`
        self._me, self._electorate, self._equivocation = me, electorate, equivocation
        self._sign, self._verify = sign, verify
        self._differ = False

    def add(self, sender: PeerId, message: Ready, signature: bytes) -> bool:
        """Add an announcement; return True if it replaces an earlier one of its sender."""
        known, terms = self.newest.get(sender), self._electorate.terms
        if sender != self._me and (known is None or message.attempt >= known.attempt):
            self._equivocation.note(sender, message.statement(), signature)
        if known is not None and message.attempt <= known.attempt:
            return False
        self.newest[sender] = message
        if not message.voter or terms.other_life(sender, message.life):
            self._electorate.nonvoters.add(sender)
        self._differ |= message.base != terms.base
        return known is not None

    @property
    def outnumbered(self) -> bool:
        """True if most members have announced another state than ours."""
        if not self._differ:
            return False
        terms = self._electorate.terms
        bases = Counter(self.newest[peer].base for peer in terms.members if peer in self.newest)
        del bases[terms.base]
        return 2 * max(bases.values(), default=0) > len(terms.members)

    def signed(self, peer: PeerId) -> SignedAnnouncement | None:
        """Return the newest announcement of a peer with its signature; None if one of them is unknown here."""
        ready = self.newest.get(peer)
        signature = None if ready is None else self._equivocation.signature_of(peer, ready.statement())
        return SignedAnnouncement(ready.statement(), signature) if ready is not None and signature is not None else None

    # --- announcements that proposals name

    def find(self, entry: Contribution) -> Ready | None:
        """Return the announcement that an entry of a proposal names; None if it is not known here, or differs."""
        ready = self.newest.get(entry.peer)
        if ready is not None and names(entry, ready):
            return ready
        shown = self._named.get(entry.announced)
        return shown.ready if shown is not None else None

    def keep(self, proposal: Proposal, voted: Proposal | None) -> None:
        """Store the announcements that a proposal and our last vote name.

        Their peers may announce again, but the results depend on these announcements, and a later ballot may adopt our vote.
        """
        before, self._named = self._named, {}
        for entry in (*proposal.contributors, *(voted.contributors if voted is not None else ())):
            if entry.announced and (shown := before.get(entry.announced) or self._shown(entry)) is not None:
                self._named[entry.announced] = shown

    def _shown(self, entry: Contribution) -> ShownReady | None:
        ready = self.newest.get(entry.peer)
        if ready is None or not names(entry, ready):
            return None
        said = ready.statement()
        signature = self._sign(said) if entry.peer == self._me else self._equivocation.signature_of(entry.peer, said)
        return ShownReady(entry.peer, ready, signature or b"")

    @property
    def kept(self) -> list[ShownReady]:
        """Announcements that `keep` has stored, for a peer that may lack them."""
        return [shown for shown in self._named.values() if shown.signature]

    def add_shown(self, shown: ShownReady, proposal: Proposal) -> None:
        """Store an announcement that the proposal in progress names, and that another peer shows."""
        peer, ready = shown.peer, shown.ready
        entry = next((one for one in proposal.contributors if one.peer == peer), None)
        if entry is None or not entry.announced or not names(entry, ready) or self.find(entry) is not None:
            return
        if self._verify(peer, ready.statement(), shown.signature):
            self._equivocation.note(peer, ready.statement(), shown.signature)
            self._named[entry.announced] = shown

    # --- proposals that contradict announcements

    def contradicted(self, proposal: Proposal) -> list[PeerId]:
        """Return the other contributors of which a free proposal names another announcement than we have."""
        if proposal.adopted is not None:
            return []  # The results are settled.
        pairs = [(entry, self.newest.get(entry.peer)) for entry in proposal.contributors if entry.peer != self._me]
        return [one.peer for one, ready in pairs if ready and ready.attempt == one.attempt and not names(one, ready)]

    def other_life(self, proposal: Proposal) -> tuple[PeerId, SignedAnnouncement | None]:
        """Return a peer whose life in a free proposal contradicts its announcement, and that announcement.

        Return an empty id and None if there is no such peer.
        """
        for peer, life in announced_lives(proposal).items():
            ready = self.newest.get(peer)
            if (
                peer != self._me
                and ready is not None
                and ready.life != life
                and (announced := self.signed(peer)) is not None
            ):
                return peer, announced
        return b"", None

    def proves(self, blame: Blame, proposal: Proposal) -> bool:
        """Return True if a complaint shows an announcement that contradicts the proposal.

        It has other data under the same number, or another life. Adopted results name the lives at their decision, which
        may have ended since.
        """
        if blame.said is None:
            return False
        announced, signature = blame.said.statement, blame.said.signature
        if (announced.round, announced.fragment) != (proposal.round, proposal.fragment):
            return False
        named = next((entry for entry in proposal.contributors if entry.peer == blame.peer), None)
        other_data = named is not None and announced.attempt == named.attempt and announced.digest != named.announced
        other_life = announced_lives(proposal).get(blame.peer, announced.life) != announced.life
        if not (other_data or other_life) or not self._verify(blame.peer, announced, signature):
            return False
        self._equivocation.note(blame.peer, announced, signature)
        return True
