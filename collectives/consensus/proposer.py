"""Proposer: the ballots of one peer in a round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec
from thinwire.collectives.consensus.acceptor import BALLOTS, LEAP, BallotCount, ballot_pause
from thinwire.collectives.consensus.blame import BlameBook
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.farewells import departed
from thinwire.collectives.consensus.justification import Signed, contested, decidable, justify, presentable
from thinwire.collectives.consensus.proposal import (
    DISTRUSTED,
    LEFT,
    ON_TRIAL,
    TWO_ANNOUNCEMENTS,
    UNPROVEN,
    AcceptedValue,
    adopt,
    fit,
    new_lives,
    propose,
    sound,
    with_absent,
)
from thinwire.swarm.messages.registry import (
    Ballot,
    Blame,
    Digest,
    Farewell,
    Leave,
    MemberProof,
    PeerId,
    Promise,
    Proposal,
    Propose,
    Ready,
)

GROWTH = 4.0
"""Maximum factor of the wait for a stuck leader; it doubles with each ballot that fails."""


class Proposer:
    """Ballots of one peer. `ballot`: the one that we lead or prepare, None while another peer leads.

    member_proof: see Announcements.
    """

    def __init__(
        self,
        electorate: Electorate,
        ready: Mapping[PeerId, Ready],
        idle: Collection[PeerId] = (),
        barred: Collection[PeerId] = (),
        member_proof: Callable[[PeerId], MemberProof | None] = lambda peer: None,
    ) -> None:
        self.ballot: Ballot | None = None
        self.urged = False
        """True if an event calls for a new ballot."""
        self.blocked = False
        """True if no ballot can follow from the last promises.

        Two values can have been chosen, or one with newcomers that are not accepted here.
        """
        self.blame_book = BlameBook(idle, barred)
        self._electorate, self._ready, self._terms = electorate, ready, electorate.terms
        self._member_proof = member_proof
        self._promises: dict[PeerId, Signed] | None = None
        self._asked: set[PeerId] = set()
        """Peers that have not answered our ballot: its Prepare, or the proposal once it is open."""
        self._voters: set[PeerId] = set()
        """Members that have answered it with a vote, whether that is valid or not."""
        self._guests: set[PeerId] = set()
        """Peers that have answered it, are ready, and are no members."""
        self._ballots = 0
        """Number of ballots above the first that we or others have begun in this round."""
        self._begun = BallotCount(electorate.views)
        """Those that we have begun."""
        self._reported = 0
        """Highest term that peers have reported when they refused our ballots."""
        self._prepared_at = 0.0
        self._opened_at = 0.0
        self._tried: set[Digest] = set()
        """Digests of the results that our ballots have adopted."""
        self._free = False
        """True if we have led a ballot above the first in which the owners computed the results."""

    @property
    def preparing(self) -> bool:
        """True if we have asked for promises and not opened yet."""
        return self._promises is not None

    @property
    def growth(self) -> float:
        """Factor of the usual wait for a stuck leader, 1 to GROWTH."""
        return min(GROWTH, 2.0 ** max(0, min(self._ballots - BALLOTS, 16)))

    @property
    def unanswered(self) -> tuple[PeerId, ...]:
        """Reachable members that have not answered our last ballot: no promise, or no vote once it was open."""
        return tuple(peer for peer in self._terms.members if peer in self._asked and self._electorate.reaches(peer))

    def leads(self, proposal: Proposal | None) -> bool:
        """Return True if the open ballot is ours, and we have not begun another one."""
        return proposal is not None and proposal.ballot == self.ballot

    def on_other_ballot(self) -> None:
        """Note that another peer has begun a ballot."""
        self._ballots += 1
        self.yield_to_others()

    def follow(self) -> None:
        """Follow a proposal of another peer."""
        self.blocked = False
        self.yield_to_others()

    def yield_to_others(self) -> None:
        """Stop leading: another peer leads, or no peer has answered."""
        self.ballot, self._promises, self.urged = None, None, False

    def first(self, promise: Promise, signature: bytes) -> None:
        """Lead the first ballot, which needs no promises but our own."""
        self.ballot, self._promises = promise.ballot, {self._electorate.me: (promise, signature)}

    def refused(self, promised: Ballot) -> bool:
        """Note that a peer reports this promise. Return True if we should begin a higher ballot at once."""
        self._reported = max(self._reported, promised.term)
        # Without precedence it would stop the other ballot in turn. And reports may be lies, which must not delay it for ever.
        me, views = self._electorate.me, self._electorate.views
        early = views.member == me and self._begun.of(me) < BALLOTS
        return early and self.preparing and self.ballot is not None and self.ballot < promised

    def next(self, promised: Ballot, highest: int, now: float) -> Ballot | None:
        """Return our next ballot above the promised one; None if it is too early, or if no number is left.

        highest: see `Acceptor.highest`.
        """
        # A report may be a lie, and must not use up the terms.
        term = max(promised.term, min(self._reported, highest - LEAP // 2), 1) + 1
        pause = ballot_pause(self._begun.of(self._electorate.me)) * self._terms.patience
        early = pause and now < self._prepared_at + pause
        return Ballot(term, self._electorate.me) if not early and term <= highest else None

    def prepare(self, promise: Promise, signature: bytes, now: float) -> None:
        """Begin a ballot, with our own promise and our signature of it."""
        self._ballots += 1
        self._begun.add(self._electorate.me)
        self.first(promise, signature)
        self.urged, self._prepared_at = False, now
        self._asked, self._guests = self._electorate.live - {self._electorate.me}, set()
        self._voters.clear()
        # Peers on trial must not hold up a ballot.
        self._asked = {peer for peer in self._asked if not self._electorate.on_trial(peer)}

    def note_reported_vote(self, sender: PeerId, message: Promise) -> bool:
        """Note a promise with a vote; return True if it is the first one of a member in our ballot.

        An honest peer promises a ballot once.
        """
        ours = (message.ballot, message.lineage) == (self.ballot, self._terms.lineage)
        first = ours and sender in self._terms.members and sender not in self._voters
        if first:
            self._voters.add(sender)
        return first

    def on_promise(self, sender: PeerId, message: Promise, signature: bytes) -> None:
        """Handle an answer to our Prepare; only those of members count."""
        voted = message.voted
        if message.lineage != self._terms.lineage:
            return
        if self._promises is None or message.ballot != self.ballot or (voted is None) != (message.digest is None):
            return
        if voted is not None and not (sound(voted, self._terms) and voted.ballot < message.ballot):
            return
        self._asked.discard(sender)
        if sender in self._electorate.nonvoters:
            return  # An honest peer without a vote promises nothing.
        if sender in self._terms.members:
            self._promises[sender] = message, signature
        elif sender in self._ready:
            self._guests.add(sender)

    def excuse(self, peer: PeerId) -> None:
        """Stop waiting for a peer that has no state, unless it is a member: its former life may have voted."""
        if peer not in self._terms.members:
            self._asked.discard(peer)

    def on_vote(self, sender: PeerId) -> None:
        """Note that a peer has voted in our open ballot."""
        self._asked.discard(sender)

    def on_peer_lost(self, peer: PeerId, proposal: Proposal | None) -> None:
        """Note that a peer has departed: if it takes part in our ballot, we begin another one."""
        self.urged |= proposal is not None and peer in proposal.alive and self.leads(proposal)

    def on_blame(
        self,
        sender: PeerId,
        message: Blame,
        proposal: Proposal,
        now: float,
        *,
        voters: Collection[PeerId],
        proven: bool = False,
    ) -> None:
        """Handle a complaint about our ballot. voters: peers that have voted in it."""
        if proposal.ballot.leader == self._electorate.me and message.ballot == proposal.ballot:
            late = now >= self._opened_at + self._terms.patience
            changed = self.blame_book.on_message(
                sender,
                message,
                proposal,
                lambda peers: self._electorate.suffice(peers, proposal),
                silent=lambda peer: late and peer not in voters,
                proven=proven,
            )
            self.urged |= changed and self.leads(proposal)

    def on_new_announcement(self, sender: PeerId) -> None:
        """Note that a peer has announced another contribution."""
        left = [
            peer for peer, ready in self._ready.items() if ready.weight > 0 and peer not in self.blame_book.rejected
        ]
        if len(left) < self._terms.min_peers:
            self.blame_book.forgive_all()
        else:
            self.blame_book.forgive(sender)

    def propose(self, before: Proposal | None, now: float) -> Propose | None:
        """Return the proposal, above the first ballot with its promises, once these suffice.

        Stop leading if no quorum answers in time.
        """
        ballot, promises, electorate = self.ballot, self._promises, self._electorate
        assert ballot is not None and promises is not None
        present, late, left = set(self._ready), False, electorate.farewells.below(ballot)
        if ballot.term > 1:
            # Peers that are not ready are asked as well: the swarm may have continued without us, and they would know.
            late = now >= self._prepared_at + self._wait
            if any(map(electorate.reaches, self._asked)) and not late:
                return None
            present = {*promises, *self._guests}
            promises = presentable(promises, left.values())
            if not electorate.enough(promises, left):
                if late:
                    self.yield_to_others()
                return None
        proposal = self._proposal(ballot, present & electorate.live, promises, left, before)
        if proposal is None:
            found = None
        elif ballot.term == 1:
            found = Propose(proposal)
        else:
            found = justify(proposal, promises, left.values())
        if found is not None:
            self._promises = None
            self._asked = set(found.proposal.alive) - {electorate.me}
            self._opened_at = now
        elif late:
            self.yield_to_others()  # Other peers may be reachable by now.
        return found

    @property
    def _wait(self) -> float:
        """Seconds for the answers to our Prepare."""
        views = self._electorate.views
        return self._terms.patience * (views.growth if views.member == self._electorate.me else 1.0)

    def _proposal(
        self,
        ballot: Ballot,
        present: set[PeerId],
        promises: Mapping[PeerId, Signed],
        left: Mapping[PeerId, Leave],
        before: Proposal | None,
    ) -> Proposal | None:
        """Return the proposal of a ballot; None if more promises are needed, or too few peers contribute."""
        able, excluded, distrusted = self._eligible(ballot, present)
        if before is not None:
            few = not self._electorate.enough(set(able) & set(before.group), left)
            # Only peers of the group can vote: there are too few of them, or some do not vote.
            before = None if few or self._electorate.views.growth > 1 else before
        self._choose_idle(able, before)
        farewells = tuple(leave.farewell for leave in left.values())
        found, possible = decidable({peer: one for peer, (one, _) in promises.items()}, left, self._electorate)
        several = self._electorate.liars > 0 and len(possible) > 1
        self.blocked = several or not all(map(self._acceptable, possible))
        if self.blocked:
            return None  # One of them has been chosen, or none; more members must answer.
        # A vote for a contested value may be a lie. So a free ballot comes first, unless an honest peer has voted for it.
        # No value is tried twice: its results may be false, or lost.
        choices = possible or [
            one
            for one in contested(found)
            if one.digest not in self._tried
            and (self._free or self._electorate.confirmed(one.voters))
            and self._acceptable(one)
        ]
        if choices:
            self._tried.add(choices[0].digest)
            carried = farewells, self._electorate.left(choices[0].proposal)
            return adopt(ballot, self._terms, able, choices[0], excluded, *carried, idle=self.blame_book.idle)
        return self._free_proposal(ballot, able, excluded, distrusted, before, farewells)

    def _acceptable(self, value: AcceptedValue) -> bool:
        """Return True if this peer, or an honest voter, accepts the next members of a value."""
        electorate = self._electorate
        return electorate.accepted(value.voters) or electorate.accepts_newcomers(
            value.proposal, self._ready, voted=True
        )

    def _eligible(
        self, ballot: Ballot, present: set[PeerId]
    ) -> tuple[tuple[PeerId, ...], dict[PeerId, str], Collection[PeerId]]:
        """Return the peers that can take part, why others cannot, and the distrusted ones of the former."""
        # A peer that has left takes part again once it announces that it has no vote.
        leaving = {peer for peer in self._electorate.farewells if peer in self._ready and self._ready[peer].voter}
        able, unable = fit(self._terms, present - leaving, self._ready)
        uncounted = self._electorate.uncounted(able, self._ready)
        trial = {peer for peer, why in uncounted.items() if why == ON_TRIAL}
        if ballot.term > 1:  # Others may know other endorsements, and defer a proposal with a newcomer on trial.
            trial |= {peer for peer in able if self._electorate.on_trial(peer)}
        equivocators = self.blame_book.equivocators
        unable |= dict.fromkeys(sorted(trial), ON_TRIAL) | dict.fromkeys(sorted(equivocators), TWO_ANNOUNCEMENTS)
        unable |= {peer: UNPROVEN for peer in able if peer not in unable and self._lacks_proof(peer)}
        able = tuple(peer for peer in able if peer not in unable)
        excluded = dict.fromkeys(self._electorate.farewells, LEFT) | unable
        excluded = {peer: why for peer, why in excluded.items() if peer not in able}
        return able, excluded, [peer for peer, why in uncounted.items() if why == DISTRUSTED]

    def _lacks_proof(self, peer: PeerId) -> bool:
        """Return True if a peer has a new life, and cannot be proven to others, see `member_proof`."""
        new = self._terms.lives.get(peer) != self._ready[peer].life
        return bool(self._terms.lineage) and new and self._member_proof(peer) is None

    def _with_proofs(self, proposal: Proposal) -> Proposal:
        """Return a free proposal with the proofs of its new lives."""
        if not self._terms.lineage:
            return proposal
        new = new_lives(proposal, self._terms)  # `_eligible` has left out peers without a proof.
        proofs = map(self._member_proof, new)
        return msgspec.structs.replace(proposal, member_proofs=tuple(proof for proof in proofs if proof is not None))

    def _choose_idle(self, able: Collection[PeerId], before: Proposal | None) -> None:
        """Choose those of the peers that own no chunks."""
        idle = self.blame_book.idle
        idle |= set(before.idle) if before is not None else set()
        if idle.issuperset(able):
            idle.clear()  # Otherwise no peer would own chunks.
        fresh = set(able) - set(self._terms.members)
        if 2 * len(fresh) <= len(able) and not (idle | fresh).issuperset(able):
            idle |= fresh  # It is not known yet whether newcomers are reliable.

    def _free_proposal(
        self,
        ballot: Ballot,
        able: tuple[PeerId, ...],
        excluded: dict[PeerId, str],
        distrusted: Collection[PeerId],
        before: Proposal | None,
        farewells: tuple[Farewell, ...],
    ) -> Proposal | None:
        """Return a proposal with the group of `before`, or else with all peers; None if too few contribute."""
        rejected, live = self.blame_book.rejected, self._electorate.live
        banned = self._electorate.standing.banned()
        known = {*able, *excluded, *rejected}
        for peer in before.group if before is not None else self._terms.members:
            if peer not in known:
                excluded[peer] = "banned" if peer in banned else "late" if peer in live else "silent"
        for old in (before, None):
            proposal = propose(
                ballot,
                self._terms,
                able,
                self._ready,
                excluded,
                rejected=rejected,
                distrusted=distrusted,
                idle=self.blame_book.idle,
                before=old,
                without_ring=self.blame_book.ring_failed,
                farewells=farewells,
            )
            if proposal is not None:
                self._free |= ballot.term > 1
                absent = self._electorate.retained(proposal.alive, departed(proposal))
                proposal = with_absent(proposal, absent, self._terms)
                return self._with_proofs(proposal)
        self.blame_book.forgive_all()  # Too few contributors are left, in that group and among all peers.
        return None
