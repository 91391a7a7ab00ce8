"""What becomes of findings: events of who is sick and who is well again."""

from types import SimpleNamespace

from thinwire.node.watch import Watch
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import Hour

ONE, TWO, SICK = (bytes([i]) * 32 for i in range(3))


def watching():
    events, live = [], {ONE, TWO, SICK}
    watch = Watch(
        None,
        SimpleNamespace(control=lambda peer, message: None),
        live,
        now=lambda: 0.0,
        wall=lambda: 1e9,
        emit=lambda kind, fields: events.append((kind, fields["peer"], fields["detail"])),
    )

    def hours(peer, ahead, count=1):
        for _ in range(count):
            assert watch.saw(peer, Frame(Hour(10**9 + ahead), b""))

    for peer in (ONE, TWO):
        hours(peer, 0)
    return watch, events, live, hours


def test_a_new_link_makes_nobody_well_but_what_it_shows_does():
    watch, events, _, hours = watching()
    hours(SICK, 100, 3)
    assert [event[:2] for event in events] == [("sick", SICK.hex())]
    for _ in range(4):
        watch.lost(SICK)
        hours(SICK, 100)
    assert len(events) == 1 and watch.shown(SICK).startswith("clock skew")
    hours(SICK, 0, 8)
    assert events[1:] == [("well", SICK.hex(), "clock skew")] and watch.shown(SICK) == ""


def test_of_who_stays_away_it_is_told_in_the_end():
    watch, events, live, hours = watching()
    hours(SICK, 100, 3)
    live.discard(SICK)
    watch.lost(SICK)
    assert len(events) == 1
    for number in range(64):
        stranger = bytes([number, 9]) * 16
        live.add(stranger)
        hours(stranger, 100, 3)
        live.discard(stranger)
        watch.lost(stranger)
    assert ("well", SICK.hex(), "clock skew; it is gone") in events
