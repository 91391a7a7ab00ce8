"""How long a round waits for who is late, where that is computed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.lateness import LEAST, MISSES, MOST, SHARE, Lateness

PEERS = [bytes([i]) * 32 for i in range(4)]
FIRST = 10.0


def play(lateness, times, *, first=1, start=0.0, until=200.0):
    """Rounds that each begin when the one before is over; `times`: what each peer trains in each, None: it is not in time."""
    now = start
    for at, took in enumerate(times, start=first):
        lateness.begin(at, PEERS[: len(took)], now)
        for peer, seconds in zip(PEERS, took, strict=False):
            if seconds is not None:
                lateness.came(peer, at, now + seconds)
        now += until
    lateness.begin(first + len(times), PEERS[: len(times[0])], now)
    return lateness


def test_as_long_as_nothing_is_known_it_is_what_was_given():
    lateness = Lateness(FIRST)
    lateness.begin(1, PEERS, 0.0)
    assert lateness.grace() == FIRST
    assert lateness.limit > FIRST, "who leads may know more"


def test_it_follows_from_how_late_members_are():
    lateness = play(Lateness(FIRST), [(20.0, 20.5, 21.0, 27.0 + at % 2) for at in range(8)])
    # The quorum of four is there with the third, after 21 s; the fourth comes 6 or 7 s later.
    assert lateness.limit == SHARE * 21.0
    assert lateness.grace() == pytest.approx(6.5 + 3 * 1.4826 * 0.5)


def test_equal_peers_are_hardly_waited_for():
    assert play(Lateness(FIRST), [(20.0, 20.1, 20.2, 20.3)] * 4).grace() == LEAST


def test_who_is_always_much_slower_is_not_waited_for():
    lateness = play(Lateness(FIRST), [(10.0, 10.0, 10.0, 40.0)] * 4)
    assert lateness.limit == 5.0 and lateness.grace() == LEAST


def test_who_was_left_out_gets_more_time_and_then_no_more():
    lateness, graces = play(Lateness(FIRST), [(20.0, 20.0, 20.0, 20.0)] * 8), []
    now = 10_000.0
    for at in range(10, 18):
        play(lateness, [(20.0, 20.0, 20.0, None)], first=at, start=now)
        now += 200.0
        graces.append(lateness.grace())
    assert graces[:3] == [2.0, 4.0, 8.0] and set(graces[3:]) == {LEAST}
    play(lateness, [(20.0, 20.0, 20.0, 27.0)], first=30, start=now)
    assert lateness.grace() == 7.0, "it is in time again, and later than it was"


def test_a_long_night_of_one_peer_changes_little():
    times = [(20.0, 20.0, 20.0, 23.0)] * 5 + [(20.0, 20.0, 20.0, 29.9)] + [(20.0, 20.0, 20.0, 23.0)] * 2
    assert play(Lateness(FIRST), times).grace() == 3.0


def test_who_is_out_of_reach_is_not_late_and_who_has_left_is_forgotten():
    lateness = play(Lateness(FIRST), [(20.0, 20.0, 20.0, 26.0)] * 3)
    lateness.lost(PEERS[3])
    assert lateness.grace() == LEAST
    for peer in PEERS[:3]:
        lateness.came(peer, 4, 620.0)
    lateness.begin(5, PEERS, 800.0)
    assert lateness.grace() == 6.0
    lateness.begin(6, PEERS[:3], 900.0)
    lateness.begin(7, PEERS, 1000.0)
    assert lateness.grace() == lateness.limit == FIRST, "a newcomer gets what it may need"


def test_a_round_without_a_quorum_teaches_nothing():
    lateness = play(Lateness(FIRST), [(20.0, 20.0, 20.0, 26.0)] * 3)
    before = lateness.grace(), lateness.limit
    play(lateness, [(20.0, None, None, None)] * 5, first=5, start=900.0)
    assert (lateness.grace(), lateness.limit) == before


def test_the_same_round_anew_and_words_about_others_count_for_nothing():
    lateness = Lateness(FIRST)
    lateness.begin(3, PEERS, 0.0)
    for peer in PEERS:
        lateness.came(peer, 3, 20.0)
        lateness.came(peer, 3, 90.0)
        lateness.came(peer, 4, 1.0)
        lateness.came(bytes([99]) * 32, 3, 0.0)
    lateness.begin(3, PEERS, 50.0)
    lateness.begin(4, PEERS, 100.0)
    assert (lateness.grace(), lateness.limit) == (LEAST, 10.0)


row = st.lists(st.one_of(st.none(), st.floats(0, 1e6)), min_size=4, max_size=4)


@given(st.lists(row, min_size=1, max_size=3 * MISSES))
def test_it_stays_within_its_bounds(times):
    lateness = play(Lateness(FIRST), times, until=1e7)
    assert LEAST <= lateness.limit <= MOST and LEAST <= lateness.grace() <= max(LEAST, lateness.limit)
