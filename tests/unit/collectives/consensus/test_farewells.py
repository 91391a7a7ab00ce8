"""Farewells: signed last statements of members, with which a ballot is counted without them."""

from __future__ import annotations

import blake3
import msgspec
import pytest
from kit.rounds.fake_keys import FakeKeys
from kit.rounds.round_harness import START, leaving
from thinwire.collectives.consensus.farewells import Farewells, departed
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.members.vote_store import MemoryVoteStore
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.consensus.proposal import vote_for
from thinwire.swarm.messages.registry import (
    MAX_FAREWELLS,
    Ballot,
    Commit,
    Contribution,
    Leave,
    Prepare,
    Promise,
    Proof,
    Proposal,
    Propose,
    Ready,
    Vote,
)

IDS = tuple(bytes([number]) * 32 for number in range(5))
ANN, BEN, CAT, DAN, EVE = IDS
STRANGER = bytes([9]) * 32
RESULTS = b"r" * 32
TERMS = RoundTerms(5, 0, IDS, bytes(32), bytes(32), max_weight=100, patience=2.0)


def sign(peer, message):
    return blake3.blake3(peer + type(message).__name__.encode() + msgspec.msgpack.encode(message)).digest(64)


def verify(peer, message, signature):
    return signature == sign(peer, message)


def said(peer, *args, signer=None, **changes):
    return leaving(peer, *args, sign=lambda message: sign(signer or peer, message), **changes)


def farewells(terms=TERMS):
    return Farewells(terms, verify)


def proposal_of(term=1, leader=ANN, **changes):
    entries = tuple(Contribution(peer, 1, 10) for peer in IDS)
    usual = Proposal(5, 0, Ballot(term, leader), IDS, IDS, entries, (), None, (), electorate=TERMS.electorate)
    return msgspec.structs.replace(usual, **changes)


def test_farewell_of_a_member_is_added_once():
    book, leave = farewells(), said(BEN, Ballot(1, ANN), proposal_of(), RESULTS)
    assert book.add(leave) and not book.add(leave)
    assert list(book) == [BEN] and BEN in book and ANN not in book and book.messages() == [leave]


def test_farewell_with_a_vote_above_its_promise_is_refused():
    """Honest leaders would carry it, and no acceptor would follow them."""
    assert not farewells().add(said(BEN, Ballot(1, ANN), proposal_of(9), RESULTS))
    assert farewells().add(said(BEN, Ballot(9, ANN), proposal_of(9), RESULTS))
    assert farewells().add(said(BEN, Ballot(9, ANN), proposal_of(8), RESULTS))


def test_second_farewell_of_a_member_does_not_replace_the_first():
    book, first = farewells(), said(BEN)
    book.add(first)
    assert not book.add(said(BEN, Ballot(3, CAT))) and book.messages() == [first]


@pytest.mark.parametrize(
    "leave",
    [
        said(BEN, signer=CAT),
        said(STRANGER),
        said(BEN, round=6),
        said(BEN, round=4),
        said(BEN, fragment=1),
        said(BEN, lineage=b"l" * 16),
        said(BEN, Ballot(1, ANN), proposal_of(), None),
        said(BEN, Ballot(1, ANN), None, RESULTS),
        said(BEN, Ballot(1, ANN), proposal_of(contributors=()), RESULTS),
        said(BEN, Ballot(1, ANN), proposal_of(lineage=b"l" * 16), RESULTS),
        *(
            msgspec.structs.replace(said(BEN, Ballot(9, ANN), proposal_of(), RESULTS), voted=proposal_of(term))
            for term in range(2, 6)
        ),
        msgspec.structs.replace(said(BEN, Ballot(1, ANN), proposal_of(), RESULTS), voted=None),
        msgspec.structs.replace(said(BEN, Ballot(1, ANN), proposal_of()), voted=None),
        msgspec.structs.replace(said(BEN), voted=proposal_of()),
    ],
    ids=[
        *("signature", "stranger", "later round", "earlier round", "fragment", "lineage", "digest", "vote"),
        *("unsound vote", "vote of a lineage", "vote 2", "vote 3", "vote 4", "vote 5"),
        *("hidden vote", "hidden vote without results", "added vote"),
    ],
)
def test_farewell_that_cannot_be_right_is_refused(leave):
    book = farewells()
    assert not book.add(leave) and not list(book)


@pytest.mark.parametrize("changes", [{"promised": START}, {"digest": b"x" * 32}, {"voted": b"x" * 32}])
def test_farewell_with_a_changed_statement_is_refused(changes):
    leave = said(BEN, Ballot(1, ANN), proposal_of(), RESULTS)
    changed = msgspec.structs.replace(leave, farewell=msgspec.structs.replace(leave.farewell, **changes))
    assert not farewells().add(changed)


def test_vote_in_a_farewell_is_checked_once_for_each_member_and_sender_in_a_ballot():
    """A liar could sign any number of farewells, each with another vote. The answer may differ in the next ballot."""
    book, checked = farewells(), []

    def genuine(voted):
        checked.append(voted.ballot.term)
        return len(checked) == 4

    taken = [
        book.add(said(BEN, Ballot(9, ANN), proposal_of(term), RESULTS), sender, genuine)
        for term, sender in ((1, CAT), (2, CAT), (3, STRANGER), (4, DAN), (5, BEN))
    ]
    book.on_ballot()
    assert checked == [1, 4, 5] and not any(taken)
    assert book.add(said(BEN, Ballot(9, ANN), proposal_of(6), RESULTS), CAT, genuine) and checked == [1, 4, 5, 6]


def test_farewells_are_bounded():
    many = tuple(number.to_bytes(32) for number in range(MAX_FAREWELLS + 1))
    book = farewells(RoundTerms(5, 0, many, bytes(32), bytes(32)))
    assert [book.add(said(peer)) for peer in many] == [True] * MAX_FAREWELLS + [False]


def test_ballot_carries_farewells_whose_promise_is_not_above_it():
    book = farewells()
    for peer, promised in ((DAN, Ballot(2, CAT)), (BEN, START), (CAT, Ballot(3, ANN)), (EVE, Ballot(2, DAN))):
        book.add(said(peer, promised))
    assert list(book.below(Ballot(1, ANN))) == [BEN]
    assert list(book.below(Ballot(2, CAT))) == [BEN, DAN]
    assert list(book.below(Ballot(3, ANN))) == [BEN, CAT, DAN, EVE]


def carrying(*leaves, term=3):
    return proposal_of(term, farewells=tuple(leave.farewell for leave in leaves))


@pytest.mark.parametrize("known", [True, False])
def test_proposal_with_proved_farewells_is_valid(known):
    book, leaves = farewells(), [said(BEN, Ballot(1, ANN), proposal_of(), RESULTS), said(CAT, Ballot(3, ANN))]
    for leave in leaves if known else []:
        book.add(leave)
    assert book.valid(carrying(*leaves)) and list(departed(carrying(*leaves))) == [BEN, CAT]
    assert book.valid(proposal_of())


@pytest.mark.parametrize(
    "leaves",
    [
        [said(BEN, signer=CAT)],
        [said(STRANGER)],
        [said(CAT), said(BEN)],
        [said(BEN), said(BEN)],
        [said(BEN, Ballot(3, BEN))],
        [said(BEN, Ballot(4, ANN))],
        [said(BEN, round=4)],
        [said(BEN, lineage=b"l" * 16)],
        [said(BEN), said(CAT, signer=BEN)],
        [said(BEN), said(BEN), said(CAT)],
    ],
    ids=[
        "signature",
        "stranger",
        "unsorted",
        "twice",
        "promise",
        "later promise",
        "round",
        "lineage",
        "second",
        "twice and another",
    ],
)
def test_proposal_with_an_unproved_farewell_is_not_valid(leaves):
    assert not farewells().valid(carrying(*leaves))


def test_forged_farewell_of_a_member_that_has_left_is_not_valid():
    book, leave = farewells(), said(BEN)
    assert book.add(leave) and book.valid(carrying(leave))
    assert not book.valid(carrying(said(BEN, Ballot(1, ANN), signer=CAT)))
    assert book.valid(carrying(said(BEN, Ballot(1, ANN)))), "its other one is signed"


# --- in an agreement


def ready():
    return Ready(5, 0, 1, bytes(32), bytes(32), 10, b"", True, 0.0, 0.0)


def agreement(me, live=IDS, store=None):
    one = Agreement(FakeKeys(me, sign, verify), TERMS, live=live, store=store)
    for peer in live:
        if peer != me:
            one.on_message(peer, ready(), b"", 0.0)
    one.announce(ready(), 0.0)
    one.take()
    return one


def on_message(one, sender, message, now=0.0):
    one.on_message(sender, message, sign(sender, message), now)


def sent(one, *kinds):
    return [message for _, message in one.take() if isinstance(message, kinds)]


def prepared(one, until=60.0):
    """Let time pass until this peer begins a ballot; return its Prepare and the time."""
    for at in range(1, int(2 * until)):
        one.tick(at / 2)
        if found := sent(one, Prepare):
            return found[0], at / 2
    raise AssertionError("no ballot")


def test_farewell_is_passed_on_once():
    one, leave = agreement(BEN), said(DAN)
    on_message(one, DAN, leave)
    assert one.take() == [(peer, leave) for peer in sorted(IDS) if peer not in (BEN, DAN)]
    on_message(one, CAT, leave)
    assert not sent(one, Leave)
    one.reach(STRANGER)
    assert (STRANGER, leave) in one.take(), "new links get it, too"


def test_candidate_sends_the_farewells_with_its_question():
    """A voter without them could take the promises of its ballot for too few."""
    one, leave = agreement(BEN), said(ANN)
    on_message(one, ANN, leave)
    first, second = [message for to, message in one.take() if to is None]
    assert first == leave and isinstance(second, Prepare)


def test_leader_begins_a_ballot_without_a_participant_that_has_left_although_its_link_is_up():
    one = agreement(ANN)
    assert DAN in one.proposal.alive
    on_message(one, DAN, said(DAN), 0.1)
    assert sent(one, Prepare)


def test_refused_farewell_is_not_passed_on():
    one = agreement(BEN)
    on_message(one, CAT, said(DAN, signer=CAT))
    assert not sent(one, Leave)


def test_departed_member_sends_its_vote_and_no_other_one():
    one = agreement(BEN, store=MemoryVoteStore())
    on_message(one, ANN, Propose(proposal_of()))
    one.complete(RESULTS, 0.1)
    assert sent(one, Vote)
    one.leave()
    (leave,) = sent(one, Leave)
    assert leave.voted == proposal_of() and leave.farewell.digest == RESULTS and farewells().add(leave)
    on_message(one, CAT, Prepare(5, 0, Ballot(2, CAT)), 0.2)
    on_message(one, CAT, Propose(proposal_of(2, CAT)), 0.3)
    one.complete(RESULTS, 0.4)
    one.tick(100.0)
    one.leave()
    assert not sent(one, Promise, Vote, Leave, Prepare, Propose) and not one.voter


def test_peer_that_returns_says_its_farewell_again_and_takes_part_without_a_vote():
    store = MemoryVoteStore()
    one = agreement(BEN, store=store)
    one.leave()
    (leave,) = sent(one, Leave)
    again = Agreement(FakeKeys(BEN, sign, verify), TERMS, live=IDS, store=store)
    assert sent(again, Leave) == [leave] and not again.voter
    again.reach(STRANGER)
    assert (STRANGER, leave) in again.take()


def test_peer_without_others_says_no_farewell_and_keeps_its_vote():
    one = agreement(BEN, live=(BEN,))
    one.leave()
    assert not sent(one, Leave) and one.voter


def test_newcomer_says_no_farewell():
    one = agreement(STRANGER, live=(*IDS, STRANGER))
    one.leave()
    assert not sent(one, Leave)


def test_proposal_with_an_unproved_farewell_is_not_followed():
    for signer in (ANN, DAN):
        one, proposal = agreement(BEN), proposal_of(farewells=(said(DAN, signer=signer).farewell,))
        on_message(one, ANN, Propose(proposal))
        assert one.proposal == (proposal if signer == DAN else None)


def test_quorum_of_those_left_commits_after_farewells():
    """Two of five leave, and one is silent: two of the three that are left commit."""
    one = agreement(ANN, live=(ANN, BEN, DAN, EVE))
    for peer in (DAN, EVE):
        on_message(one, peer, said(peer))
        one.on_link_down(peer, 0.0)
    prepare, now = prepared(one)
    on_message(one, BEN, Promise(5, 0, prepare.ballot, None, None), now)
    one.tick(now + 3.0)
    assert [farewell.peer for farewell in one.proposal.farewells] == [DAN, EVE] and one.proposal.alive == (ANN, BEN)
    assert {entry.peer: entry.reason for entry in one.proposal.excluded} == {DAN: "left", EVE: "left"}
    proposal = one.proposal
    one.complete(RESULTS, now + 3.0)
    on_message(one, BEN, vote_of(proposal), now + 3.0)
    assert one.commit is not None and one.commit.proposal == proposal
    other = agreement(CAT)
    on_message(other, ANN, one.commit)
    assert other.commit == one.commit, "a peer without the farewells learns them from the commit"


def vote_of(proposal):
    return vote_for(proposal, RESULTS)


def test_refused_connections_do_not_change_the_quorum():
    """The same without farewells: two of five never commit."""
    one = agreement(ANN, live=(ANN, BEN, DAN, EVE))
    for peer in (DAN, EVE):
        one.on_link_down(peer, 0.0)
    for at in range(1, 200):
        one.tick(at / 2)
        for prepare in sent(one, Prepare):
            on_message(one, BEN, Promise(5, 0, prepare.ballot, None, None), at / 2)
    assert one.proposal is None or one.proposal.ballot.term == 1
    assert not one.electorate.able and set(one.electorate.absent) == {CAT, DAN, EVE}


def test_vote_in_a_farewell_binds_the_next_ballot():
    """Three of five voted; two of them left, and the third is silent: the others must adopt the value."""
    one = agreement(CAT, live=IDS)
    on_message(one, ANN, Propose(proposal_of()))
    for peer in (ANN, BEN):
        on_message(one, peer, said(peer, Ballot(1, ANN), proposal_of(), RESULTS))
        one.on_link_down(peer, 0.0)
    one.on_link_down(DAN, 0.0)
    prepare, now = prepared(one)
    on_message(one, EVE, Promise(5, 0, prepare.ballot, None, None), now)
    one.tick(now + 3.0)
    assert one.proposal.adopted == RESULTS and one.proposal.sources == (ANN, BEN) and one.proposal.alive == (CAT, EVE)


def test_promise_above_the_ballot_keeps_a_farewell_out_of_it():
    """The leaver promised a later ballot, which may count without it: this ballot must not."""
    one = agreement(CAT, live=IDS)
    on_message(one, DAN, said(DAN, Ballot(9, DAN)))
    prepare, now = prepared(one)
    assert prepare.ballot < Ballot(9, DAN)
    for peer in (ANN, BEN):
        on_message(one, peer, Promise(5, 0, prepare.ballot, None, None), now)
    one.tick(now + 3.0)
    assert one.proposal.ballot == prepare.ballot and one.proposal.farewells == () and DAN not in one.proposal.alive


@pytest.mark.parametrize("proved", [True, False])
def test_commit_is_believed_only_with_proved_farewells(proved):
    left = [said(peer, signer=None if proved else ANN).farewell for peer in (DAN, EVE)]
    proposal = proposal_of(farewells=tuple(left))
    votes = tuple(Proof(peer, sign(peer, vote_of(proposal))) for peer in (ANN, CAT))
    one = agreement(BEN)
    on_message(one, ANN, Commit(proposal, RESULTS, votes))
    assert (one.commit is not None) == proved
