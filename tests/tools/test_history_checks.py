"""Checks of one history on event logs: each finds what it is for, and nothing in a sound log."""

import pytest
from kit.histories import Slot
from kit.real.one_history import Span, crowded, lineages, returns, reunion, silences, two_digests


def committed(at, number, digest="d", lineage="a"):
    return {"kind": "round", "at": at, "round": number, "digest": f"{digest}{number}", "lineage": lineage}


def ready(at, number):
    return {"kind": "ready", "at": at, "round": number}


def life(since, number, seconds, lineage="a"):
    """Return the events of a process with a round each second."""
    return [ready(since, number), *(committed(since + i, number + i, lineage=lineage) for i in range(1, seconds + 1))]


def test_two_digests_same_lineage_and_round_are_found():
    logs = {"x": [committed(1, 7)], "y": [committed(1, 7, "e")], "z": [committed(2, 8)]}
    assert two_digests(logs) == {Slot("a", 0, 7): {"d7": ["x"], "e7": ["y"]}}


def test_two_digests_of_one_daemon_are_found():
    assert two_digests({"x": [committed(1, 7), committed(9, 7, "e")]})


def test_two_digests_in_different_lineages_are_sound():
    logs = {"x": [committed(1, 7)], "y": [committed(2, 7, "e", "b")]}
    assert not two_digests(logs) and lineages(logs) == ["a", "b"]


def test_reunion_counts_only_a_round_that_all_committed_after_the_time():
    logs = {"x": [committed(1, 7), committed(5, 8), committed(6, 9)], "y": [committed(1, 7), committed(7, 9)]}
    assert reunion(logs, logs, 2.0) == (7, Slot("a", 0, 9))
    assert reunion(logs, logs, 0.0) == (1, Slot("a", 0, 7))
    assert reunion(logs, logs, 6.5) is None


def test_reunion_of_two_digests_is_none():
    assert reunion({"x": [committed(1, 7)], "y": [committed(1, 7, "e")]}, "xy", 0.0) is None


def test_crowded_counts_daemons_from_five_seconds_after_their_start():
    ups = {"x": [Span(0, 50)], "y": [Span(10, 20), Span(22, 26), Span(30, 60)]}
    assert crowded(ups, enough=2) == [Span(15, 20), Span(35, 50)]


def test_silences_are_measured_while_enough_daemons_are_up():
    ups = {name: [Span(0, 40)] for name in "wxyz"}
    found = silences({"x": [committed(3, 1), committed(10, 2), committed(28, 3)]}, ups)
    assert found == [Span(10, 28), Span(28, 40), Span(5, 10)]


@pytest.mark.parametrize(("number", "lost"), [(80, False), (64, False), (63, True), (0, True)])
def test_return_below_the_newest_due_checkpoint_is_a_loss(number, lost):
    (found,) = returns("x", [life(0, 0, 100), life(110, number, 5)])
    assert (found.before, found.after, found.due, found.lost) == (100, number, 64, lost)


def test_return_to_another_lineage_is_no_loss():
    (found,) = returns("x", [life(0, 0, 100), life(110, 0, 5, lineage="b")])
    assert not found.lost


def test_return_after_a_short_life_is_measured_from_the_rounds_of_the_life_before():
    found = returns("x", [life(0, 0, 100), [], life(110, 3, 5)])
    assert [one.lost for one in found] == [True]
