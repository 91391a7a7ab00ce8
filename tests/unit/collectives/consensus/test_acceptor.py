"""Acceptor of one peer: promises, votes, and the pace at which it accepts ballots of one leader."""

from __future__ import annotations

import pytest
from thinwire.collectives.consensus.acceptor import BALLOTS, LAST_TERM, LEAP, REST, Acceptor, rest
from thinwire.collectives.consensus.proposal import RoundTerms
from thinwire.swarm.messages.registry import Ballot, Contribution, Open, Prepare

FIRST, SECOND, THIRD = (bytes([index]) * 32 for index in (1, 2, 3))
MEMBERS = (FIRST, SECOND, THIRD)
BASE, PLAN, DIGEST, OTHER = bytes(32), b"p" * 32, b"d" * 32, b"e" * 32
PATIENCE = 2.0


def terms():
    return RoundTerms(5, 0, MEMBERS, BASE, PLAN, max_weight=100, patience=PATIENCE)


def opened(term, leader=FIRST):
    entries = tuple(Contribution(peer, 1, 10) for peer in MEMBERS)
    return Open(5, 0, Ballot(term, leader), MEMBERS, MEMBERS, entries, (), None, ())


def prepare(term, leader):
    return Prepare(5, 0, Ballot(term, leader))


def test_acceptor_without_a_promise_has_no_leader_and_no_vote():
    acceptor = Acceptor(terms())
    assert acceptor.leader == b"" and acceptor.voted is None


@pytest.mark.parametrize("later", [2, 3, 4, 7, 40])
def test_promise_after_any_number_of_terms_carries_the_last_vote(later):
    """Without the old vote in a promise, a new leader could choose another value for a committed round."""
    acceptor = Acceptor(terms())
    assert acceptor.vote(opened(1), DIGEST)
    for term in range(2, later + 1):
        promise = acceptor.promise(Ballot(term, SECOND))
        assert (promise.voted, promise.digest) == (opened(1), DIGEST)
        assert (promise.round, promise.fragment, promise.ballot) == (5, 0, Ballot(term, SECOND))


def test_promise_after_two_votes_carries_the_newer_one():
    acceptor = Acceptor(terms())
    acceptor.vote(opened(1), DIGEST)
    acceptor.promise(Ballot(2, SECOND))
    assert acceptor.vote(opened(2, SECOND), OTHER)
    promise = acceptor.promise(Ballot(3, THIRD))
    assert (promise.voted, promise.digest) == (opened(2, SECOND), OTHER) and acceptor.voted == opened(2, SECOND)


def test_promise_without_a_vote_carries_none():
    promise = Acceptor(terms()).promise(Ballot(2, SECOND))
    assert promise.voted is None and promise.digest is None


def test_void_forgets_the_vote_but_not_the_promise():
    acceptor = Acceptor(terms())
    acceptor.promise(Ballot(2, SECOND))
    acceptor.vote(opened(2, SECOND), DIGEST)
    acceptor.void()
    assert acceptor.voted is None and acceptor.promised == Ballot(2, SECOND) and acceptor.leader == SECOND
    assert not acceptor.vote(opened(1), DIGEST)


def test_vote_below_the_promise_is_refused_and_changes_nothing():
    acceptor = Acceptor(terms())
    acceptor.promise(Ballot(3, SECOND))
    assert not acceptor.vote(opened(2, SECOND), DIGEST) and acceptor.voted is None
    assert acceptor.vote(opened(3, SECOND), DIGEST) and acceptor.voted == opened(3, SECOND)


def test_vote_for_the_same_ballot_a_second_time_is_refused():
    acceptor = Acceptor(terms())
    assert acceptor.vote(opened(1), DIGEST)
    assert not acceptor.vote(opened(1), OTHER)
    assert acceptor.promise(Ballot(2, SECOND)).digest == DIGEST


def test_vote_above_the_promise_is_accepted():
    acceptor = Acceptor(terms())
    acceptor.vote(opened(1), DIGEST)
    assert acceptor.vote(opened(2, SECOND), OTHER)


def test_heeds_a_prepare_only_from_its_leader_and_above_the_promise():
    acceptor = Acceptor(terms())
    assert not acceptor.heeds(THIRD, prepare(2, SECOND), 0.0)
    acceptor.promise(Ballot(3, SECOND))
    assert not acceptor.heeds(SECOND, prepare(3, SECOND), 0.0)
    assert not acceptor.heeds(SECOND, prepare(2, SECOND), 0.0)
    assert acceptor.heeds(SECOND, prepare(4, SECOND), 0.0)
    assert acceptor.promised == Ballot(3, SECOND), "the promise is made by promise()"


def test_heeds_a_term_up_to_the_largest_leap_and_the_last_term():
    acceptor = Acceptor(terms())
    acceptor.promise(Ballot(5, SECOND))
    assert acceptor.heeds(SECOND, prepare(5 + LEAP, SECOND), 0.0)
    assert not acceptor.heeds(SECOND, prepare(5 + LEAP + 1, SECOND), 0.0)
    acceptor.promise(Ballot(LAST_TERM - 1, SECOND))
    assert acceptor.heeds(SECOND, prepare(LAST_TERM, SECOND), 0.0)
    assert not acceptor.heeds(SECOND, prepare(LAST_TERM + 1, SECOND), 0.0)


def test_heeds_the_first_ballots_at_once_and_later_ones_after_growing_pauses():
    acceptor, now = Acceptor(terms()), 0.0
    for term in range(2, 2 + BALLOTS):
        assert acceptor.heeds(SECOND, prepare(term, SECOND), now)
    for number in range(BALLOTS, BALLOTS + 8):
        pause = 0.75 * rest(number) * PATIENCE
        if pause:
            assert not acceptor.heeds(SECOND, prepare(100 + number, SECOND), now + 0.99 * pause)
        now += 1.01 * pause
        assert acceptor.heeds(SECOND, prepare(100 + number, SECOND), now)


def test_heeds_counts_the_ballots_of_each_leader_separately():
    acceptor = Acceptor(terms())
    for term in range(2, 4 + BALLOTS):
        acceptor.heeds(SECOND, prepare(term, SECOND), 0.0)
    assert not acceptor.heeds(SECOND, prepare(50, SECOND), 0.0)
    assert acceptor.heeds(THIRD, prepare(50, THIRD), 0.0)


def test_trusts_a_peer_until_it_has_begun_more_ballots_than_an_honest_one():
    acceptor = Acceptor(terms())
    assert acceptor.trusts(SECOND)
    for term in range(2, 2 + BALLOTS):
        acceptor.heeds(SECOND, prepare(term, SECOND), 0.0)
        assert acceptor.trusts(SECOND)
    acceptor.heeds(SECOND, prepare(90, SECOND), 1000.0)
    assert not acceptor.trusts(SECOND) and acceptor.trusts(THIRD)


def test_follows_the_first_term_only_from_the_first_member():
    assert Acceptor(terms()).follows(FIRST, opened(1), 0.0)
    assert not Acceptor(terms()).follows(SECOND, opened(1, SECOND), 0.0)
    assert not Acceptor(terms()).follows(SECOND, opened(1), 0.0), "sent by another peer than its leader"
    assert not Acceptor(terms()).follows(FIRST, opened(0), 0.0)


def test_follows_a_later_term_when_promised_or_heeded_and_never_below_the_promise():
    acceptor = Acceptor(terms())
    assert acceptor.follows(SECOND, opened(2, SECOND), 0.0)
    acceptor.promise(Ballot(3, THIRD))
    assert acceptor.follows(THIRD, opened(3, THIRD), 0.0)
    assert not acceptor.follows(SECOND, opened(2, SECOND), 0.0)
    assert not acceptor.follows(FIRST, opened(1), 0.0)


def test_follows_a_promised_ballot_although_its_leader_has_begun_too_many():
    acceptor = Acceptor(terms())
    for term in range(2, 3 + BALLOTS):
        acceptor.heeds(SECOND, prepare(term, SECOND), 0.0)
    acceptor.promise(Ballot(9, SECOND))
    assert acceptor.follows(SECOND, opened(9, SECOND), 0.0)
    assert not acceptor.follows(SECOND, opened(10, SECOND), 0.0)


def test_rest_is_zero_at_first_then_doubles_up_to_its_bound():
    assert [rest(count) for count in range(BALLOTS + 1)] == [0.0] * (BALLOTS + 1)
    assert [rest(BALLOTS + count) for count in range(1, 9)] == [0.25, 0.5, 1.0, 2.0, 4.0, REST, REST, REST]
    assert rest(10**6) == REST


def test_follows_the_first_term_from_the_first_in_leader_order_not_in_peer_order():
    reordered = RoundTerms(5, 0, (SECOND, FIRST, THIRD), BASE, PLAN, max_weight=100, patience=PATIENCE)
    assert Acceptor(reordered).follows(SECOND, opened(1, SECOND), 0.0)
    for peer in (FIRST, THIRD):
        assert not Acceptor(reordered).follows(peer, opened(1, peer), 0.0)
