"""Certificates: commits of other peers, believed when their votes are a quorum."""

from dataclasses import replace

import msgspec
import pytest
from kit.rounds.round_harness import START, leaving
from thinwire.collectives.consensus.certificates import certificate, certified, compact, conflicting, with_proposal
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.members.lives import electorate_digest
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.proposal import name_of
from thinwire.swarm.messages.registry import LIFE, Ballot, Commit, Contribution, Exclusion, Proof, Proposal, Vote

IDS = tuple(bytes([number]) * 32 for number in range(5))
ANN, BEN, CAT, DAN, EVE = IDS
TERMS = RoundTerms(5, 0, IDS, bytes(32), bytes(32), max_weight=100)
GOOD, BAD = b"g" * 64, b"b" * 64
RESULTS = b"r" * 32


def proposal_of(**changes):
    entries = tuple(Contribution(peer, 1, 10) for peer in IDS)
    usual = Proposal(5, 0, Ballot(1, ANN), IDS, IDS, entries, (), None, (), electorate=TERMS.electorate)
    return msgspec.structs.replace(usual, **changes)


def commit(*voters, digest=RESULTS, signature=GOOD, **changes):
    return Commit(proposal_of(**changes), digest, tuple(Proof(peer, signature) for peer in voters))


class Scene:
    """Electorate of peer ANN. `verified`: votes whose signatures were checked."""

    def __init__(self, live=IDS, terms=TERMS):
        self.verified = []
        self.electorate = Electorate(ANN, terms, live, self._verify)

    def _verify(self, peer, message, signature):
        self.verified.append((peer, message))
        return signature == GOOD

    def certified(self, message):
        return certified(message, self.electorate, self._verify)


def test_commit_with_votes_of_a_quorum_is_believed():
    scene = Scene()
    assert scene.certified(commit(ANN, BEN, CAT))
    vote = Vote(5, 0, Ballot(1, ANN), name_of(proposal_of()), RESULTS)
    assert sorted(scene.verified) == [(peer, vote) for peer in (ANN, BEN, CAT)]


@pytest.mark.parametrize(
    "message",
    [
        commit(ANN, BEN),
        commit(ANN, BEN, CAT, signature=BAD),
        commit(ANN, CAT, BEN),
        commit(ANN, ANN, BEN, CAT),
        commit(ANN, BEN, CAT, alive=(ANN, BEN)),
        commit(ANN, BEN, CAT, alive=(ANN, BEN, BEN)),
        commit(ANN, BEN, CAT, round=6),
        commit(ANN, BEN, CAT, contributors=()),
    ],
)
def test_commit_with_few_unsorted_repeated_or_invalid_votes_is_not_believed(message):
    assert not Scene().certified(message)


def test_vote_of_a_member_that_takes_no_part_in_the_round_does_not_count():
    alive = (ANN, BEN, DAN)
    entries = tuple(Contribution(peer, 1, 10) for peer in alive)
    out = tuple(Exclusion(peer, "late") for peer in (CAT, EVE))
    known = {"group": alive, "alive": alive, "contributors": entries, "excluded": out}
    assert Scene().certified(commit(ANN, BEN, DAN, **known))
    assert not Scene().certified(commit(ANN, BEN, CAT, **known))


def test_commit_with_enough_valid_votes_beside_an_invalid_one_is_believed():
    message = commit(ANN, BEN, CAT, DAN)
    votes = tuple(Proof(proof.peer, BAD if proof.peer == BEN else GOOD) for proof in message.votes)
    assert Scene().certified(msgspec.structs.replace(message, votes=votes))
    assert not Scene().certified(msgspec.structs.replace(message, votes=votes[:3]))


@pytest.mark.parametrize("live", [IDS, (ANN, BEN), ()])
def test_commit_is_believed_whoever_is_reachable(live):
    assert Scene(live=live).certified(commit(ANN, BEN, CAT))
    assert not Scene(live=live).certified(commit(ANN, BEN))


def test_excluded_peers_do_not_make_a_quorum_smaller():
    excluded = tuple(Exclusion(peer, reason) for peer, reason in ((CAT, "gone"), (DAN, "left"), (EVE, "silent")))
    assert not Scene(live=(ANN, BEN)).certified(commit(ANN, BEN, excluded=excluded, alive=(ANN, BEN)))


def farewells(*peers, promised=START, signature=GOOD):
    return tuple(leaving(peer, promised, sign=lambda message: signature).farewell for peer in peers)


def test_commit_with_proved_farewells_needs_a_quorum_of_those_left():
    assert Scene().certified(commit(ANN, BEN, farewells=farewells(DAN, EVE)))
    assert not Scene().certified(commit(BEN, farewells=farewells(DAN, EVE)))
    assert not Scene().certified(commit(BEN, DAN, farewells=farewells(DAN, EVE))), "a departed member counts no more"


@pytest.mark.parametrize(
    "carried",
    [
        farewells(DAN, EVE, signature=BAD),
        farewells(EVE, DAN),
        farewells(DAN, EVE, promised=Ballot(1, BEN)),
        farewells(DAN, bytes([9]) * 32),
    ],
    ids=["signature", "unsorted", "promise above the ballot", "stranger"],
)
def test_commit_with_unproved_farewells_is_not_believed(carried):
    assert not Scene().certified(commit(ANN, BEN, farewells=carried))
    assert not Scene().certified(commit(ANN, BEN, CAT, DAN, farewells=carried)), "even with votes of a quorum"


def test_commit_without_its_proposal_is_completed_with_that_of_its_ballot_and_digest_only():
    whole = commit(ANN, BEN, CAT)
    others = [proposal_of(ballot=Ballot(term, ANN)) for term in (0, 2)] + [
        proposal_of(contributors=whole.proposal.contributors[:n]) for n in range(1, 5)
    ]
    assert with_proposal(compact(whole), [None, *others, whole.proposal]) == whole
    assert with_proposal(compact(whole), [None, *others]) is None
    for term in (0, 2):
        other = msgspec.structs.replace(compact(whole), ballot=Ballot(term, ANN))
        assert with_proposal(other, [whole.proposal]) is None, "the proposal is of another ballot"


def test_commits_of_one_ballot_with_different_values_conflict():
    ours = commit(ANN, BEN, CAT)
    assert not conflicting(ours, commit(BEN, CAT, DAN)), "other votes for the same value"
    assert conflicting(ours, commit(ANN, BEN, CAT, digest=b"x" * 32))
    assert conflicting(ours, commit(ANN, BEN, CAT, contributors=ours.proposal.contributors[:4]))
    for other in ({"lineage": b"l" * 16}, {"ballot": Ballot(2, ANN)}, {"ballot": Ballot(0, ANN)}):
        assert not conflicting(ours, commit(ANN, BEN, CAT, digest=b"x" * 32, **other))


def test_commit_of_another_lineage_is_not_believed():
    assert not Scene().certified(commit(ANN, BEN, CAT, lineage=b"l" * 16))


@pytest.mark.parametrize(
    "electorate",
    [
        b"",
        electorate_digest(IDS[::-1], bytes(5 * LIFE)),
        electorate_digest(IDS[:3], bytes(3 * LIFE)),
        electorate_digest(IDS, b"x" * LIFE + bytes(4 * LIFE)),
    ],
    ids=["none", "other seniority", "fewer members", "known life"],
)
def test_commit_of_another_electorate_is_not_believed(electorate):
    assert not Scene().certified(commit(*IDS, electorate=electorate))
    assert Scene().certified(commit(*IDS))


def test_commit_names_the_electorate_by_seniority_with_lives():
    """A receiver with the same members believes it only if it knows them in the same order and lives."""
    seniors, lives = IDS[::-1], {BEN: b"b" * LIFE}
    known = replace(TERMS, seniors=seniors, lives=lives)
    electorate = electorate_digest(seniors, bytes(3 * LIFE) + b"b" * LIFE + bytes(LIFE))
    message = commit(*IDS, electorate=electorate)
    assert Scene(terms=known).certified(message)
    for other in (TERMS, replace(known, lives={}), replace(known, seniors=())):
        assert not Scene(terms=other).certified(message)


def key_of(peer):
    return peer[::-1]


def test_certificate_has_only_the_valid_votes_and_their_keys():
    """A later certificate may rest on these votes alone. An invalid one among them would make the chain unprovable."""
    message = commit(ANN, BEN, CAT, DAN)
    votes = tuple(Proof(proof.peer, BAD if proof.peer == DAN else GOOD) for proof in message.votes)
    proof = certificate(
        msgspec.structs.replace(message, votes=votes), TERMS, key_of, lambda peer, message, signature: signature == GOOD
    )
    assert proof.commit.votes == votes[:3] and proof.keys == tuple(map(key_of, (ANN, BEN, CAT)))
    assert proof.members == IDS


def test_commit_without_a_quorum_of_valid_votes_has_no_certificate():
    message = commit(ANN, BEN, CAT, signature=BAD)
    assert certificate(message, TERMS, key_of, lambda peer, vote, signature: signature == GOOD) is None
