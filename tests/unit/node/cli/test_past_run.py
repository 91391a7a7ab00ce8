"""View of a past run, made from its event log."""

from contextlib import redirect_stdout
from io import StringIO

import pytest
from thinwire.node.cli.main import main
from thinwire.node.cli.page.past_run import PastClock, PastRun, past_clock
from thinwire.node.runtime.directories import directories
from thinwire.node.runtime.event_log import EventLog

RUN, ME, OTHER = "ab" * 32, "cd" * 32, "ef" * 32


class HandClock(PastClock):
    """Clock that a test sets."""

    def now(self):
        return self.first


@pytest.fixture
def files(tmp_path):
    found = directories(tmp_path)
    log = EventLog(found.run(bytes.fromhex(RUN)).events)
    events = [
        (100.0, "start", {"peer": ME, "run": RUN}),
        (101.0, "ready", {"round": 0, "parameters": 10}),
        (102.0, "joined", {"peer": OTHER, "detail": "203.0.113.7:7400"}),
        (110.0, "round", {"round": 1, "loss": 3.0, "members": [ME[:8], OTHER[:8]], "bytes_up": 10, "factor": 4.0}),
        (115.0, "alarm", {"detail": "the disk is full"}),
        (120.0, "round", {"round": 2, "loss": 2.5, "members": [ME[:8], OTHER[:8]], "bytes_up": 20, "factor": 4.0}),
        (125.0, "dead", {"peer": OTHER, "detail": "silent"}),
        (130.0, "left", {"round": 2, "digest": "aa"}),
    ]
    for wall, kind, fields in events:
        log.append(kind, fields, at=wall, wall=wall)
    log.close()
    return found


def past(files, wall):
    return PastRun(files, files.run(bytes.fromhex(RUN)), "old", HandClock(wall, wall, 1.0))


def test_past_run_shows_what_had_happened_by_then(files):
    assert past(files, 99.0).status() is None
    state = past(files, 112.0).state()
    assert state["running"] and state["status"]["round"] == 1 and state["status"]["loss"] == 3.0
    assert [peer["state"] for peer in state["status"]["peers"]] == ["alive"]
    assert [one["round"] for one in state["rounds"]] == [1] and state["saved_factor"] == 4.0
    state = past(files, 126.0).state()
    assert state["running"] and state["status"]["alarm"] == "the disk is full"
    assert [peer["state"] for peer in state["status"]["peers"]] == ["dead"]
    assert not past(files, 131.0).state()["running"]


def test_past_run_gives_each_event_once_as_time_goes_on(files):
    clock = HandClock(105.0, 105.0, 1.0)
    view = PastRun(files, files.run(bytes.fromhex(RUN)), "old", clock)
    assert view.news()["rounds"] == []
    view.status()
    for wall, expected in ((112.0, [1]), (112.0, []), (140.0, [2])):
        clock.first = wall
        news = view.news()
        assert [one["round"] for one in news["rounds"]] == expected


def test_clock_of_a_replay_begins_with_the_wanted_round_and_ends_with_the_log(files):
    run = files.run(bytes.fromhex(RUN))
    assert past_clock(run, 1000.0, 2).now() >= 120.0
    clock = past_clock(run, 1e9)
    assert clock.now() == 100.0 and clock.now() == 130.0
    assert past_clock(directories(files.runs / "none").run(bytes(32)), 1.0) is None


def test_replay_without_a_terminal_prints_the_end_of_the_run(files, tmp_path, capsys):
    text = StringIO()
    with redirect_stdout(text):
        assert main(["replay", RUN[:8], "--home", str(tmp_path)]) == 0
    assert "round 2" in text.getvalue() and "the disk is full" in text.getvalue()
    assert "tokens/s\n" in text.getvalue() and "memory 0 B" not in text.getvalue(), "the log does not have them"
    assert main(["replay", "--home", str(tmp_path / "new")]) == 2
    assert "there are no runs in" in capsys.readouterr().err
    assert main(["replay", "other", "--home", str(tmp_path)]) == 2
    assert "no run of this machine has the name 'other'" in capsys.readouterr().err
