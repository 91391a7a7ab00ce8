"""Reports of a peer: its alarms until the end of the process."""

from types import SimpleNamespace

import pytest
from thinwire.node.peer.reporter import DEBUG, INFO, WARNING, Reporter
from thinwire.swarm.identity.identity import short
from thinwire.swarm.lineage import name_of_fork
from thinwire.swarm.messages.registry import LIFE, ChainEntry, Fork

IDS = tuple(bytes([number]) * 32 for number in range(3))
FORK = Fork(4, b"b" * 32, IDS, IDS[:1], b"l" * LIFE, ())
NAME, TEXT = name_of_fork(FORK).hex(), "1 of 3 members continue as lineage 3f9ab210 since round 4"


def peer(*chain):
    entries = tuple(map(ChainEntry, chain))
    replica = SimpleNamespace(round=5, members=IDS, chain=entries, lineage=name_of_fork(chain[-1]))
    replica.each = lambda layout: [(0, replica, layout)]
    return SimpleNamespace(ready=True, replica=replica, layout=None)


def reporter():
    lines = []
    said = Reporter(lambda kind, fields: None, log=lambda *line: lines.append(line[:2]), wall=lambda: 0.0)
    return said, lines


def committed(report, *, sent=0, missing=()):
    """Report a committed round without `missing` peers."""
    alone = peer(FORK)
    alone.replica.after = lambda outcome: (6, IDS, b"d")
    alone.session = SimpleNamespace(
        roster=SimpleNamespace(peers=SimpleNamespace(view=IDS[:1])), dropped_frames=0, live=IDS[:1]
    )
    alone.traffic = lambda: (sent, 0)
    outcome = SimpleNamespace(missing=dict.fromkeys(missing, "silent"), contributors=IDS[:1], commit=None)
    report.round(alone, outcome, loss=2.0, seconds=0.0, steps=0, weight=0)


@pytest.mark.parametrize(
    ("sent", "text"),
    [(0, "up 0 B · exchange 0.0 s"), (1000, "up 1.0 kB (8.0 times less than synchronous fp32) · exchange 0.0 s")],
)
def test_line_of_a_round_names_what_was_saved_only_if_bytes_were_sent(sent, text):
    report, lines = reporter()
    report.fp32_bytes = 8000
    committed(report, sent=sent)
    assert lines == [(INFO, f"round 6 · loss 2.000 · 1/1 peers · {text} · 0 tok/s")]


def test_round_is_a_warning_once_while_a_peer_is_missing():
    """An absent member may stay a member for days, and each round names it."""
    report, lines = reporter()
    for missing in ((), IDS[1:2], IDS[1:2], IDS[1:3], (), IDS[1:2]):
        committed(report, missing=missing)
    assert [level for level, _ in lines] == [INFO, WARNING, INFO, WARNING, INFO, WARNING]
    assert "out (silent)" in lines[2][1]


def test_summary_names_the_lineage_and_each_alarm_once():
    report, lines = reporter()
    report.emit("lineage", {"lineage": NAME, "detail": TEXT})
    for text in (TEXT, "no checkpoint: no space", "no checkpoint: no space"):
        report.emit("alarm", {"detail": text})
    lines.clear()
    report.summary(peer(Fork(0, bytes(32), (), IDS, b"", ()), FORK))
    past = TEXT.replace("continue", "continued")
    assert lines == [
        (INFO, f"ended in lineage {NAME[:8]}"),
        (WARNING, f"alarm of this run: {past}"),
        (WARNING, "alarm of this run: no checkpoint: no space"),
    ]


def test_summary_tells_that_an_alarm_has_ended_unless_it_was_raised_again():
    report, lines = reporter()
    for text in ("disk full", "no directory"):
        report.emit("alarm", {"detail": text})
        report.end_alarm(text, "it works again")
    report.emit("alarm", {"detail": "no directory"})
    lines.clear()
    report.summary(SimpleNamespace(ready=False))
    shown = [text for _, text in lines]
    assert shown == ["alarm of this run: disk full; it has ended: it works again", "alarm of this run: no directory"]


def test_only_an_audit_that_finds_a_false_result_is_printed():
    report, lines = reporter()
    for false in (False, True):
        report.emit("audited", {"peer": IDS[1].hex(), "round": 3, "false": false})
    assert [level for level, _ in lines] == [DEBUG, INFO]


def test_status_shows_the_newest_alarm_that_has_not_ended():
    report = Reporter(lambda kind, fields: None, wall=lambda: 0.0)
    shown = []
    for text in ("disk full", "no directory", "disk full", "no directory"):
        report.emit("alarm", {"detail": text})
        shown.append(report.alarm)
    for text in ("no directory", "disk full"):
        report.end_alarm(text, "it works again")
        shown.append(report.alarm)
    assert shown == ["disk full", "no directory", "disk full", "no directory", "disk full", ""]


def test_summary_of_a_run_without_alarms_is_empty():
    report, lines = reporter()
    report.summary(peer(Fork(0, bytes(32), (), IDS, b"", ())))
    report.summary(SimpleNamespace(ready=False))
    assert lines == []


def test_round_without_a_commit_waits_for_other_peers_only():
    events = []
    report = Reporter(lambda kind, fields: events.append(fields["detail"]), wall=lambda: 0.0)
    for waiting, fruitless in ((IDS[:2], False), (IDS[:1], False), (IDS[:1], True)):
        session = SimpleNamespace(waiting_for=lambda waiting=waiting: waiting, stalled=str, fruitless=fruitless)
        waits = SimpleNamespace(
            session=session, identity=SimpleNamespace(peer_id=IDS[0]), replica=SimpleNamespace(round=3)
        )
        report.uncommitted(waits)
    report.uncommitted(waits, replaced=True)
    assert (
        events[:2] == [f"waiting for {short(IDS[1])}", "waiting for a quorum"] and "no peer that is here" in events[2]
    )
    assert "state of theirs" in events[3]
