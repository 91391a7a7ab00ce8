"""Quorums: majorities of the members that have not left; a tie goes to the most senior of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.consensus.members.quorum import TWO_THIRDS, enough, fewest, possible, tolerated

MEMBERS = tuple(bytes([i]) * 32 for i in range(7))
fractions = st.sampled_from([0.5, 0.6, 2 / 3, 0.9])


def subsets(of):
    return st.sets(st.sampled_from(of)) if of else st.just(set())


@given(st.integers(1, 7), st.data(), fractions)
def test_two_quorums_of_one_base_intersect(n, data, fraction):
    members = MEMBERS[:n]
    one, other = data.draw(subsets(members)), data.draw(subsets(members))
    departed = data.draw(subsets(members))
    if enough(one, members, departed, fraction=fraction) and enough(other, members, departed, fraction=fraction):
        assert (one & other) - departed


@given(st.integers(1, 7), st.data(), fractions)
def test_quorum_is_monotone_and_ignores_departed_peers(n, data, fraction):
    members = MEMBERS[:n]
    agreeing, more, departed = (data.draw(subsets(members)) for _ in range(3))
    if enough(agreeing, members, departed, fraction=fraction):
        assert enough(agreeing | more, members, departed, fraction=fraction)
        assert enough(agreeing - departed, members, departed, fraction=fraction)


def test_all_remaining_members_are_a_quorum():
    for n in range(1, 8):
        for left in range(1, n + 1):
            for chosen in itertools.combinations(MEMBERS[:n], left):
                assert enough(chosen, MEMBERS[:n], set(MEMBERS[:n]) - set(chosen))


def test_tie_is_won_by_side_of_most_senior_remaining_member():
    assert enough(MEMBERS[:2], MEMBERS[:4], ())
    assert not enough(MEMBERS[2:4], MEMBERS[:4], ())
    assert enough(MEMBERS[1:3], MEMBERS[:5], MEMBERS[:1])
    assert not enough(MEMBERS[3:5], MEMBERS[:5], MEMBERS[:1])
    assert not enough(MEMBERS[:2], MEMBERS[:4], (), fraction=0.6), "a larger fraction knows no ties"


def test_empty_set_is_no_quorum():
    assert not enough((), MEMBERS[:3], ())
    assert not enough((), MEMBERS[:3], MEMBERS[:3])
    assert not enough(MEMBERS[3:], MEMBERS[:3], MEMBERS[:3]), "strangers have no say"
    assert not enough(MEMBERS, (), ())


def test_majority_is_a_quorum_with_or_without_the_most_senior_member():
    assert enough(MEMBERS[1:3], MEMBERS[:3]) and enough(MEMBERS[:2], MEMBERS[:3])
    assert not enough(MEMBERS[:1], MEMBERS[:3])


def test_quorum_fraction_must_be_exceeded():
    assert not enough(range(7), range(10), fraction=0.8) and enough(range(9), range(10), fraction=0.8)
    assert not enough(MEMBERS[:4], MEMBERS[:6], (), fraction=2 / 3)
    assert enough(MEMBERS[:5], MEMBERS[:6], (), fraction=2 / 3)


def test_tie_depends_on_seniority_and_not_on_ids():
    seniors = (MEMBERS[3], MEMBERS[0], MEMBERS[1], MEMBERS[2])
    assert enough({MEMBERS[3], MEMBERS[2]}, seniors) and not enough({MEMBERS[0], MEMBERS[1]}, seniors)
    assert enough({MEMBERS[0], MEMBERS[1]}, seniors[1:] + seniors[:1])


@given(st.integers(1, 6), st.data())
def test_quorum_grows_when_a_member_leaves_only_by_that_farewell(n, data):
    """Without a farewell nothing that happens to a member makes a quorum of the others."""
    members = MEMBERS[:n]
    agreeing, departed = data.draw(subsets(members)), data.draw(subsets(members))
    if not enough(agreeing, members) and enough(agreeing, members, departed):
        assert departed - agreeing


@given(st.integers(1, 6), st.data())
def test_vote_quorum_meets_the_next_promise_quorum_or_a_farewell_reports_it(n, data):
    """The proof in quorum.py: members that left between two ballots promised nothing in the later one."""
    members = MEMBERS[:n]
    before, after = data.draw(subsets(members)), data.draw(subsets(members))
    votes = data.draw(subsets(members)) - before
    promises = data.draw(subsets(members)) - after - (before - after)
    if enough(votes, members, before) and enough(promises, members, after):
        assert votes & promises or votes & after


@pytest.mark.parametrize("fraction", [TWO_THIRDS, 0.8])
def test_fewer_than_a_third_may_lie_with_quorums_above_two_thirds(fraction):
    assert [tolerated(count, fraction) for count in range(11)] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert tolerated(10, 0.66) == tolerated(10, 0.5) == 0


def test_fewest_members_are_the_least_number_of_which_so_many_may_lie():
    assert fewest(0) == 0
    for liars in range(1, 6):
        assert tolerated(fewest(liars), TWO_THIRDS) == liars > tolerated(fewest(liars) - 1, TWO_THIRDS)


def test_quorums_after_farewells_have_more_in_common_than_may_lie():
    """Three of seven have left. Three are more than two thirds of the other four, but two such quorums may share two liars."""
    members, left = range(7), range(4, 7)
    assert tolerated(7, TWO_THIRDS) == 2
    assert not enough({0, 1, 2}, members, left, fraction=TWO_THIRDS)
    assert enough({0, 1, 2, 3}, members, left, fraction=TWO_THIRDS)
    assert not enough({0}, members, range(1, 7), fraction=TWO_THIRDS), "the last one may lie"


@pytest.mark.trial
def test_any_two_quorums_above_two_thirds_have_an_honest_member_in_common():
    for count in range(1, 257):
        liars, members = tolerated(count, TWO_THIRDS), range(count)
        assert 3 * liars < count
        for gone in {0, 1, liars, count // 2}:
            base = count - gone
            least = next(
                (n for n in range(1, base + 1) if enough(members[:n], members[:base], fraction=TWO_THIRDS)), None
            )
            some = next(
                (n for n in range(1, base + 1) if enough(members[:n], members, members[base:], fraction=TWO_THIRDS)),
                None,
            )
            assert least is None or 3 * least > 2 * base
            assert some is None or (3 * some > 2 * base and 2 * some - base > liars)
        assert enough(members[liars:], members, fraction=TWO_THIRDS), "the honest members suffice"


def test_value_is_possible_if_liars_may_hide_their_votes():
    members = range(4)
    assert not possible({0}, members, fraction=TWO_THIRDS)
    assert possible({0, 1}, members, fraction=TWO_THIRDS) and not enough({0, 1}, members, fraction=TWO_THIRDS)
    assert possible({0, 1}, members, fraction=0.5) == enough({0, 1}, members), "with a majority no member may lie"
