"""Output of `thinwire plan --pipeline`."""

import json
from pathlib import Path

import msgspec
import pytest
from thinwire.node.cli import main
from thinwire.node.pipeline.planner.gantt_text import lanes
from thinwire.node.pipeline.planner.makespan import play
from thinwire.node.pipeline.planner.plan_summary import PlanSummary, look
from thinwire.node.pipeline.planner.problem import ProblemError, load

FOLDER = Path(__file__).parents[5] / "examples" / "pipelines"
GCP8 = str(FOLDER / "gcp8_25m2.json")


def test_plan_summary_figures_are_consistent(published):
    made, timeline, found = look(published("gcp8_25m2"), tries=2_000)
    assert found.full == pytest.approx(60.10, rel=3e-3) and found.factor == pytest.approx(found.full / found.makespan)
    assert found.microbatches == made.microbatches == 12
    assert timeline == play(made, found.paths) and timeline.makespan == found.makespan
    # A forward, a backward and at origins a loss for each of the 12 micro-batches on each of 3 peers.
    assert sum(found.working) * found.makespan == pytest.approx(0.44 * 12 * (3 * 2.5 + 0.25))
    assert found.links < found.alone < found.makespan


def test_gantt_text_shows_operations_of_each_peer():
    two = load(
        msgspec.json.encode(
            {
                **{
                    "delays": [[0, 1], [1, 0]],
                    "wm": 4.0,
                    "memory": 1,
                    "path_len": 2,
                    "per_start": 1,
                    "rounds": 1,
                    "gap": 0,
                },
                "partitions": [[0], [1]],
            }
        )
    )
    made, timeline, found = look(two, tries=10)
    # Forward 4, hop 1, forward 4, hop 1, loss 1, hop 1, backward 6, hop 1, backward 6: 25 columns of one second.
    lines = lanes(made, timeline, found, width=1 + 12 + 25)
    assert found.makespan == 25.0
    assert lines[1].split()[2] == "aaaa......*........AAAAAA"
    assert lines[2].split()[2] == ".....aaaa...AAAAAA......."
    assert [line.split()[-1] for line in lines[1:3]] == ["44%", "40%"]


def test_unusual_link_is_named(published):
    asked = published("gcp12_33m2")
    notes = look(asked, tries=100)[2].notes
    assert any("6 NL" in note and "10 London" in note for note in notes)
    assert not any("mistyped" in note for note in look(published("gcp8_25m2"), tries=10)[2].notes)


def test_plan_pipeline_command_prints_timeline(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main.main(["plan", "--pipeline", GCP8, "--tries", "1000"]) == 0
    out = capsys.readouterr().out
    assert "60.10 s when no stage is skipped" in out and "2 Japan (0) > " in out
    assert max(len(line) for line in out.splitlines() if not line.startswith("note")) <= 100


def test_plan_pipeline_command_writes_json_and_picture(capsys, tmp_path):
    picture = tmp_path / "plan.png"
    assert main.main(["plan", "--pipeline", GCP8, "--tries", "1000", "--json", "--picture", str(picture)]) == 0
    found = msgspec.convert(json.loads(capsys.readouterr().out), PlanSummary)
    assert len(found.paths) == 6 and found.makespan < found.full
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "flags",
    [
        ["--pipeline", "nowhere.json"],
        ["--pipeline", __file__],
        ["--pipeline", GCP8, "examples/demo.toml"],
        ["--pipeline", GCP8, "--parameters", "350M"],
        ["--pipeline", GCP8, "--rtt", "50", "--peers", "8"],
        ["--pipeline", GCP8, "--link", "fibre", "--outcome", "demo"],
        ["--picture", "plan.png"],
        ["--tries", "5"],
        ["--pipeline", GCP8, "--tries", "1", "--picture", "nowhere/at/all/plan.png"],
    ],
)
def test_plan_pipeline_command_mistake_prints_two_lines(flags, capsys):
    assert main.main(["plan", *flags]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: ") and lines[1].startswith("hint: ") and len(lines) == 2


TWO = {"delays": [[0, 1], [1, 0]], "wm": 4.0, "memory": 1, "path_len": 2, "per_start": 1, "partitions": [[0], [1]]}


def test_plan_pipeline_command_names_options_without_use(capsys):
    assert main.main(["plan", "--pipeline", GCP8, "--rtt", "50", "--layers", "3"]) == 2
    error = capsys.readouterr().err
    assert "--layers and --rtt cannot go with --pipeline" in error


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"partitions": [[0, 1]]}, "two stages"),
        ({"partitions": [], "sizes": [2]}, "two stages"),
        ({"delays": [[0, 1e308], [1e308, 0]]}, "seconds"),
        ({"wm": 1e308}, "seconds"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_hint_for_a_file_without_a_plan_can_be_followed(change, hint):
    with pytest.raises(ProblemError) as caught:
        load(msgspec.json.encode({**TWO, **change}))
    assert hint in caught.value.hint


@pytest.mark.filterwarnings("error")
def test_names_in_a_file_cannot_control_the_terminal_or_break_the_picture(capsys, tmp_path):
    file, picture = tmp_path / "two.json", tmp_path / "two.png"
    names = {"name": "two\x1b[2J\nlines $\\foo$", "locations": ["\x9b31mred", "$\\frac$"]}
    file.write_bytes(msgspec.json.encode({**TWO, **names}))
    assert main.main(["plan", "--pipeline", str(file), "--tries", "1", "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "two?[2J?lines $\\foo$" in out and "?31mred" in out
    assert all(line.isprintable() for line in out.splitlines())
    assert picture.read_bytes().startswith(b"\x89PNG")
