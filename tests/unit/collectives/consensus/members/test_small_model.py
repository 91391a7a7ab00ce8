"""Every reachable state of one round with a few acceptors; see `kit.reference.small_model` for the states and the proof."""

import pytest
from kit.reference.small_model import DOWN, LEFT, LOST, MISTAKES, UP, Model, Proposal, Rule, bound_by, explore

SLOW = ("vote raises no promise", "lost folder votes", "farewell with later promise", "restart forgets")
"""Mistakes that only a long search finds."""


@pytest.mark.parametrize(
    ("acceptors", "ballots", "rule"),
    [
        *((3, ballots, rule) for ballots in ((1, 2, 3), (2, 3, 4)) for rule in (Rule.HIGHEST, Rule.POSSIBLE)),
        pytest.param(4, (1, 2, 3), Rule.HIGHEST, marks=pytest.mark.soak),
        pytest.param(4, (1, 2, 3), Rule.POSSIBLE, marks=pytest.mark.trial),
    ],
)
def test_round_decides_at_most_one_value_in_all_states(acceptors, ballots, rule):
    """Without ballot 1 the first of the three ballots can carry farewells, too."""
    outcome = explore(Model(acceptors, ballots, rule))
    assert outcome.trace == ()
    assert outcome.states > {3: 10_000, 4: 200_000}[acceptors], "otherwise the model has lost transitions"
    farewells = {(entry, bin(left).count("1")) for entry, _, left in outcome.reached}
    expected = {(entry, count) for entry in range(3) for count in range(acceptors if ballots[entry] > 1 else 1)}
    assert farewells == expected, "each ballot can decide with any number of farewells"


@pytest.mark.trial
def test_round_with_crashes_and_lost_folders_decides_at_most_one_value_in_all_states():
    full, reduced = explore(Model(3, eager=True)), explore(Model(3))
    assert full.trace == () and full.states > 400_000
    for entry in range(3):
        statuses = {status for ballot, status, _ in full.reached if ballot == entry}
        assert {(UP, UP, UP), (DOWN, UP, UP), (LOST, UP, UP), (LEFT, UP, UP), (LOST, DOWN, LEFT)} <= statuses
    # The reduced model has the same proposals, and lacks only decisions to which more votes would add another one.
    assert reduced.endings <= full.endings
    most = {}
    for proposals, done in reduced.endings:
        most.setdefault(proposals, []).append(done)
    assert all(any(done & more == done for more in most[proposals]) for proposals, done in full.endings)


@pytest.mark.parametrize(
    "mistake", [pytest.param(one, marks=pytest.mark.trial if one in SLOW else ()) for one in MISTAKES]
)
def test_planted_mistake_decides_two_values(mistake):
    ballots = (1, 1, 2) if mistake == "ballot proposed twice" else (1, 2, 3)
    assert explore(Model(3, ballots, mistake=mistake)).trace


@pytest.mark.parametrize("acceptors", [3, pytest.param(4, marks=pytest.mark.trial)])
def test_count_with_farewells_of_the_reported_ballot_decides_two_values(acceptors):
    assert explore(Model(acceptors, rule=Rule.POSSIBLE_BY_VOTE)).trace


def test_trace_is_a_path_of_actions_to_two_decided_values():
    model = Model(3, mistake="farewell without state")
    state, trace = model.start(), explore(model).trace
    for line in trace:
        state = next(after for actor, label, after in model.successors(state) if f"{actor}: {label}" == line)
    assert bin(model.decided(state)).count("1") == 2 and len(trace) == 6


FIRST, SECOND = Proposal(1, 0), Proposal(2, 0)


@pytest.mark.parametrize(
    ("reports", "farewells", "expected"),
    [
        ({0: 0, 1: 0, 2: 0}, (), 0),
        ({0: 0, 1: 0, 2: 1}, (), 0),  # half without the most senior member
        ({1: 0, 2: 0, 3: 1}, (0,), 0),
        ({1: 0, 2: 0, 3: 1}, (), 1),  # half with member 0, which is silent
        ({0: 1, 1: 1, 2: 0, 3: 0}, (), 1),
        ({0: 1, 1: 0, 2: 0, 3: 0}, (), 0),
        ({0: 1, 1: 0, 2: 0, 3: 0}, (1, 2), 1),  # half of 0 and 3
        ({0: 1, 1: 2, 2: 2}, (), 2),
        ({0: 1, 1: 1, 2: 0, 3: 2}, (), 1),
    ],
)
def test_proposer_is_bound_by_a_vote_that_may_have_been_decided(reports, farewells, expected):
    reports = {**dict.fromkeys(farewells, 0), **reports}
    assert bound_by(Rule.POSSIBLE, range(4), reports, farewells, (FIRST, SECOND)) == expected


def test_proposer_is_bound_by_a_decision_with_a_vote_of_a_member_that_left_later():
    """Members 1 and 2 of three decided in ballot 1, 1 left, ballot 2 carried its farewell, 2 voted in it and left."""
    reports, proposals = {0: 0, 2: 2}, (FIRST, Proposal(1, 0b010))
    assert bound_by(Rule.POSSIBLE, range(3), reports, (2,), proposals) == 1
    assert bound_by(Rule.POSSIBLE_BY_VOTE, range(3), reports, (2,), proposals) == 0
