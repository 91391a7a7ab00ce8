"""Announcements of a round at one peer, and the comparison of proposals with them."""

from __future__ import annotations

from collections import Counter

from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.proposal import names, new_lives
from thinwire.swarm.evidence import Equivocation
from thinwire.swarm.keyring import Keyring
from thinwire.swarm.messages.registry import (
    Announced,
    Blame,
    Contribution,
    Digest,
    MemberProof,
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

    def __init__(self, keyring: Keyring, electorate: Electorate, equivocation: Equivocation) -> None:
        self.newest: dict[PeerId, Ready] = {}
        """The newest announcement of each peer, our own included."""
        self._signatures: dict[PeerId, bytes] = {}
        """Signatures of the newest announcements of others."""
        self._named: dict[Digest, ShownReady] = {}  # by digest, see `keep`
        self._me, self._keyring, self._electorate, self._equivocation = keyring.me, keyring, electorate, equivocation
        self._standing = electorate.standing
        self._differ = False

    def add(self, sender: PeerId, message: Ready, signature: bytes) -> bool:
        """Add an announcement; return True if it replaces an earlier one of its sender."""
        known, terms = self.newest.get(sender), self._electorate.terms
        if sender != self._me and (known is None or message.attempt >= known.attempt):
            self._equivocation.note(sender, message.statement(), signature)
        if known is not None and message.attempt <= known.attempt:
            return False
        self.newest[sender], self._signatures[sender] = message, signature
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
        """Return the newest announcement of a peer with its signature; None if there is none."""
        if (ready := self.newest.get(peer)) is None:
            return None
        said = ready.statement()
        return SignedAnnouncement(said, self._keyring.sign(said) if peer == self._me else self._signatures[peer])

    # --- new members

    def member_proof(self, peer: PeerId) -> MemberProof | None:
        """Return the proof that a peer with its newest announcement may become a member.

        None: there is no announcement, the key or the admission of the peer is unknown, or it is excluded.
        """
        signed, key, token = self.signed(peer), self._keyring.key_of(peer), self._standing.token_of(peer)
        if signed is None or key is None or not self._standing.is_admitted(peer, token):
            return None
        if self._standing.is_excluded(peer, token):
            return None
        return MemberProof(signed.statement.attempt, signed.statement.digest, key, signed.signature, token)

    def members_proven(self, proposal: Proposal) -> bool:
        """Return True if a proposal proves each new life.

        The proof is an announcement of its peer, and the token by which the run admits this peer.
        """
        if not self._electorate.terms.lineage:
            return True
        lives = new_lives(proposal, self._electorate.terms).items()
        return len(lives) == len(proposal.member_proofs) and all(
            self._proves_member(proposal, *new, proof) for new, proof in zip(lives, proposal.member_proofs, strict=True)
        )

    def _proves_member(self, proposal: Proposal, peer: PeerId, life: bytes, proof: MemberProof) -> bool:
        base = self._electorate.terms.base
        said = Announced(proposal.round, proposal.fragment, proof.attempt, life, base, proof.announced)
        signed = self._keyring.verify_with(proof.key, peer, said, proof.signature)
        return signed and self._standing.is_admitted(peer, proof.token)

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
        signed = self.signed(entry.peer)
        return ShownReady(entry.peer, ready, signed.signature if signed is not None else b"")

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
        if self._keyring.verify(peer, ready.statement(), shown.signature):
            self._equivocation.note(peer, ready.statement(), shown.signature)
            self._named[entry.announced] = shown

    # --- proposals that contradict announcements

    def contradicted(self, proposal: Proposal) -> list[PeerId]:
        """Return the other contributors of which a free proposal names another announcement than we have."""
        if proposal.adopted is not None:
            return []  # The results are settled.
        pairs = [(entry, self.newest.get(entry.peer)) for entry in proposal.contributors if entry.peer != self._me]
        return [one.peer for one, ready in pairs if ready and ready.attempt == one.attempt and not names(one, ready)]

    def proves(self, blame: Blame, proposal: Proposal) -> bool:
        """Return True if a complaint shows an announcement that contradicts the proposal.

        It has other data under the same number.
        """
        if blame.said is None:
            return False
        announced, signature = blame.said.statement, blame.said.signature
        if (announced.round, announced.fragment) != (proposal.round, proposal.fragment):
            return False
        named = next((entry for entry in proposal.contributors if entry.peer == blame.peer), None)
        if named is None or announced.attempt != named.attempt or announced.digest == named.announced:
            return False
        if not self._keyring.verify(blame.peer, announced, signature):
            return False
        self._equivocation.note(blame.peer, announced, signature)
        return True
