"""Command `thinwire sim`, with a level that plays a handwritten journal."""

import json
import signal
from dataclasses import dataclass

import msgspec
import pytest
from thinwire.node.cli.main import main
from thinwire.sims.cli import play
from thinwire.sims.results.journal import Journal, PeerSample
from thinwire.sims.results.report import PlayResult
from thinwire.sims.scenario import tables
from thinwire.sims.scenario.parser import parse


@dataclass
class Violation:
    at: float
    oracle: str
    peer: int
    detail: str


def journal():
    result = Journal(("home-1", "home-2", "home-3", "home-4"))
    result.sample(0.0, (PeerSample(0, 0, 0, None, "training"),) * 4)
    for number in (1, 2, 3):
        for peer in range(4):
            result.event(10.0 * number, peer, "round", {"round": number, "loss": 4.0 - number, "sync_seconds": 1.0})
    result.sample(40.0, (PeerSample(9, 9, 3, 1.0, "training", 30.0),) * 4)
    return result


@pytest.fixture
def in_place(tmp_path, monkeypatch):
    """Write a scenario into an empty working directory; return it and a level that plays the journal above."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('duration = 40\n[[peers]]\ncount = 4\nname = "home"\n')
    return tmp_path


def cli(*arguments):
    return main(["sim", *arguments])


@pytest.mark.trial
def test_sim_command_writes_report(in_place, monkeypatch, capsys):
    def virtual(scenario, view):
        assert (scenario.seed, scenario.duration, len(scenario.peers)) == (9, 50.0, 4)
        view.watch(journal())
        return PlayResult("L0", 0.0, "feed")

    monkeypatch.setattr(play, "virtual", virtual)
    assert cli("mine.toml", "--seed", "9", "--duration", "50") == 0
    assert "rounds" in capsys.readouterr().out and (in_place / "sims-mine-9" / "loss.png").exists()
    assert cli("mine.toml", "--seed", "9", "--duration", "50", "--json", "--out", "elsewhere") == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 3 and (in_place / "elsewhere" / "summary.json").exists()


def test_sim_command_with_violation_fails_and_prints_reproduction(in_place, monkeypatch, capsys):
    monkeypatch.setattr(
        play, "virtual", lambda s, v: PlayResult("L0", 0.0, violations=[Violation(3.0, "finite", 1, "NaN")])
    )
    assert cli("mine.toml", "--peers", "5") == 1
    said = capsys.readouterr().err
    assert (
        "error: 1 violations; the first at 3.0 s: finite: NaN" in said
        and "thinwire sim mine.toml --seed 0 --peers 5" in said
    )


def test_interrupted_sim_command_leaves_partial_report(in_place, monkeypatch, capsys):
    def virtual(scenario, view):
        signal.raise_signal(signal.SIGINT)
        view.watch(journal())

    monkeypatch.setattr(play, "virtual", virtual)
    before = signal.getsignal(signal.SIGINT)  # A daemon of an earlier test leaves its own.
    assert cli("mine.toml") == 130
    summary = json.loads((in_place / "sims-mine-0" / "summary.json").read_text())
    assert not summary["finished"] and summary["rounds"] == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_failed_sim_command_leaves_partial_report(in_place, monkeypatch):
    def virtual(scenario, view):
        view.watch(journal())
        raise AssertionError("a bug")

    monkeypatch.setattr(play, "virtual", virtual)
    assert cli("mine.toml") == 1
    assert json.loads((in_place / "sims-mine-0" / "summary.json").read_text())["rounds"] == 3


def test_sim_command_mistakes_print_two_lines_and_exit_2(in_place, capsys):
    (in_place / "bad.toml").write_text("duration = 40\n[[peers]]\nstpe = 1\n")
    for arguments, said in (
        (("bad.toml",), "bad.toml, line 3: peers.stpe: unknown key"),
        (("hom-fibre-8",), "hint: did you mean 'home-fibre-8'?"),
        (("new",), "new takes the name"),
        (("new", "mine.toml"), "mine.toml exists"),
        (("mine.toml", "--real", "--namespaces"), "two ways"),
        (("/dev/zero",), "cannot read /dev/zero: not a regular file"),
        (("mine.toml", "--faults", "none.json"), "cannot read none.json"),
        (("mine.toml", "--faults", "/dev/zero"), "cannot read /dev/zero: not a regular file"),
    ):
        assert cli(*arguments) == 2
        err = capsys.readouterr().err
        assert said in err and "error: " in err and "hint: " in err


def test_scenario_template_plays_and_documents_every_key(in_place, capsys):
    assert cli("new", "other.toml") == 0
    text = (in_place / "other.toml").read_text()
    assert len(parse(text).peers) == 8
    for table in (tables.Top, tables.PeerGroup, tables.Links, tables.FaultEntry):
        for field in msgspec.structs.fields(table):
            assert f"{field.name} = " in text or f"[{field.name}" in text


def test_sim_list_shows_scenarios_and_all_names(capsys):
    assert cli("list") == 0
    shown = capsys.readouterr().out
    assert "churn-storm: 30 peers, 600 s" in shown and "lte: 30/8" in shown and "swizzle-clog: " in shown
    assert "equivocate: " in shown and "Germany" in shown and "lockstep: " in shown


@pytest.mark.trial
def test_sim_command_plays_scenario_file_in_virtual_time(in_place, capsys):
    (in_place / "tiny.toml").write_text(
        'duration = 40\nparameters = 2000\n[manifest.outer]\nsync_every = 5\n[[peers]]\ncount = 3\nname = "home"\n'
        '[[faults]]\nat = 15\nkind = "restart"\npeers = ["home-3"]\nseconds = 5\n'
    )
    traces = []
    for _ in range(2):
        assert cli("tiny.toml", "--seed", "4", "--json") == 0
        summary = json.loads(capsys.readouterr().out)
        traces.append(summary["trace"])
        assert summary["level"] == "L0" and summary["rounds"] >= 4 and summary["seconds"] == 40.0
        assert summary["loss_last"] < summary["loss_first"] and 0.5 < summary["utilisation"] <= 1.0
        third = [(one["change"], one.get("reason")) for one in summary["membership"] if one["peer"] == "home-3"]
        assert third[:3] == [("up", None), ("down", "killed"), ("up", None)]
    assert traces[0] == traces[1]
