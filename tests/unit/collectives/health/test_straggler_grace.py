"""The computed grace: how long a round waits for late peers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.health.straggler_grace import LEAST, MISSES, MOST, ROUNDS, SHARE, SHORT_WAIT, StragglerGrace

PEERS = [bytes([i]) * 32 for i in range(4)]
FIRST = 10.0


def longest(lateness):
    return max(lateness.graces().values())


def play(lateness, times, *, first=1, start=0.0, until=200.0):
    """Play rounds without pauses; `times`: training seconds of each peer in each, None: too late."""
    now = start
    for at, took in enumerate(times, start=first):
        lateness.begin(at, PEERS[: len(took)], now)
        for peer, seconds in zip(PEERS, took, strict=False):
            if seconds is not None:
                lateness.on_announcement(peer, at, now + seconds)
        now += until
    lateness.begin(first + len(times), PEERS[: len(times[0])], now)
    return lateness


def test_grace_without_data_is_the_configured_one():
    lateness = StragglerGrace(FIRST)
    lateness.begin(1, PEERS, 0.0)
    assert longest(lateness) == FIRST
    assert lateness.limit > FIRST, "who leads may know more"


def test_grace_follows_lateness_of_members():
    lateness = play(StragglerGrace(FIRST), [(20.0, 20.5, 21.0, 27.0 + at % 2) for at in range(8)])
    # The quorum of four is there with the third, after 21 s; the fourth comes 6 or 7 s later.
    assert lateness.limit == SHARE * 21.0
    assert longest(lateness) == pytest.approx(6.5 + 3 * 1.4826 * 0.5)


def test_grace_for_equal_peers_is_minimal():
    assert longest(play(StragglerGrace(FIRST), [(20.0, 20.1, 20.2, 20.3)] * 4)) == LEAST


def test_grace_does_not_cover_much_slower_peer():
    lateness = play(StragglerGrace(FIRST), [(10.0, 10.0, 10.0, 40.0)] * 4)
    assert lateness.limit == 5.0 and lateness.graces() == dict.fromkeys(PEERS[:3], LEAST) | {
        PEERS[3]: SHORT_WAIT * 10.0
    }


def test_grace_of_excluded_peer_is_the_limit_once_and_then_a_glance():
    lateness, graces = play(StragglerGrace(FIRST), [(20.0, 20.0, 20.0, 20.0)] * 8), []
    now = 10_000.0
    for at in range(10, 14):
        play(lateness, [(20.0, 20.0, 20.0, None)], first=at, start=now)
        now += 200.0
        graces.append(lateness.graces()[PEERS[3]])
    assert graces == [SHARE * 20.0, SHORT_WAIT * 20.0, SHORT_WAIT * 20.0, SHORT_WAIT * 20.0]
    play(lateness, [(20.0, 20.0, 20.0, 27.0)], first=14, start=now)
    assert longest(lateness) == 7.0, "it is in time again, and later than it was"


def test_grace_ignores_single_late_round():
    times = [(20.0, 20.0, 20.0, 23.0)] * 5 + [(20.0, 20.0, 20.0, 29.9)] + [(20.0, 20.0, 20.0, 23.0)] * 2
    assert longest(play(StragglerGrace(FIRST), times)) == 3.0


def test_grace_ignores_unreachable_and_departed_peers():
    lateness = play(StragglerGrace(FIRST), [(20.0, 20.0, 20.0, 26.0)] * 3)
    lateness.on_link_down(PEERS[3])
    assert longest(lateness) == LEAST
    for peer in PEERS[:3]:
        lateness.on_announcement(peer, 4, 620.0)
    lateness.begin(5, PEERS, 800.0)
    assert longest(lateness) == 6.0
    for at in range(6, 7 + ROUNDS):
        lateness.begin(at, PEERS[:3], 100.0 * (at + 3))
    lateness.begin(7 + ROUNDS, PEERS, 2000.0)
    assert longest(lateness) == lateness.limit == FIRST, "a newcomer gets what it may need"


def test_grace_ignores_rounds_without_quorum():
    lateness = play(StragglerGrace(FIRST), [(20.0, 20.0, 20.0, 26.0)] * 3)
    before = longest(lateness), lateness.limit
    play(lateness, [(20.0, None, None, None)] * 5, first=5, start=900.0)
    assert (longest(lateness), lateness.limit) == before


def test_grace_ignores_repeated_rounds_and_strangers():
    lateness = StragglerGrace(FIRST)
    lateness.begin(3, PEERS, 0.0)
    for peer in PEERS:
        lateness.on_announcement(peer, 3, 20.0)
        lateness.on_announcement(peer, 3, 90.0)
        lateness.on_announcement(peer, 4, 1.0)
        lateness.on_announcement(bytes([99]) * 32, 3, 0.0)
    lateness.begin(3, PEERS, 50.0)
    lateness.begin(4, PEERS, 100.0)
    assert (longest(lateness), lateness.limit) == (LEAST, 10.0)


row = st.lists(st.one_of(st.none(), st.floats(0, 1e6)), min_size=4, max_size=4)


@given(st.lists(row, min_size=1, max_size=3 * MISSES))
def test_grace_stays_within_its_bounds(times):
    lateness = play(StragglerGrace(FIRST), times, until=1e7)
    assert LEAST <= lateness.limit <= MOST and 0.0 <= longest(lateness) <= lateness.limit


def fixed(times, **how):
    return play(StragglerGrace(FIRST, auto=False), times, **how)


LATE = (20.0, 20.0, 20.0, None)


def test_fixed_grace_is_the_same_for_all_members_that_are_late_at_most_once():
    assert fixed([(20.0, 20.5, 21.0, 29.0)] * 4).graces() == dict.fromkeys(PEERS, FIRST)
    assert fixed([(20.0, 20.5, 21.0, 22.0), LATE]).graces() == dict.fromkeys(PEERS, FIRST)
    assert fixed([LATE, (20.0, 20.5, 21.0, 22.0), LATE]).graces() == dict.fromkeys(PEERS, FIRST)


@pytest.mark.parametrize("late", [LATE, (20.0, 20.0, 20.0, 20.0 + FIRST + 0.1)])
def test_member_late_in_two_rounds_in_a_row_gets_a_glance_only(late):
    grace = fixed([late] * MISSES)
    assert grace.graces() == dict.fromkeys(PEERS[:3], FIRST) | {PEERS[3]: SHORT_WAIT * 20.0} and grace.limit == FIRST


def test_member_that_is_in_time_by_itself_is_waited_for_again():
    grace = fixed([LATE] * 5)
    play(grace, [(20.0, 20.0, 20.0, 25.0)], first=6, start=1000.0)
    assert grace.graces()[PEERS[3]] == FIRST


def test_lateness_is_remembered_while_the_peer_is_no_member():
    grace = fixed([LATE])
    grace.begin(3, PEERS[:3], 400.0)  # left out of the round before, it is no member of this one
    play(grace, [LATE], first=4, start=600.0)
    assert grace.graces()[PEERS[3]] == SHORT_WAIT * 20.0


def test_peer_that_is_no_member_is_in_time_only_with_a_contribution():
    for contributes in (False, True):
        grace = fixed([LATE] * 2)
        grace.begin(4, PEERS[:3], 1000.0)
        for peer in PEERS:
            grace.on_announcement(peer, 4, 1020.0, contributes=contributes or peer != PEERS[3])
        grace.begin(5, PEERS, 1040.0)
        assert (grace.graces()[PEERS[3]] == FIRST) is contributes


def test_attendance_names_late_members_with_seconds():
    grace = StragglerGrace(FIRST, auto=False)
    grace.begin(1, PEERS, 0.0)
    for peer, at in zip(PEERS, (20.0, 20.0, 21.0), strict=False):
        grace.on_announcement(peer, 1, at)
    found = grace.begin(2, PEERS, 32.0)
    assert [(one.peer, one.late, one.seconds) for one in found] == [
        (PEERS[0], False, 0.0), (PEERS[1], False, 0.0), (PEERS[2], False, 0.0), (PEERS[3], True, 11.0),
    ]  # fmt: skip
    assert grace.begin(2, PEERS, 33.0) == [] and grace.begin(5, PEERS, 99.0) == [], "rounds were missed here"


def test_peer_that_took_part_is_not_late_if_only_its_announcement_is_missing_here():
    grace = StragglerGrace(FIRST, auto=False)
    for round in range(1, 5):
        grace.begin(round, PEERS, 100.0 * round, present=PEERS)
        for peer in PEERS[:3]:
            grace.on_announcement(peer, round, 100.0 * round + 20.0)
    assert grace.graces() == dict.fromkeys(PEERS, FIRST)
