"""Members that lie: the exhaustive model, justifications, and statements that contradict each other."""

import dataclasses

import msgspec
import pytest
from kit.reference.liar_model import ABSENT, MISTAKES, LiarModel
from kit.reference.small_model import explore
from kit.rounds.round_harness import freely, leaving
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.justification import justified, justify, presentable, reported
from thinwire.collectives.consensus.members.quorum import TWO_THIRDS, tolerated
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.proposal import statement, vote_for
from thinwire.swarm.evidence import EACH, Equivocation
from thinwire.swarm.messages.registry import MAX_PROPOSALS, Ballot, Contribution, Promise, Proposal

# --- every state of a round with one liar


@pytest.mark.trial
@pytest.mark.parametrize("ballots", [(1, 2, 3), (1, 1, 2), (1, 2, 2)])
def test_round_of_four_with_one_liar_decides_at_most_one_value(ballots):
    outcome = explore(LiarModel(4, ballots, TWO_THIRDS))
    assert outcome.trace == ()
    assert outcome.states > 20_000 and {entry for entry, _, _ in outcome.reached} == {0, 1, 2}


def decides_false_results(outcome):
    return any(
        proposal is not None and proposal.value == ABSENT and done >> entry & 1
        for proposals, done in outcome.endings
        for entry, proposal in enumerate(proposals)
    )


@pytest.mark.parametrize("refutable", [False, True])
def test_round_decides_false_results_only_if_they_are_possible_and_claimed(refutable):
    """The liar reports its own vote for them, and leads a ballot. It leaves out a promise, so they may be decided already."""
    outcome = explore(LiarModel(4, (1, 2), TWO_THIRDS, refutable=refutable))
    assert outcome.trace == () and outcome.states > 1_000
    assert decides_false_results(outcome) != refutable


@pytest.mark.trial
def test_round_of_three_ballots_decides_no_refutable_results():
    outcome = explore(LiarModel(4, (1, 2, 3), TWO_THIRDS, refutable=True))
    assert outcome.trace == () and outcome.states > 20_000
    assert not decides_false_results(outcome)


@pytest.mark.parametrize("acceptors", [3, 4])
def test_round_with_plain_majorities_and_one_liar_decides_two_values(acceptors):
    assert explore(LiarModel(acceptors, (1, 2, 3), 0.5)).trace


@pytest.mark.parametrize("mistake", MISTAKES)
def test_round_with_one_liar_and_a_planted_mistake_decides_two_values(mistake):
    assert explore(LiarModel(4, (1, 2, 3), TWO_THIRDS, mistake)).trace


# --- justifications

IDS = [bytes([n]) * 32 for n in range(4)]
ANN, BEN, CID, LIAR = IDS
LINEAGE, LIVES = b"l" * 16, b"v" * 16 * 4
KNOWN = {peer: b"v" * 16 for peer in IDS}
TERMS = RoundTerms(5, 0, tuple(IDS), bytes(32), bytes(32), fraction=TWO_THIRDS, lineage=LINEAGE, lives=KNOWN)
A, B = b"a" * 32, b"b" * 32
FIRST, SECOND, THIRD = Ballot(1, ANN), Ballot(2, LIAR), Ballot(3, BEN)


def sign(peer, message):
    return (peer + msgspec.msgpack.encode(message))[-64:]


def verify(peer, message, signature):
    return signature == sign(peer, message)


def proposal_of(ballot=FIRST, contributors=IDS, **changes):
    entries = tuple(Contribution(peer, 1, 1, A) for peer in contributors)
    ids = tuple(IDS)
    usual = Proposal(
        5, 0, ballot, ids, ids, entries, (), None, (), lineage=LINEAGE, electorate=TERMS.electorate, lives=LIVES
    )
    return msgspec.structs.replace(usual, **changes)


def adopted(ballot=SECOND, digest=A, sources=(ANN,)):
    return proposal_of(ballot, adopted=digest, sources=sources, kept=tuple(IDS))


def promised(ballot, votes, lineage=LINEAGE):
    """Return signed promises. votes: by peer, (proposal, digest) or None."""
    made = {}
    for peer, vote in votes.items():
        promise = Promise(5, 0, ballot, *(vote or (None, None)), lineage)
        made[peer] = promise, sign(peer, promise)
    return made


def holds(message, terms=TERMS):
    electorate = Electorate(CID, terms, IDS, verify)
    reports = reported(message, electorate, verify)
    return reports is not None and justified(message.proposal, *reports, electorate)


def test_value_with_a_vote_binds_and_another_value_is_not_justified():
    votes = promised(SECOND, {ANN: (proposal_of(), A), BEN: None, LIAR: None})
    assert holds(justify(adopted(), votes, ()))
    assert not holds(justify(proposal_of(SECOND), votes, ()))
    assert not holds(justify(adopted(digest=B), votes, ()))
    assert not holds(
        justify(msgspec.structs.replace(adopted(), contributors=proposal_of().contributors[1:]), votes, ())
    )


def test_free_choice_is_justified_by_promises_of_a_quorum_without_votes():
    assert holds(freely(proposal_of(SECOND), IDS[:3], sign))
    assert not holds(freely(proposal_of(SECOND), IDS[:2], sign)), "too few"
    assert not holds(freely(proposal_of(SECOND), IDS[:3])), "forged"
    twice = freely(proposal_of(SECOND), IDS[:3], sign)
    assert not holds(msgspec.structs.replace(twice, reports=(*twice.reports[:2], twice.reports[1])))


def test_free_choice_adopts_no_result_without_a_vote_for_another_one():
    """Otherwise a leader that lies could have any results adopted, with its own vote alone."""
    votes = promised(SECOND, {ANN: (proposal_of(), A), BEN: None, CID: None, LIAR: None})
    assert holds(justify(proposal_of(SECOND), votes, ())), "one vote of four does not bind"
    assert not holds(justify(adopted(), votes, ()))
    assert not holds(justify(adopted(), promised(SECOND, dict.fromkeys(IDS)), ()))


@pytest.mark.parametrize("contributors", [IDS, IDS[:3]])
def test_free_choice_adopts_contested_results(contributors):
    """Two of four have voted for different results of the same contributors, so an owner has lied. Members do not lie here."""
    terms = dataclasses.replace(TERMS, fraction=0.5)
    votes = promised(
        SECOND, {ANN: (proposal_of(), A), BEN: (proposal_of(contributors=contributors), B), CID: None, LIAR: None}
    )
    assert holds(justify(proposal_of(SECOND), votes, ()), terms)
    assert holds(justify(adopted(), votes, ()), terms) == (contributors == IDS)
    assert not holds(justify(adopted(digest=bytes(32)), votes, ()), terms)


def test_ballot_names_only_voters_as_holders_of_adopted_results():
    """A peer does not check results that have more voters than may lie."""
    votes = promised(SECOND, {ANN: (proposal_of(), A), BEN: (proposal_of(), A), LIAR: None})
    assert holds(justify(adopted(sources=(ANN, BEN)), votes, ())) and holds(justify(adopted(), votes, ()))
    assert not holds(justify(adopted(sources=(ANN, BEN, LIAR)), votes, ()))
    assert not holds(justify(adopted(sources=(LIAR,)), votes, ()))


def test_dropped_vote_still_binds_because_its_voter_counts_as_silent():
    votes = promised(SECOND, {ANN: (proposal_of(), A), BEN: (proposal_of(), A), CID: None, LIAR: None})
    assert holds(justify(adopted(), votes, ()))
    del votes[ANN]
    assert not holds(justify(proposal_of(SECOND), votes, ()))
    del votes[BEN]
    assert not holds(justify(proposal_of(SECOND), votes, ())), "two are no quorum"


def test_ballot_is_justified_although_more_liars_report_a_proposal_each_than_it_can_show():
    ids = tuple(bytes([n]) * 32 for n in range(52))
    known = {peer: b"v" * 16 for peer in ids}
    terms = RoundTerms(5, 0, ids, bytes(32), bytes(32), fraction=TWO_THIRDS, lineage=LINEAGE, lives=known)
    shape = dict(group=ids, alive=ids, electorate=terms.electorate, lives=b"v" * 16 * len(ids))
    lies = {ids[n]: (proposal_of(Ballot(1, ids[0]), ids[n:], **shape), A) for n in range(1, MAX_PROPOSALS + 2)}
    votes = promised(SECOND, dict.fromkeys(ids) | lies)
    free = proposal_of(SECOND, ids, **shape)
    assert len(lies) <= tolerated(len(ids), TWO_THIRDS) and justify(free, votes, ()) is None
    shown = presentable(votes, ())
    assert len(shown) == len(ids) - 1 and holds(justify(free, shown, ()), terms)
    honest = {peer: (proposal_of(Ballot(1, ids[0]), ids, **shape), B) for peer in ids[MAX_PROPOSALS + 2 :]}
    shown = presentable(promised(SECOND, lies | honest), ())
    assert shown.keys() >= honest.keys() and len(shown) == len(honest) + MAX_PROPOSALS - 1


def test_justification_with_a_peer_twice_or_with_a_stranger_is_refused():
    message, stranger = freely(proposal_of(SECOND), IDS[:3], sign), bytes([9]) * 32
    said = freely(proposal_of(SECOND), [*IDS[:3], stranger], sign)
    assert holds(message) and len(said.reports) == 4
    assert not holds(said)
    assert not holds(msgspec.structs.replace(message, reports=(*message.reports, message.reports[0])))


def test_vote_of_the_same_ballot_justifies_nothing():
    votes = promised(SECOND, {ANN: (proposal_of(SECOND), A), BEN: (proposal_of(SECOND), A), LIAR: None})
    assert not holds(justify(adopted(), votes, ()))


def test_value_of_the_highest_ballot_binds_if_no_member_may_lie():
    """Both may have been chosen: one with the votes of ANN and LIAR, the other with those of all others."""
    terms, second = dataclasses.replace(TERMS, fraction=0.5), proposal_of(SECOND, IDS[:3])
    votes = promised(THIRD, {ANN: (proposal_of(), A), BEN: (second, B), CID: (second, B)})
    value = msgspec.structs.replace(adopted(THIRD, B, (BEN, CID)), contributors=second.contributors)
    assert holds(justify(value, votes, ()), terms)
    assert not holds(justify(adopted(THIRD, A), votes, ()), terms)


def test_vote_cannot_be_removed_from_a_promise():
    message = justify(proposal_of(SECOND), promised(SECOND, {ANN: (proposal_of(), A), BEN: None, LIAR: None}), ())
    bare = tuple(msgspec.structs.replace(report, voted=0, digest=None) for report in message.reports)
    assert not holds(msgspec.structs.replace(message, reports=bare))


@pytest.mark.parametrize(("ballot", "lineage"), [(THIRD, LINEAGE), (SECOND, b"m" * 16), (SECOND, b"")])
def test_promise_of_another_ballot_or_lineage_does_not_count(ballot, lineage):
    votes = promised(ballot, dict.fromkeys(IDS[:3]), lineage)
    assert not holds(justify(proposal_of(SECOND), votes, ()))
    assert holds(justify(proposal_of(ballot), promised(ballot, dict.fromkeys(IDS[:3])), ()))


def test_two_possible_values_stop_the_round_until_more_members_answer():
    """The second vote may be a lie, and so may the silence about the first one."""
    other = proposal_of(SECOND, IDS[:3])
    votes = promised(THIRD, {ANN: (proposal_of(), A), BEN: None, LIAR: (other, B)})
    assert not holds(justify(adopted(THIRD), votes, ()))
    assert not holds(justify(adopted(THIRD, B), votes, ()))
    votes |= promised(THIRD, {CID: None})
    assert holds(justify(proposal_of(THIRD), votes, ())), "now neither can have been chosen"


def test_vote_in_a_farewell_binds():
    left = leaving(ANN, FIRST, proposal_of(), A, lineage=LINEAGE)
    carried = msgspec.structs.replace(adopted(), farewells=(left.farewell,))
    votes = promised(SECOND, {BEN: None, CID: None, LIAR: None})
    free = msgspec.structs.replace(proposal_of(SECOND), farewells=(left.farewell,))
    assert not holds(justify(free, votes, ())), "the farewell names a proposal that is absent"
    assert holds(justify(free, votes, (left,))), "one vote of four, and nobody is silent"
    votes = promised(SECOND, {BEN: (proposal_of(), A), CID: None, LIAR: None})
    assert holds(justify(carried, votes, (left,))) and not holds(justify(free, votes, (left,)))


# --- statements that contradict each other


def notes():
    found = []
    return Equivocation(lambda peer, first, second: found.append((peer, first, second))), found


def test_two_votes_and_two_proposals_of_one_ballot_are_accused_once():
    book, found = notes()
    vote, other = vote_for(proposal_of(), A), vote_for(proposal_of(), B)
    for said in (vote, vote, other, other, vote):
        book.note(BEN, said, b"s")
    assert found == [(BEN, (vote, b"s"), (other, b"s"))]
    for said in (statement(proposal_of()), statement(proposal_of(contributors=IDS[:3]))):
        book.note(ANN, said, b"t")
    assert [peer for peer, _, _ in found] == [BEN, ANN]


@pytest.mark.parametrize(
    "other",
    [
        vote_for(proposal_of(SECOND), A),
        vote_for(proposal_of(round=6), B),
        vote_for(proposal_of(fragment=1), B),
        vote_for(proposal_of(lineage=b"m" * 16), B),
        statement(proposal_of()),
        vote_for(proposal_of(seal=b"s" * 64), A),
    ],
)
def test_statements_of_different_slots_or_kinds_and_equal_ones_are_no_evidence(other):
    book, found = notes()
    book.note(BEN, vote_for(proposal_of(), A), b"s")
    book.note(BEN, other, b"s")
    assert not found


def test_rounds_without_a_lineage_give_no_evidence():
    book, found = notes()
    for digest in (A, B):
        book.note(BEN, vote_for(proposal_of(lineage=b""), digest), b"s")
    assert not found


def test_number_of_stored_statements_is_bounded():
    """A statement is compared with the latest ones of its peer; an older one is forgotten."""
    for others, accused in ((EACH - 1, True), (EACH, False)):
        book, found = notes()
        for term in range(2, 3 + others):
            book.note(BEN, vote_for(proposal_of(Ballot(term, ANN)), A), b"s")
        book.note(BEN, vote_for(proposal_of(Ballot(2, ANN)), B), b"s")
        assert bool(found) == accused
