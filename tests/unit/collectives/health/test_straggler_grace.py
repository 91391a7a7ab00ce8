"""The computed grace: how long a round waits for late peers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.health.straggler_grace import LEAST, MISSES, MOST, SHARE, StragglerGrace

PEERS = [bytes([i]) * 32 for i in range(4)]
FIRST = 10.0


def play(lateness, times, *, first=1, start=0.0, until=200.0):
    """Play rounds without pauses; `times`: training seconds of each peer in each, None: too late."""
    now = start
    for at, took in enumerate(times, start=first):
        lateness.begin(at, PEERS[: len(took)], now)
        for peer, seconds in zip(PEERS, took, strict=False):
            if seconds is not None:
                lateness.came(peer, at, now + seconds)
        now += until
    lateness.begin(first + len(times), PEERS[: len(times[0])], now)
    return lateness


def test_grace_without_data_is_the_configured_one():
    lateness = StragglerGrace(FIRST)
    lateness.begin(1, PEERS, 0.0)
    assert lateness.grace() == FIRST
    assert lateness.limit > FIRST, "who leads may know more"


def test_grace_follows_lateness_of_members():
    lateness = play(StragglerGrace(FIRST), [(20.0, 20.5, 21.0, 27.0 + at % 2) for at in range(8)])
    # The quorum of four is there with the third, after 21 s; the fourth comes 6 or 7 s later.
    assert lateness.limit == SHARE * 21.0
    assert lateness.grace() == pytest.approx(6.5 + 3 * 1.4826 * 0.5)


def test_grace_for_equal_peers_is_minimal():
    assert play(StragglerGrace(FIRST), [(20.0, 20.1, 20.2, 20.3)] * 4).grace() == LEAST


def test_grace_does_not_cover_much_slower_peer():
    lateness = play(StragglerGrace(FIRST), [(10.0, 10.0, 10.0, 40.0)] * 4)
    assert lateness.limit == 5.0 and lateness.grace() == LEAST


def test_grace_grows_for_excluded_peer_and_then_stops():
    lateness, graces = play(StragglerGrace(FIRST), [(20.0, 20.0, 20.0, 20.0)] * 8), []
    now = 10_000.0
    for at in range(10, 18):
        play(lateness, [(20.0, 20.0, 20.0, None)], first=at, start=now)
        now += 200.0
        graces.append(lateness.grace())
    assert graces[:3] == [2.0, 4.0, 8.0] and set(graces[3:]) == {LEAST}
    play(lateness, [(20.0, 20.0, 20.0, 27.0)], first=30, start=now)
    assert lateness.grace() == 7.0, "it is in time again, and later than it was"


def test_grace_ignores_single_late_round():
    times = [(20.0, 20.0, 20.0, 23.0)] * 5 + [(20.0, 20.0, 20.0, 29.9)] + [(20.0, 20.0, 20.0, 23.0)] * 2
    assert play(StragglerGrace(FIRST), times).grace() == 3.0


def test_grace_ignores_unreachable_and_departed_peers():
    lateness = play(StragglerGrace(FIRST), [(20.0, 20.0, 20.0, 26.0)] * 3)
    lateness.on_link_down(PEERS[3])
    assert lateness.grace() == LEAST
    for peer in PEERS[:3]:
        lateness.came(peer, 4, 620.0)
    lateness.begin(5, PEERS, 800.0)
    assert lateness.grace() == 6.0
    lateness.begin(6, PEERS[:3], 900.0)
    lateness.begin(7, PEERS, 1000.0)
    assert lateness.grace() == lateness.limit == FIRST, "a newcomer gets what it may need"


def test_grace_ignores_rounds_without_quorum():
    lateness = play(StragglerGrace(FIRST), [(20.0, 20.0, 20.0, 26.0)] * 3)
    before = lateness.grace(), lateness.limit
    play(lateness, [(20.0, None, None, None)] * 5, first=5, start=900.0)
    assert (lateness.grace(), lateness.limit) == before


def test_grace_ignores_repeated_rounds_and_strangers():
    lateness = StragglerGrace(FIRST)
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
def test_grace_stays_within_its_bounds(times):
    lateness = play(StragglerGrace(FIRST), times, until=1e7)
    assert LEAST <= lateness.limit <= MOST and LEAST <= lateness.grace() <= max(LEAST, lateness.limit)
