"""Who rests, and for how long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.standing import STEPS, Standing
from thinwire.swarm.protocol import Ballot, Contribution, Open

IDS = [bytes([i]) * 32 for i in range(4)]
ANN, BEN, CAT, DAN = IDS


def opened(round, *, alive=IDS, idle=()):
    contributors = tuple(Contribution(peer, 1, 10) for peer in alive)
    return Open(round, 0, Ballot(1, ANN), tuple(IDS), tuple(alive), contributors, (), None, (), tuple(sorted(idle)))


def live(standing, rounds, fails):
    """Rounds in which `fails` says who of those that own chunks would lose them; the rounds that cost a patience."""
    costly = []
    for round in rounds:
        resting = standing.resting(round)
        failed = fails(round) - resting
        costly += [round] if failed else []
        standing.settle(opened(round, idle=resting | failed), failed)
    return costly


def test_who_never_does_anything_costs_ever_fewer_rounds():
    costly = live(Standing(), range(1, 200), lambda round: {DAN})
    assert costly == [1, 4, 9, 18, 35, 68, 133, 198]


def test_one_bad_moment_is_soon_forgotten():
    standing = Standing()
    assert live(standing, range(1, 20), lambda round: {BEN, CAT} if round == 3 else set()) == [3]
    assert not standing.resting(20) and not standing._steps and not standing._until


def test_who_left_is_forgotten():
    standing = Standing()
    standing.settle(opened(1), {DAN})
    for round in range(2, 5):
        standing.settle(opened(round, alive=IDS[:3]), ())
    assert not standing._steps and not standing._until


@given(st.lists(st.sets(st.sampled_from(IDS)), max_size=40))
def test_nobody_rests_longer_than_the_limit(story):
    standing = Standing()
    live(standing, range(len(story)), lambda round: story[round])
    assert not standing.resting(len(story) + 2**STEPS)
