"""Report, plots and live view of a handwritten journal."""

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from thinwire.sims.results import report, run_directory
from thinwire.sims.results.journal import WORLD, Journal, PeerSample, fault_fields
from thinwire.sims.results.live_view import LiveView, Stopped, ending
from thinwire.sims.results.report import PlayResult
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.scenario.parser import parse

SCENARIO = parse("""
name = "by-hand"
seed = 3
duration = 40
[[peers]]
name = "home"
count = 2
[[peers]]
name = "late"
join = 10
[[peers]]
name = "bad"
liar = "nan"
""")


@dataclass
class Violation:
    at: float
    oracle: str
    peer: int
    detail: str


def round_event(journal, at, peer, number, loss):
    journal.event(at, peer, "round", {"round": number, "loss": loss, "sync_seconds": 0.5 * number, "digest": "ab"})


def journal():
    """Journal of four peers: two from the start, one late, one liar that is killed at 20."""
    result = Journal(tuple(peer.name for peer in SCENARIO.peers))
    for peer in (0, 1, 3):
        result.event(0.0, peer, "up")
    result.sample(0.0, (PeerSample(0, 0, 0, None, "starting"),) * 2 + (None, PeerSample(0, 0, 0, None, "starting")))
    result.event(10.0, 2, "up")
    for at, number, loss in ((10.0, 1, 4.0), (21.0, 2, 3.0), (31.0, 3, 2.0)):
        round_event(result, at, 0, number, loss)
        round_event(result, at + 0.25, 1, number, loss + 1)
        if number < 2:
            round_event(result, at + 0.5, 3, number, 1000.0)
    round_event(result, 31.5, 2, 3, float("nan"))
    fault = Fault(20.0, "pause", (1,), 5.0)
    result.event(20.0, WORLD, "fault", fault_fields(fault))
    result.event(20.0, 3, "down", {"reason": "killed"})
    result.sample(
        20.0, (PeerSample(100, 50, 1, 4.0, "training", 10.0),) * 2 + (PeerSample(0, 0, 0, None, "joining"), None)
    )
    result.sample(
        25.0, (PeerSample(200, 60, 1, 4.0, "training", 14.0), PeerSample(7, 9, 1, 4.0, "joining")) + (None, None)
    )
    result.event(25.0, WORLD, "fault", fault_fields(fault, over=True))
    result.event(39.0, 2, "down", {"reason": "left"})
    result.sample(
        40.0, (PeerSample(300, 80, 3, 2.0, "training", 26.0), PeerSample(500, 90, 3, 3.0, "waiting", 14.0), None, None)
    )
    return result


def test_summary_matches_journal():
    violations = [Violation(33.25, "lineage", 1, "two aggregates")]
    summary = report.summarize(SCENARIO, journal(), PlayResult("L0", 0.5, "feed", "again", violations=violations))
    assert (summary["rounds"], summary["seconds"], summary["factor"], summary["trace"]) == (3, 40.0, 80.0, "feed")
    # The liar's losses are not counted.
    assert (summary["loss_first"], summary["loss_last"]) == (4.5, 2.5)
    assert summary["round_seconds"] == {"median": 10.0, "p95": 11.0}
    assert summary["sync_seconds"] == {"median": 1.0, "p95": 1.5}
    # Two have sent bytes; home-2 had two processes.
    assert summary["bytes_up"] == {"mean": 450, "most": 600, "total": 900}
    assert summary["bytes_down"] == {"mean": 110, "most": 140, "total": 220}
    # home-1 computed 26 of 40 s; home-2 10 of 20, and 14 of 15 in its second process.
    assert summary["utilisation"] == pytest.approx((26 + 10 + 14) / (40 + 20 + 15), abs=1e-4)
    assert summary["membership"][-1] == {"at": 39.0, "peer": "late", "change": "down", "reason": "left"}
    assert [one["change"] for one in summary["membership"]] == ["up", "up", "up", "up", "down", "down"]
    assert summary["faults"] == [
        {"at": 20.0, "fault": "pause", "peers": [1], "seconds": 5.0, "amount": 0.0, "detail": "", "over": False}
    ]
    assert summary["violations"] == [{"at": 33.25, "oracle": "lineage", "peer": 1, "detail": "two aggregates"}]
    assert summary["finished"] and summary["command"] == "again"
    shown = ending(summary, "there")
    assert "×80" in shown and "4.500 → 2.500" in shown and "66.7%" in shown


def test_summary_of_interrupted_run_has_events_so_far():
    made = journal()
    made.event(33.25, 1, "violation", {"oracle": "lineage", "detail": "two aggregates"})
    summary = report.summarize(SCENARIO, made, PlayResult("L0", 0.5, finished=False))
    assert summary["violations"] == [{"at": 33.25, "oracle": "lineage", "peer": 1, "detail": "two aggregates"}]


def test_summary_of_empty_journal_is_empty():
    empty = Journal(("a", "b"))
    summary = report.summarize(SCENARIO, empty, PlayResult("L1", 0.0, finished=False))
    assert summary["rounds"] == 0 and summary["loss_first"] is None and summary["utilisation"] is None
    assert "interrupted" in ending(summary, "there")


def test_run_directory_has_all_files(tmp_path):
    there, made = tmp_path / "deep" / "run", journal()
    run_directory.prepare(there)
    summary = report.summarize(SCENARIO, made, PlayResult("L0", 0.5))
    assert run_directory.write(there, SCENARIO, made, summary)
    assert json.loads((there / "summary.json").read_text()) == json.loads(json.dumps(summary))
    events = [json.loads(line) for line in (there / "events.jsonl").read_text().splitlines()]
    assert len(events) == len(made.events) and events[0] == {"at": 0.0, "kind": "up", "index": 0}
    assert [event["fault"] for event in events if event["kind"] == "fault"] == ["pause", "pause"]
    samples = [json.loads(line) for line in (there / "samples.jsonl").read_text().splitlines()]
    assert samples[1]["peers"][3] is None and samples[1]["peers"][0]["up"] == 100
    pictures = {path.stem for path in there.glob("*.png") if path.read_bytes().startswith(b"\x89PNG")}
    assert pictures == {"loss", "rounds", "bytes", "utilisation", "membership"}


@pytest.mark.trial
def test_plots_accept_many_peers_and_empty_journals(tmp_path):
    many = parse('duration = 9\n[[peers]]\nname = "p"\ncount = 60\n')
    crowd = Journal(tuple(peer.name for peer in many.peers))
    run_directory.write(tmp_path, many, crowd, {})
    for at in (0.0, 5.0, 9.0):
        crowd.sample(at, tuple(PeerSample(1, 1, 1, 1.0, "training", at / 2) if i % 7 else None for i in range(60)))
    before = (tmp_path / "membership.png").read_bytes()
    run_directory.write(tmp_path, many, crowd, {})
    assert (tmp_path / "membership.png").read_bytes() != before


def test_run_directory_with_files_is_refused_or_another_is_chosen(tmp_path):
    there = tmp_path / "run"
    for name in ("run", "run-2", "run-3"):
        chosen = run_directory.unused(there)
        assert chosen.name == name
        run_directory.prepare(chosen)
        (chosen / "summary.json").write_text("{}")
    with pytest.raises(run_directory.OutputError, match="has files") as caught:
        run_directory.prepare(there)
    assert caught.value.exit_code == 3 and "--force" in caught.value.hint and (there / "summary.json").exists()
    run_directory.prepare(there, force=True)
    assert not (there / "summary.json").exists()


def test_unwritable_run_directory_is_an_output_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(run_directory.OutputError, match="cannot write") as caught:
        run_directory.prepare(tmp_path / "file" / "run")
    assert caught.value.exit_code == 3 and "--out" in caught.value.hint


def test_live_view_without_terminal_prints_lines(capsys):
    view, made = LiveView(SCENARIO, "plain"), journal()
    view.watch(made)
    view.watch(made)
    view.close()
    lines = capsys.readouterr().err.splitlines()
    assert (
        len(lines) == 1 and "0:40 of 0:40" in lines[0] and "round 3 · loss 2.500 · 2 of 4 peers · faults 1" in lines[0]
    )


@pytest.mark.parametrize(
    ("seconds", "pace"), [(0.5, "80 × real time"), (10.0, "4.0 × real time"), (64.0, "0.6 × real time")]
)
def test_live_view_shows_the_pace_of_virtual_time_also_if_it_is_slower(capsys, monkeypatch, seconds, pace):
    clock = SimpleNamespace(perf_counter=lambda: clock.now, now=100.0)
    monkeypatch.setattr("thinwire.sims.results.live_view.time", clock)
    views = [LiveView(SCENARIO, "plain", virtual=virtual) for virtual in (True, False)]
    clock.now += seconds
    for view in views:
        view.watch(journal())
    shown, real = capsys.readouterr().err.splitlines()
    assert f"0:40 of 0:40 · {pace} · round 3" in shown and "0:40 of 0:40 · round 3" in real


@pytest.mark.parametrize("count", [4, 60])
def test_live_view_on_terminal_draws_table(capsys, count, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    many = parse(f'duration = 9\n[[peers]]\nname = "crew"\ncount = {count}\n')
    view, made = LiveView(many, "rich"), Journal(tuple(peer.name for peer in many.peers))
    made.sample(4.5, tuple(PeerSample(2000, 1, 1, 1.0, "training") if i else None for i in range(count)))
    view.watch(made)
    view.close()
    shown = capsys.readouterr().err
    assert "50 %" in shown and ("crew-2" in shown if count == 4 else "59 of 60" in shown)


def test_first_signal_stops_at_next_sample_and_second_at_once():
    view = LiveView(SCENARIO, "plain")
    view.stop(2)
    with pytest.raises(Stopped) as caught:
        view.watch(journal())
    assert caught.value.number == 2 and view.journal.samples
    with pytest.raises(KeyboardInterrupt):
        view.stop(2)


def test_computing_of_a_peer_that_never_contributed_is_no_utilisation():
    busy = Journal(("a", "b"))
    busy.sample(0.0, (PeerSample(0, 0, 0, None, "training"),) * 2)
    for number in (1, 2):
        for peer, tokens in ((0, 64), (1, 0)):  # b has the state of each round, but none has its work
            busy.event(10.0 * number, peer, "round", {"round": number, "loss": 2.0, "tokens": tokens})
    busy.sample(20.0, (PeerSample(1, 1, 2, 2.0, "training", 18.0), PeerSample(1, 1, 2, 2.0, "training", 18.0)))
    summary = report.summarize(SCENARIO, busy, PlayResult("L0", 1.0))
    assert summary["utilisation"] == pytest.approx(0.45) and summary["never_contributed"] == ["b"]
    assert [row for _, row in report.busy_parts(busy)] == [[pytest.approx(0.9), 0.0]]
    said = ending(summary, run_directory.Path("out"))
    assert "45.0%" in said and "the computing of b does not count" in said


def test_loss_by_formula_is_not_shown_as_nats(tmp_path):
    told = {}
    for compute in ("stub", "torch"):
        scenario = replace(SCENARIO, compute=compute)
        told[compute] = report.summarize(scenario, journal(), PlayResult("L0", 1.0))
        assert told[compute]["loss_unit"] in ending(told[compute], tmp_path)
    assert told["stub"]["loss_unit"] == "model of a loss, no real training"
    assert told["torch"]["loss_unit"] == "nats per token"
