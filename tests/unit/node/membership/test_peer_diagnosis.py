"""Events of the health monitor about peers that become unhealthy or recover."""

from types import SimpleNamespace

from thinwire.collectives.health.diagnosis import WINDOW
from thinwire.node.membership.peer_diagnosis import CLOCK_SECONDS, PeerDiagnosis
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import WallClock

ONE, TWO, UNHEALTHY = (bytes([i]) * 32 for i in range(3))


def watching():
    events, live, clock = [], {ONE, TWO, UNHEALTHY}, SimpleNamespace(now=0.0)
    watch = PeerDiagnosis(
        None,
        SimpleNamespace(control=lambda peer, message: None),
        live,
        now=lambda: clock.now,
        wall=lambda: 1e9,
        emit=lambda kind, fields: events.append((kind, fields["peer"], fields["detail"])),
    )

    def hours(peer, ahead, count=1, apart=CLOCK_SECONDS):
        for _ in range(count):
            clock.now += apart
            assert watch.saw(peer, Frame(WallClock(10**9 + ahead), b""))

    for peer in (ONE, TWO):
        hours(peer, 0)
    return watch, events, live, hours


def test_new_link_alone_does_not_clear_a_finding():
    watch, events, _, hours = watching()
    hours(UNHEALTHY, 100, 3)
    assert [event[:2] for event in events] == [("unhealthy", UNHEALTHY.hex())]
    for _ in range(4):
        watch.on_link_down(UNHEALTHY)
        hours(UNHEALTHY, 100)
    assert len(events) == 1 and watch.shown(UNHEALTHY).startswith("clock skew")
    hours(UNHEALTHY, 0, 8)
    assert events[1:] == [("healthy", UNHEALTHY.hex(), "clock skew")] and watch.shown(UNHEALTHY) == ""


def test_clocks_that_were_told_while_we_were_suspended_are_no_finding():
    """The messages of a minute arrive together; the newest of them is right."""
    watch, events, _, hours = watching()
    hours(UNHEALTHY, 0)
    for late in (60, 50, 40, 31, 20, 10):
        hours(UNHEALTHY, -late, apart=0.0)
    assert not events and watch.shown(UNHEALTHY) == ""
    hours(UNHEALTHY, -60, 3)
    assert len(events) == 1 and watch.shown(UNHEALTHY).startswith("clock skew")


def test_finding_about_absent_peer_ends_with_an_event():
    watch, events, live, hours = watching()
    hours(UNHEALTHY, 100, 3)
    live.discard(UNHEALTHY)
    watch.on_link_down(UNHEALTHY)
    assert len(events) == 1
    for number in range(64):
        stranger = bytes([number, 9]) * 16
        live.add(stranger)
        hours(stranger, 100, 3)
        live.discard(stranger)
        watch.on_link_down(stranger)
    assert ("healthy", UNHEALTHY.hex(), "clock skew; it is gone") in events


def test_clock_is_told_to_all_peers_in_turn():
    now, told, live = 0.0, [], {bytes([number]) * 32 for number in range(11)}
    watch = PeerDiagnosis(
        None,
        SimpleNamespace(control=lambda peer, message: told.append(peer[0])),
        live,
        now=lambda: now,
        wall=lambda: 1e9,
        emit=lambda kind, fields: None,
    )
    for now in (CLOCK_SECONDS, CLOCK_SECONDS + 1, 2 * CLOCK_SECONDS):  # noqa: B007 - read by the lambda
        watch.on_tick()
    assert told == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4]


def test_peer_that_floods_is_named_once_until_it_has_stopped_for_a_while():
    now, events, pauses = 0.0, [], {ONE: 0, TWO: 3}
    watch = PeerDiagnosis(
        None,
        SimpleNamespace(control=lambda peer, message: None),
        {ONE, TWO},
        now=lambda: now,
        wall=lambda: 1e9,
        emit=lambda kind, fields: events.append((kind, fields["peer"], fields.get("cause"))),
        pauses=lambda: dict(pauses),
    )

    def intervals(count, more):
        nonlocal now
        for _ in range(count):
            now += CLOCK_SECONDS
            pauses[TWO] += more
            watch.on_tick()

    intervals(20, 9)
    assert events == [("unhealthy", TWO.hex(), "too many frames")]
    assert (
        watch.shown(TWO) == "too many frames: it sent more small frames than are read from one peer, 8 of 8 intervals"
    )
    intervals(WINDOW - 1, 0)
    assert len(events) == 1 and not watch.shown(ONE)
    intervals(1, 0)
    assert events[1:] == [("healthy", TWO.hex(), None)] and not watch.shown(TWO)
