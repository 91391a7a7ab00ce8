"""Back-off of chunk owners that fail."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.topology.peer_backoff import STEPS, PeerBackoff
from thinwire.swarm.messages.registry import MAX_GROUP, Ballot, Contribution, Proposal

IDS = [bytes([i]) * 32 for i in range(4)]
ANN, BEN, CAT, DAN = IDS


def proposal_of(round, *, alive=IDS, idle=()):
    contributors = tuple(Contribution(peer, 1, 10) for peer in alive)
    return Proposal(round, 0, Ballot(1, ANN), tuple(IDS), tuple(alive), contributors, (), None, (), tuple(sorted(idle)))


def live(standing, rounds, fails):
    """Play rounds in which `fails` returns the owners that fail; return the rounds that cost a patience."""
    costly = []
    for round in rounds:
        resting = standing.resting(round)
        failed = fails(round) - resting
        costly += [round] if failed else []
        standing.record(proposal_of(round, idle=resting | failed), failed)
    return costly


def test_silent_owner_costs_ever_fewer_rounds():
    costly = live(PeerBackoff(), range(1, 200), lambda round: {DAN})
    assert costly == [1, 4, 9, 18, 35, 68, 133, 198]


def test_single_failure_is_soon_forgotten():
    standing = PeerBackoff()
    assert live(standing, range(1, 20), lambda round: {BEN, CAT} if round == 3 else set()) == [3]
    assert not standing.resting(20) and not standing.remembered


def test_departed_owner_is_forgotten():
    standing = PeerBackoff()
    standing.record(proposal_of(1), {DAN})
    for round in range(2, 5):
        standing.record(proposal_of(round, alive=IDS[:3]), ())
    assert not standing.remembered


def lead(standing, round, leader, *others):
    """Commit a round in which this leader's ballot came after those of the others."""
    one = proposal_of(round)
    standing.record(msgspec.structs.replace(one, ballot=Ballot(2, leader)), (), led=(*others, leader))


def test_peer_with_ballots_in_vain_is_hasty_for_ever_more_rounds():
    """A peer that begins a ballot whenever others follow it stops few rounds."""
    standing, stopped = PeerBackoff(), []
    for round in range(1, 200):
        begins = DAN not in standing.hasty(round)
        stopped += [round] if begins else []
        lead(standing, round, ANN, *([DAN] if begins else []))
    assert stopped == [1, 4, 9, 18, 35, 68, 133, 198]


def test_leader_whose_ballot_commits_is_not_hasty_and_takes_a_step_back():
    standing = PeerBackoff()
    lead(standing, 1, ANN, DAN)
    assert standing.hasty(2) == standing.hasty(3) == {DAN} and not standing.hasty(4)
    lead(standing, 4, DAN)
    lead(standing, 5, ANN, DAN)
    assert standing.hasty(7) == {DAN} and not standing.hasty(8), "two rounds again"


def test_peer_that_begins_no_ballots_in_vain_is_forgotten():
    standing = PeerBackoff()
    lead(standing, 1, ANN, DAN)
    assert standing.remembered == {DAN}
    lead(standing, 100, ANN)
    assert not standing.remembered


@given(st.lists(st.sets(st.sampled_from(IDS)), max_size=40))
def test_back_off_is_bounded(story):
    standing = PeerBackoff()
    live(standing, range(len(story)), lambda round: story[round])
    assert not standing.resting(len(story) + 2**STEPS)


def commit(standing, round, withholds):
    """Record a round in which DAN `withholds` its data, unless it is barred, or sends it; return whether it was barred."""
    barred = DAN in standing.barred(round)
    lacks = {DAN} if withholds and not barred else set()
    there = [peer for peer in IDS if peer != DAN or not (withholds or barred)]
    contributors = tuple(Contribution(peer, 1, 10) for peer in there)
    standing.record(msgspec.structs.replace(proposal_of(round), contributors=contributors), (), lacks)
    return barred


def test_withholding_contributor_is_out_after_three_rounds_for_ever_longer():
    standing = PeerBackoff()
    took_part = [round for round in range(1, 100) if not commit(standing, round, True)]
    assert took_part == [1, 2, 3, 12, 29, 62]
    assert DAN in standing.resting(100), "and it owns nothing in between"


def test_contributor_that_withheld_once_owns_nothing_until_it_has_contributed():
    standing = PeerBackoff()
    commit(standing, 1, True)
    assert standing.resting(2) == {DAN} and not standing.barred(2)
    commit(standing, 2, False)
    assert not standing.resting(3) and not standing.remembered


def test_contributor_that_sends_more_often_than_not_is_never_out():
    standing = PeerBackoff()
    assert not any(commit(standing, round, round % 2 == 1) for round in range(1, 200))


def test_memory_of_withheld_data_is_bounded_and_survives_a_departure():
    standing = PeerBackoff()
    for round in range(1, 4):
        commit(standing, round, True)
    standing.record(proposal_of(4, alive=IDS[:3]), ())
    assert standing.barred(5) == {DAN}
    for number in range(1, MAX_GROUP + 1):
        standing.record(proposal_of(5, alive=IDS[:3]), (), {number.to_bytes(32, "big")})
    assert len(standing.remembered) == MAX_GROUP and not standing.barred(6)


def test_contributor_that_serves_no_audit_pauses_longer_each_time_and_works_it_off_by_serving():
    standing = PeerBackoff()
    for round in (1, 2, 3):
        standing.audited(DAN, round, served=False)
        standing.record(proposal_of(round), ())
    assert standing.barred(11) == standing.resting(11) == {DAN} and not standing.barred(12)
    standing.audited(DAN, 12, served=False)
    assert standing.barred(12 + 16) == {DAN} and not standing.resting(12 + 17)
    for _ in range(4):
        standing.audited(DAN, 30, served=True)
    assert not standing.remembered
