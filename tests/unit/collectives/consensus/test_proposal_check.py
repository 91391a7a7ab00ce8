"""Checks of the proposals of leaders: order of ballots, signatures, evidence, and proofs of members."""

from __future__ import annotations

import msgspec
import pytest
from kit.rounds.agreements import sign, verify
from kit.rounds.fake_keys import FakeKeys
from kit.rounds.round_harness import freely
from thinwire.collectives.consensus.acceptor import BALLOTS
from thinwire.collectives.consensus.announcements import Announcements
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.justification import justify
from thinwire.collectives.consensus.members.lives import lives_in_order
from thinwire.collectives.consensus.members.quorum import TWO_THIRDS
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.proposal import statement, vote_for
from thinwire.collectives.consensus.proposal_check import MAX_GENUINE, ProposalCheck
from thinwire.swarm.evidence import Equivocation
from thinwire.swarm.messages.registry import (
    LIFE,
    Ballot,
    Commit,
    Contribution,
    MemberProof,
    Promise,
    Proof,
    Proposal,
    Propose,
    Ready,
    Report,
)

IDS = tuple(bytes([number]) * 32 for number in range(4))
ANN, ME, LEADER, DAN = IDS
LIVES = {peer: bytes([100 + at]) * LIFE for at, peer in enumerate(IDS)}
LINEAGE = b"l" * LIFE
TERMS = RoundTerms(
    5, 0, (LEADER, ANN, ME, DAN), bytes(32), bytes(32), fraction=TWO_THIRDS, lives=LIVES, lineage=LINEAGE
)
RESULTS, OTHER_RESULTS = b"r" * 32, b"o" * 32


class Scene:
    """Check of one peer. `found`: accused peers. `verified`: number of verified signatures."""

    def __init__(self) -> None:
        self.found, self.verified = [], 0
        keys = FakeKeys(ME, sign, self.verify)
        equivocation = Equivocation(lambda peer, first, second: self.found.append(peer))
        electorate = Electorate(ME, TERMS, IDS, self.verify)
        self.announcements = Announcements(keys, electorate, equivocation)
        self.check = ProposalCheck(electorate, self.announcements, equivocation, self.verify)

    def verify(self, peer, message, signature):
        self.verified += 1
        return verify(peer, message, signature)

    def admits(self, proposal, sender=LEADER, present=None):
        """Check a proposal; above the first ballot three members have promised and have not voted."""
        later = proposal.ballot.term > 1
        message = freely(proposal, IDS[:3], sign) if later else Propose(proposal)
        concerns = self.check.concerns(sender, message, present)
        return concerns and self.check.valid(message) and self.check.accepts(proposal)


def proposal_of(term=1, peers=IDS, contributors=IDS, seal=None, **changes):
    """Return a proposal of the leader, with these peers. seal: signature instead of the leader's."""
    entries = tuple(Contribution(peer, 1, 1, bytes(32)) for peer in contributors)
    made = Proposal(
        *(5, 0, Ballot(term, LEADER), peers, peers, entries, (), None, ()),
        lives=lives_in_order(peers, LIVES),
        lineage=LINEAGE,
        electorate=TERMS.electorate,
    )
    made = msgspec.structs.replace(made, **changes)
    return msgspec.structs.replace(made, seal=sign(LEADER, statement(made)) if seal is None else seal)


def test_proposal_of_its_leader_is_admitted_unless_one_of_its_ballot_or_a_later_one_is_here():
    assert Scene().admits(proposal_of(2))
    for present, admitted in ((1, True), (2, False), (3, False)):
        assert Scene().admits(proposal_of(2), present=proposal_of(present)) == admitted


def test_proposal_with_a_forged_seal_is_not_admitted_and_gives_no_evidence():
    scene = Scene()
    assert not scene.admits(proposal_of(seal=bytes(64)))
    assert scene.admits(proposal_of(contributors=IDS[:3])) and not scene.found


@pytest.mark.parametrize("lineage", [b"a" * LIFE, b"z" * LIFE])
def test_proposal_of_another_lineage_is_not_admitted_and_gives_no_evidence(lineage):
    scene = Scene()
    for contributors in (IDS, IDS[:3]):
        assert not scene.admits(proposal_of(contributors=contributors, lineage=lineage))
    assert not scene.found


@pytest.mark.parametrize("sender", [ANN, DAN])
def test_proposal_that_another_peer_shows_is_only_evidence(sender):
    scene = Scene()
    assert not scene.admits(proposal_of(), sender)
    assert scene.admits(proposal_of(contributors=IDS[:3])) and scene.found == [LEADER]


def test_leader_that_counts_a_distrusted_member_is_refused_in_its_first_ballots_only():
    for term, admitted in ((BALLOTS, False), (BALLOTS + 1, True)):
        scene = Scene()
        for peer in (ANN, LEADER):
            ready = Ready(5, 0, 1, bytes(32), bytes(32), 1, b"", True, 0.0, 0.0, life=LIVES[peer], distrusts=(DAN,))
            scene.announcements.add(peer, ready, sign(peer, ready.statement()))
        assert scene.admits(proposal_of(term)) == admitted
        assert (LEADER in scene.check.refused) != admitted


def test_leader_that_leaves_out_a_member_may_lead_again():
    """Its proposal does not count, but only a false life shows that the leader lies."""
    scene = Scene()
    assert not scene.admits(proposal_of(2, IDS[:3], IDS[:3])) and not scene.check.refused
    forged = lives_in_order(IDS, {**LIVES, DAN: b"z" * LIFE})
    assert not scene.admits(proposal_of(2, lives=forged)) and scene.check.refused == {LEADER}


def test_value_of_a_vote_for_a_proposal_without_proofs_is_not_justified():
    scene = Scene()
    voted = proposal_of(1, IDS[:3], IDS[:3])
    ours = proposal_of(2, adopted=RESULTS, sources=(ANN,), kept=IDS[:3], contributors=IDS[:3], lives=voted.lives)
    for vote, justified in ((proposal_of(1, contributors=IDS[:3]), True), (voted, False)):
        promise = Promise(5, 0, ours.ballot, vote, RESULTS, LINEAGE)
        promises = {peer: (promise, sign(peer, promise)) for peer in IDS[:3]}
        adopting = msgspec.structs.replace(ours, kept=vote.members, lives=vote.lives)
        assert scene.check.justified(justify(adopting, promises, ())) == justified
        assert not scene.check.refused, "an honest leader may know more"


@pytest.mark.parametrize("signer", [ANN, DAN])
def test_new_members_of_an_earlier_proposal_are_checked_only_if_a_signed_promise_names_it(signer):
    """One liar could otherwise name many proposals, each with many keys that it has made."""
    scene = Scene()
    proof = MemberProof(1, bytes(32), DAN, b"", b"")
    false = proposal_of(1, lives=lives_in_order(IDS, {**LIVES, DAN: b"z" * LIFE}), member_proofs=(proof,))
    message = freely(proposal_of(2), (LEADER, ME, DAN), sign)
    promise = Promise(5, 0, message.proposal.ballot, false, RESULTS, LINEAGE)
    report = Report(ANN, 1, RESULTS, sign(signer, promise))
    reports = tuple(sorted((*message.reports, report), key=lambda one: one.peer))
    shown = msgspec.structs.replace(message, reports=reports, earlier=(false,))
    before = scene.verified
    assert scene.check.justified(shown) == (signer != ANN)
    assert scene.verified - before == len(reports) + (signer == ANN)


def test_reports_that_are_not_sorted_by_peer_are_not_justified_and_no_signature_is_checked():
    """A liar could otherwise repeat one report with an invalid signature, as often as a message has room."""
    for order in ((0, 1, 1, 2), (0, 2, 1)):
        scene = Scene()
        message = freely(proposal_of(2), (LEADER, ME, DAN), sign)
        shown = msgspec.structs.replace(message, reports=tuple(message.reports[place] for place in order))
        assert not scene.check.justified(shown) and scene.verified == 0, order


def test_signatures_in_a_genuine_proposal_are_checked_once_until_too_many_others_are_genuine():
    scene = Scene()
    newcomer = Ready(5, 0, 1, bytes(32), bytes(32), 1, b"", True, 0.0, 0.0, life=b"n" * LIFE)
    changed = {**LIVES, DAN: newcomer.life}
    said = newcomer.statement()
    scene.announcements.add(DAN, newcomer, sign(DAN, said))
    proofs = (scene.announcements.member_proof(DAN),)
    many = [
        proposal_of(term, lives=lives_in_order(IDS, changed), member_proofs=proofs)
        for term in range(1, MAX_GENUINE + 2)
    ]
    for proposal in (*many[:-1], *many[:-1]):
        assert scene.check.genuine(proposal)
    assert scene.verified == MAX_GENUINE
    assert scene.check.genuine(many[-1]) and scene.check.genuine(many[0]) and scene.verified == MAX_GENUINE + 2


def test_valid_signatures_in_commits_are_evidence():
    scene, proposal = Scene(), proposal_of()
    for digest, signer in ((RESULTS, ANN), (OTHER_RESULTS, DAN), (OTHER_RESULTS, ANN)):
        assert not scene.found
        proof = Proof(ANN, sign(signer, vote_for(proposal, digest)))
        scene.check.note_commit(Commit(proposal, digest, (proof,)))
    assert scene.found == [ANN]
