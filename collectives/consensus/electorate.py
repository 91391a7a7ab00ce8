"""Electorate of a round: its members, those that this peer can reach, and their order as leaders."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from thinwire.collectives.consensus.farewells import Farewells, departed
from thinwire.collectives.consensus.members.peer_standing import PeerStanding
from thinwire.collectives.consensus.members.quorum import fewest, possible, tolerated
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.proposal import DISTRUSTED, ON_TRIAL, new_lives
from thinwire.swarm.lineage import Verify
from thinwire.swarm.messages.registry import Farewell, PeerId, Proposal, Ready

VIEW = 4.0
"""Patiences that a view lasts in the first rotation: for promises, a proposal, results and votes."""

ROTATIONS = 4
"""Rotations after which this time no longer doubles."""


class LeaderViews:
    """Views of a round that does not end: in each of them another member has precedence.

    In the first view none has it; then it follows the leader order.

    The rules are those of PBFT (Castro and Liskov, Practical Byzantine Fault Tolerance, 1999, section 4.4): a peer asks for
    the next view when the present one has lasted its time, and for a later one when more members ask for it than may lie.
    It enters a view once a quorum has asked for it. So honest members enter a view at the same time, although their
    patiences differ, and liars cannot end a view early. In each rotation views last twice as long.
    """

    def __init__(self, me: PeerId, terms: RoundTerms, farewells: Farewells) -> None:
        self._me, self._terms, self._farewells = me, terms, farewells
        self.number = 0
        self._ask_at, self._changed = math.inf, False
        self._asked: dict[PeerId, int] = {}
        """Highest view that each member has asked for."""

    @property
    def asked(self) -> int:
        """Highest view that this peer has asked for."""
        return self._asked.get(self._me, 0)

    def resume(self, number: int) -> None:
        """Begin with a later view than the first one, after a restart."""
        self.number = max(self.number, number)

    def begin(self, now: float) -> None:
        """Enter the first view, unless one has begun: there is a ballot."""
        if self._ask_at == math.inf:
            self._enter(self.number, now)

    def extend(self, now: float) -> None:
        """Let the first view last longer: the first ballot makes progress."""
        if self._ask_at < math.inf and not self._changed:
            self._ask_at = now + self._length

    @property
    def member(self) -> PeerId:
        """The member that has precedence; empty until members have entered a view together."""
        members = self._terms.members
        return members[self.number % len(members)] if self._changed else b""

    def due(self, now: float) -> bool:
        """Return True if it is time to ask for the next view, or to repeat that."""
        return now >= self._ask_at

    def ask(self, now: float) -> None:
        """Ask for the next view."""
        self._ask_at = now + self._length
        self._note(self._me, max(self.asked, self.number + 1), now)

    def on_change(self, sender: PeerId, view: int, now: float) -> bool:
        """Note that a member asks for a view; return True if this peer asks for a later one than before, too."""
        self._note(sender, max(view, self._asked.get(sender, 0)), now)
        others = sorted((asked for peer, asked in self._asked.items() if peer != self._me), reverse=True)
        # The first ones may lie, with quorums of half the members as well: there a third could fork a round, but not stop it.
        honest = max(1, (len(self._terms.members) - 1) // 3)
        if len(others) <= honest or others[honest] <= self.asked:
            return False
        self._note(self._me, others[honest], now)
        return True

    def _note(self, peer: PeerId, view: int, now: float) -> None:
        self._asked[peer] = view
        for number in sorted({one for one in self._asked.values() if one > self.number}, reverse=True):
            asking = {one for one, asked in self._asked.items() if asked >= number}
            if self._terms.enough(asking, set(self._farewells)):
                self._changed = True
                self._enter(number, now)
                break

    def _enter(self, number: int, now: float) -> None:
        self.number = number
        self._ask_at = now + self._length

    @property
    def growth(self) -> float:
        """Factor by which the view lasts longer than the first one, so that slow links have enough time."""
        members = max(1, len(self._terms.members))  # A newcomer without a state knows none.
        return 2.0 ** min(ROTATIONS, self.number // members)

    @property
    def _length(self) -> float:
        return VIEW * self._terms.patience * self.growth


class Electorate:
    """Members of a round. `live`: peers with a link, and ourselves.

    `nonvoters`: peers without a vote in it. `farewells`: of the members that have left. `standing`: how this peer
    judges others.
    """

    def __init__(
        self,
        me: PeerId,
        terms: RoundTerms,
        live: Collection[PeerId],
        verify: Verify,
        standing: PeerStanding | None = None,
    ) -> None:
        self.me, self.terms, self.standing = me, terms, standing or PeerStanding()
        self.live, self.nonvoters = set(live) | {me}, set[PeerId]()
        self.farewells = Farewells(terms, verify)
        self.views = LeaderViews(me, terms, self.farewells)

    def enough(self, agreeing: Collection[PeerId], left: Collection[PeerId] | None = None) -> bool:
        """Return True if a quorum of the members without `left` agrees (default: all with a farewell)."""
        return self.terms.enough(agreeing, set(self.farewells) if left is None else left)

    def on_trial(self, peer: PeerId) -> bool:
        """Return True if a peer is no member and needs an endorsement to become one."""
        return peer not in self.terms.members and self.standing.on_trial(peer)

    def accepts_newcomers(self, proposal: Proposal, ready: Mapping[PeerId, Ready], *, voted: bool) -> bool:
        """Return True if no newcomer of a proposal is excluded here, and all on trial are endorsed.

        voted: True if there are votes for results with these members. The honest voters had endorsements of a quorum. Then
        endorsements of more members than may lie are enough, because liars may have withheld theirs from this peer.
        """
        newcomers = zip(new_lives(proposal, self.terms), proposal.member_proofs, strict=False)
        if any(self.standing.is_excluded(peer, proof.token) for peer, proof in newcomers):
            return False
        endorsers = [self._endorsers(peer, ready) for peer in proposal.members if self.on_trial(peer)]
        return all(len(one) > self.liars if voted else self.enough(one) for one in endorsers)

    def _endorsers(self, peer: PeerId, ready: Mapping[PeerId, Ready]) -> set[PeerId]:
        """Return the members that endorse a peer on trial, by their announcements in this round."""
        return {one for one in self.terms.members if one in ready and peer in ready[one].endorses}

    def uncounted(self, peers: Iterable[PeerId], ready: Mapping[PeerId, Ready]) -> dict[PeerId, str]:
        """Return those of `peers` whose contributions should not count, with reasons.

        It is the opinion of the members. ON_TRIAL: the peer needs endorsements of a quorum to become a member, and lacks
        them. DISTRUSTED: more than half of the other members distrust it, at least two, so a minority cannot take the weight
        of a member. The opinions are those in the announcements of the round, which their members have signed.
        """
        announced = {one: ready[one] for one in self.terms.members if one in ready}
        against = Counter(peer for one in announced for peer in set(announced[one].distrusts) - {one})
        found: dict[PeerId, str] = {}
        for peer in peers:
            others = len(self.terms.members) - (peer in self.terms.members)
            if self.on_trial(peer) and not self.enough(self._endorsers(peer, ready)):
                found[peer] = ON_TRIAL
            elif against[peer] > 1 and 2 * against[peer] > others:
                found[peer] = DISTRUSTED
        return found

    def possible(self, agreeing: Collection[PeerId], left: Collection[PeerId]) -> bool:
        """Return True if these members and the tolerated liars may be a quorum of the members without `left`."""
        return possible(agreeing, self.terms.by_seniority, left, fraction=self.terms.fraction)

    @property
    def liars(self) -> int:
        """Number of members that may lie."""
        return tolerated(len(self.terms.members), self.terms.fraction)

    def retained(self, alive: Collection[PeerId], gone: Collection[PeerId]) -> tuple[PeerId, ...]:
        """Return the members that stay members without a part in a ballot.

        They are as many as the next members need to tolerate as many liars as those of this round, or all but `gone`, which
        have left with a farewell. Otherwise each absence of an honest member would increase the share of the liars. The most
        senior ones stay, banned ones only if there are too few others: not all peers may know the evidence.
        """
        terms, banned = self.terms, self.standing.banned()
        present = {*alive, *gone}
        absent = [peer for peer in terms.by_seniority if peer not in present and peer in terms.lives]
        absent.sort(key=lambda peer: peer in banned)
        return tuple(absent[: max(0, fewest(self.liars) - len(alive))])

    def left(self, proposal: Proposal) -> tuple[Farewell, ...]:
        """Return the signed farewells of a proposal that explain why members are left out.

        Empty if enough members stay, see `retained`.
        """
        if not self.retained(proposal.members, ()):
            return ()
        found = {
            one.peer: one
            for one in (*proposal.farewells, *proposal.left)
            if one.peer not in proposal.members and self.farewells.is_signed(one)
        }
        return tuple(found[peer] for peer in sorted(found))

    def keeps_enough(self, proposal: Proposal) -> bool:
        """Return True if enough members stay members, see `retained`."""
        return not self.retained(proposal.members, [one.peer for one in self.left(proposal)])

    def suffice(self, agreeing: Collection[PeerId], proposal: Proposal) -> bool:
        """Return True if these peers can commit a proposal."""
        return self.enough(agreeing, departed(proposal))

    @property
    def spares_me(self) -> bool:
        """True if the other members that this peer can reach are a quorum after its farewell."""
        reached = self.live.intersection(self.terms.members) - {self.me}
        return self.enough(reached, {*self.farewells, self.me})

    def confirmed(self, voters: Collection[PeerId]) -> bool:
        """Return True if more members report votes for some results than may lie: at least two.

        Then an honest one has checked them.
        """
        return len(voters) > max(1, self.liars)

    def accepted(self, voters: Collection[PeerId]) -> bool:
        """Return True if an honest one of these voters has accepted the next members.

        It is this peer, or one of more voters than may lie.
        """
        return not self.liars or self.me in voters or self.confirmed(voters)

    def reaches(self, peer: PeerId) -> bool:
        """Return True if `peer` is reachable, has not left, and is not known to have no vote."""
        return peer in self.live and peer not in self.nonvoters and peer not in self.farewells

    @property
    def able(self) -> bool:
        """True if the members that this peer can reach, and that have a vote, are a quorum."""
        return self.enough(self.live - self.nonvoters)

    @property
    def absent(self) -> tuple[PeerId, ...]:
        """Members that this peer cannot reach, or that have no vote, in leader order."""
        return tuple(peer for peer in self.terms.members if not self.reaches(peer) and peer not in self.farewells)

    def waiting_for(self, ready: Collection[PeerId]) -> tuple[PeerId, ...]:
        """Return the reachable members and applicants that are not ready yet.

        An applicant is a peer with a grace that is no member.
        """
        applicants = self.terms.graces.keys() - set(self.terms.members)
        awaited = (*self.terms.members, *sorted(applicants))
        return tuple(peer for peer in awaited if self.reaches(peer) and peer not in ready)

    def order(self, leader: PeerId) -> list[PeerId]:
        """Return the reachable members in the order in which they lead; `leader` is the first of them."""
        order = [peer for peer in self.terms.members if peer in self.live and peer not in self.farewells]
        return [leader, *[peer for peer in order if peer != leader]] if leader in order else order
