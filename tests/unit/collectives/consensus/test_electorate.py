"""Electorate: quorums of members, and of present peers after all members are gone."""

import pytest
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.proposal import RoundTerms
from thinwire.swarm.messages.registry import Ballot, Exclusion, Open

IDS = tuple(bytes([number]) * 32 for number in range(6))
ME, ANN, BEN, CAT, DAN, EVE = IDS
TERMS = RoundTerms(5, 0, (ANN, BEN), bytes(32), bytes(32), patience=2.0)


def opened(alive, gone=()):
    excluded = tuple(Exclusion(peer, "gone") for peer in gone) + (Exclusion(EVE, "late"),)
    return Open(5, 0, Ballot(1, ANN), alive, alive, (), excluded, None, ())


def test_electorate_is_orphaned_ten_seconds_after_the_last_member_is_gone():
    electorate = Electorate(ME, TERMS, {ME}, {ANN, BEN})
    assert [electorate.orphaned(now) for now in (100.0, 100.0, 109.9, 110.0, 111.0)] == [
        False,
        False,
        False,
        True,
        True,
    ]


def test_electorate_with_a_member_is_not_orphaned_and_starts_to_count_again():
    electorate = Electorate(ME, TERMS, {ME}, {ANN, BEN})
    assert not electorate.orphaned(100.0)
    electorate.gone.discard(BEN)
    assert not electorate.orphaned(200.0)
    electorate.gone.add(BEN)
    assert [electorate.orphaned(now) for now in (201.0, 210.9, 211.0)] == [False, False, True]


def test_electorate_without_members_is_never_orphaned():
    electorate = Electorate(ME, RoundTerms(1, 0, (), bytes(32), bytes(32)), {ME}, ())
    assert not electorate.orphaned(0.0) and not electorate.orphaned(1000.0)


def test_orphaned_electorate_needs_a_majority_of_present_peers():
    electorate = Electorate(ME, TERMS, {ME, CAT, DAN}, {ANN, BEN})
    assert not electorate.here({ME, CAT, DAN}, 0.0)
    assert not electorate.here({ME}, 10.0) and electorate.here({ME, CAT}, 10.0)


def test_electorate_counts_only_members_that_are_not_gone():
    terms = RoundTerms(5, 0, (ANN, BEN, CAT, DAN), bytes(32), bytes(32))
    electorate = Electorate(ME, terms, {ME, ANN}, {DAN})
    assert not electorate.enough({ANN, ME, EVE}) and electorate.enough({ANN, BEN})
    assert not electorate.enough({BEN, CAT}, ()) and electorate.enough({BEN, CAT, DAN}, ())
    assert electorate.enough({EVE, ME}, (ANN, BEN, CAT, DAN), (ME, EVE))


def test_ballot_commits_with_members_that_its_leader_does_not_count_as_gone():
    terms = RoundTerms(5, 0, (ANN, BEN, CAT, DAN), bytes(32), bytes(32))
    electorate = Electorate(ME, terms, IDS, ())
    assert not electorate.suffice({BEN, CAT}, opened((ANN, BEN, CAT, DAN)))
    assert electorate.suffice({BEN, CAT}, opened((BEN, CAT, DAN), gone=(ANN,)))


@pytest.mark.parametrize(("live", "order"), [({ANN, BEN}, [BEN, ANN]), ({ANN, CAT}, [ANN])])
def test_order_of_leaders_begins_with_the_present_leader(live, order):
    electorate = Electorate(ME, TERMS, live, ())
    assert electorate.order(BEN) == order


def test_electorate_waits_for_reachable_members_that_are_not_ready():
    terms = RoundTerms(5, 0, (ANN, BEN, CAT, DAN), bytes(32), bytes(32))
    electorate = Electorate(ME, terms, {ME, ANN, BEN, CAT}, {CAT})
    assert electorate.waiting_for({ANN}) == (BEN,)


def test_present_peers_decide_when_members_and_others_are_gone():
    electorate = Electorate(ME, TERMS, {ME, CAT}, {ANN, BEN, EVE})
    assert electorate.enough({ME, CAT}, present=(ME, CAT, DAN)) and not electorate.enough({ME}, present=(ME, CAT, DAN))
