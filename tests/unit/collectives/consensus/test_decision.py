"""Decision: votes of the ballot of this peer, and commits that other peers bring."""

from __future__ import annotations

import blake3
import msgspec
import pytest
from kit.rounds.fake_keys import FakeKeys
from kit.rounds.round_harness import leaving
from thinwire.collectives.consensus.certificates import compact
from thinwire.collectives.consensus.decision import Decision
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.proposal import name_of, vote_for
from thinwire.swarm.messages.registry import LIFE, Ask, Ballot, Commit, Contribution, Proof, Proposal, Vote

IDS = tuple(bytes([number]) * 32 for number in range(5))
ANN, BEN, CAT, DAN, EVE = IDS
TERMS = RoundTerms(5, 0, IDS, bytes(32), bytes(32), max_weight=100, patience=2.0)
RESULTS, OTHER = b"r" * 32, b"o" * 32


def sign(peer, message):
    return blake3.blake3(peer + type(message).__name__.encode() + msgspec.msgpack.encode(message)).digest(64)


def proposal_of(term=1, leader=ANN, **changes):
    entries = tuple(Contribution(peer, 1, 10) for peer in IDS)
    usual = Proposal(5, 0, Ballot(term, leader), IDS, IDS, entries, (), None, (), electorate=TERMS.electorate)
    return msgspec.structs.replace(usual, **changes)


def commit_of(*voters, digest=RESULTS, signer=None, **changes):
    proposal = proposal_of(**changes)
    vote = vote_for(proposal, digest)
    return Commit(proposal, digest, tuple(Proof(peer, sign(signer or peer, vote)) for peer in voters))


class Keys(FakeKeys):
    """Keys of one peer. `unknown`: peers whose keys it does not know; `checked`: peers whose signatures it has checked."""

    def __init__(self, me):
        super().__init__(me, verify=self._check)
        self.unknown, self.checked = set(), []

    def key_of(self, peer):
        return None if peer in self.unknown else peer

    def _check(self, peer, message, signature):
        self.checked.append(peer)
        return peer not in self.unknown and signature == sign(peer, message)


class Scene:
    """Decision of one peer. `noted`: commits that it has given for the comparison of signatures."""

    def __init__(self, me=ANN, live=IDS):
        self.keys, self.noted = Keys(me), []
        self.electorate = Electorate(me, TERMS, live, self.keys.verify)
        self.decision = Decision(self.keys, self.electorate, self.noted.append)


# --- votes


@pytest.mark.parametrize("different", [bytes(32), b"\xff" * 32])
def test_votes_of_a_quorum_for_one_digest_commit(different):
    decision, proposal = Scene().decision, proposal_of()
    vote, other = (Vote(5, 0, proposal.ballot, name_of(proposal), digest) for digest in (RESULTS, different))
    decision.open()
    assert decision.on_vote(BEN, vote, b"0" * 64, proposal)
    assert not decision.on_vote(BEN, vote, b"0" * 64, proposal)
    assert decision.on_vote(CAT, other, b"1" * 64, proposal)
    assert decision.on_vote(EVE, vote, b"4" * 64, proposal) and decision.commit is None
    assert set(decision.voters) == {BEN, CAT, EVE}
    assert decision.on_vote(DAN, vote, b"3" * 64, proposal) and decision.commit.digest == RESULTS
    assert [(one.peer, one.signature[:1]) for one in decision.commit.votes] == [(BEN, b"0"), (DAN, b"3"), (EVE, b"4")]


@pytest.mark.parametrize(
    "case", ["lower ballot", "higher ballot", "leader", "not alive", "low name", "high name", "no digest", "lineage"]
)
def test_vote_for_another_proposal_or_of_another_peer_is_ignored(case):
    decision, proposal = Scene().decision, proposal_of(3, alive=IDS[1:])
    ballots = {"lower ballot": Ballot(2, ANN), "higher ballot": Ballot(4, ANN), "leader": Ballot(3, BEN)}
    name = {"low name": bytes(32), "high name": b"\xff" * 32}.get(case, name_of(proposal))
    lineage = b"l" * LIFE if case == "lineage" else proposal.lineage  # Its signature would prove no vote.
    digest = None if case == "no digest" else RESULTS
    vote = Vote(5, 0, ballots.get(case, proposal.ballot), name, digest, lineage)
    assert not decision.on_vote(ANN if case == "not alive" else BEN, vote, b"s" * 64, proposal)
    assert not decision.voters and decision.commit is None


def test_votes_of_an_earlier_ballot_do_not_count_in_the_next_one():
    decision, first, second = Scene().decision, proposal_of(1), proposal_of(2)
    for proposal, voters in ((first, (ANN, BEN)), (second, (CAT, DAN))):
        decision.open()
        for peer in voters:
            decision.on_vote(peer, vote_for(proposal, RESULTS), b"s" * 64, proposal)
        assert set(decision.voters) == set(voters) and decision.commit is None
    decision.on_vote(BEN, vote_for(second, RESULTS), b"s" * 64, second)
    assert decision.commit is not None and [one.peer for one in decision.commit.votes] == [BEN, CAT, DAN]


def test_commit_goes_without_its_proposal_to_peers_that_have_it():
    """The link to CAT broke after the proposal, and DAN has a new one. DAN has voted, so it has the proposal."""
    scene = Scene(live=(ANN, BEN, CAT, EVE))
    decision, proposal = scene.decision, proposal_of()
    decision.open()
    decision.on_link_down(CAT)
    scene.electorate.live.add(DAN)
    scene.electorate.live.discard(EVE)
    assert dict(decision.commit_messages(commit := commit_of(*IDS[:3]))) == {
        BEN: compact(commit),
        CAT: commit,
        DAN: commit,
    }
    decision.on_vote(DAN, vote_for(proposal, RESULTS), b"s" * 64, proposal)
    assert dict(decision.commit_messages(commit))[DAN] == compact(commit)


# --- commits of other peers


def test_commit_with_votes_of_a_quorum_is_taken_once():
    scene, commit = Scene(), commit_of(ANN, BEN, CAT)
    assert scene.decision.on_commit(EVE, commit, 0.0) and scene.decision.commit == commit and scene.noted == [commit]
    assert not scene.decision.on_commit(EVE, commit, 0.0)
    assert not scene.decision.on_commit(DAN, commit_of(BEN, CAT, DAN), 0.0), "other votes for the same value"
    assert scene.decision.commit == commit and scene.noted == [commit]


def test_sender_of_a_false_commit_is_silenced_for_a_patience():
    scene, right = Scene(), commit_of(ANN, BEN, CAT)
    assert not scene.decision.on_commit(EVE, commit_of(ANN, BEN, CAT, signer=EVE), 1.0) and scene.keys.checked
    scene.keys.checked.clear()
    assert not scene.decision.on_commit(EVE, right, 2.9) and not scene.keys.checked, "its signatures take time"
    assert scene.decision.on_commit(DAN, right, 2.9)


def test_silenced_sender_is_heard_again_after_a_patience():
    scene, right = Scene(), commit_of(ANN, BEN, CAT)
    scene.decision.on_commit(EVE, commit_of(ANN, BEN, CAT, signer=EVE), 1.0)
    assert scene.decision.on_commit(EVE, right, 3.0)


@pytest.mark.parametrize("case", ["voter", "departed"])
def test_commit_whose_keys_are_unknown_is_neither_believed_nor_false(case):
    scene = Scene()
    left = (leaving(DAN, sign=lambda message: sign(DAN, message)).farewell,) if case == "departed" else ()
    commit = commit_of(ANN, BEN, CAT, farewells=left)
    scene.keys.unknown = {CAT if case == "voter" else DAN}
    assert not scene.decision.on_commit(EVE, commit, 0.0) and not scene.keys.checked
    scene.keys.unknown = set()
    assert scene.decision.on_commit(EVE, commit, 0.0), "the sender was not silenced"


def test_conflicting_commit_is_noted_as_evidence_and_silences_its_sender():
    scene, ours, theirs = Scene(), commit_of(ANN, BEN, CAT), commit_of(BEN, CAT, DAN, digest=OTHER)
    scene.decision.on_commit(DAN, ours, 0.0)
    for now in (1.0, 2.9, 3.0):
        assert not scene.decision.on_commit(EVE, theirs, now)
    assert scene.decision.commit == ours and scene.noted == [ours, theirs, theirs]


@pytest.mark.parametrize("known", [True, False])
def test_commit_without_its_proposal_is_completed_or_asked_for(known):
    decision, commit = Scene().decision, commit_of(ANN, BEN, CAT)
    found = decision.completed(compact(commit), (None, commit.proposal if known else proposal_of(2)))
    assert found == (commit if known else Ask(5, 0))


def test_compact_commit_after_the_commit_is_asked_for_only_if_it_can_be_evidence():
    decision, commit = Scene().decision, commit_of(ANN, BEN, CAT)
    decision.on_commit(BEN, commit, 0.0)
    assert decision.completed(compact(commit), ()) == commit
    assert decision.completed(compact(commit_of(*IDS[:3], contributors=commit.proposal.contributors[:4])), ()) == Ask(
        5, 0
    )
    for term in (0, 2):
        assert decision.completed(compact(commit_of(*IDS[:3], term=term)), ()) is None, "another ballot"


# --- results


@pytest.mark.parametrize(("voters", "confirmed"), [((ANN,), False), ((ANN, CAT), True)])
def test_results_with_votes_of_two_members_are_confirmed_and_others_are_doubted_when_they_commit(voters, confirmed):
    decision = Scene().decision
    commit = commit_of(ANN, BEN, CAT, term=2, adopted=RESULTS, sources=voters, kept=IDS)
    assert decision.results_confirmed(commit.proposal) == confirmed and not decision.doubted
    assert decision.on_commit(ANN, commit, 0.0)
    assert decision.results_confirmed(commit.proposal) and decision.doubted != confirmed


def test_committed_results_that_were_not_adopted_are_confirmed():
    decision, commit = Scene().decision, commit_of(ANN, BEN, CAT)
    assert not decision.results_confirmed(commit.proposal)
    decision.on_commit(ANN, commit, 0.0)
    assert decision.results_confirmed(commit.proposal) and not decision.doubted
