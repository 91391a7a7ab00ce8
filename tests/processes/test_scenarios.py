"""Scenarios with real processes: played to the end or interrupted, leaving nothing behind."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from kit.real.waiting import until
from thinwire.sims.processes.netns_testbed import TUN, obstacle
from thinwire.sims.processes.player import PREFIX, sweep
from thinwire.sims.processes.testbed import EmulationError

COMMAND = "import sys; from thinwire.node.cli.main import main; sys.exit(main())"

SCENARIO = """
duration = {duration}
interval = 1
parameters = 3000
[manifest.outer]
sync_every = 2
[manifest.exchange]
straggler_timeout = 2.0
[[peers]]
name = "home"
count = 3
region = ["Iowa", "Canada"]
access = "cable"
step = 0.1
[[faults]]
at = 4
kind = "partition"
peers = ["home-2"]
seconds = 2
[[faults]]
at = 6
kind = "reset"
peers = ["home-1", "home-2"]
[[faults]]
at = 7
kind = "pause"
peers = ["home-3"]
seconds = 1
[[faults]]
at = 8
kind = "clock-jump"
peers = ["home-1"]
amount = 60
[[faults]]
at = 9
kind = "kill"
peers = ["home-3"]
"""

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="real scenarios need Linux"),
    pytest.mark.timeout(600),
]


@pytest.fixture
def started(tmp_path):
    """Start `thinwire sim --real` on the scenario above, with this directory for temporary files."""
    (tmp_path / "temporary").mkdir()
    running = []

    def start(duration, level="--real"):
        (tmp_path / "three.toml").write_text(SCENARIO.format(duration=duration))
        environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "sim", "three.toml", level, "--json"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()


def actors(directory):
    """Return the processes that play actors with files in `directory`."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(directory) in word for word in process.info["cmdline"] or ()) and process.pid != os.getpid():
            found.append(process)
    return found


@pytest.mark.soak
def test_scenario_is_played_by_real_daemons(started, tmp_path):
    process = started(20)
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    summary = json.loads(out)
    assert summary["level"] == "L1" and summary["finished"] and summary["violations"] == []
    assert (
        summary["rounds"] >= 2
        and summary["loss_last"] < summary["loss_first"]
        and summary["bytes_up"]["total"] > 10_000
    )
    assert [fault["fault"] for fault in summary["faults"]] == ["partition", "reset", "pause", "kill"]
    assert [fault["fault"] for fault in summary["not_played"]] == ["clock-jump"]
    ends = {one["peer"]: one["reason"] for one in summary["membership"] if one["change"] == "down"}
    assert ends == {"home-1": "left", "home-2": "left", "home-3": "killed"}
    directory = tmp_path / "sims-three-0"
    kinds = {json.loads(line)["kind"] for line in (directory / "events.jsonl").read_text().splitlines()}
    assert {"start", "ready", "round", "up", "down", "fault", "left"} <= kinds
    assert (directory / "loss.png").exists()
    assert not list((tmp_path / "temporary").iterdir()) and not actors(tmp_path / "temporary")


@pytest.mark.trial
@pytest.mark.skipif(bool(obstacle()) or not TUN.exists(), reason=obstacle() or "there is no /dev/net/tun")
def test_scenario_is_played_in_network_namespaces(started, tmp_path):
    process = started(15, "--namespaces")
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    summary = json.loads(out)
    assert summary["level"] == "L2" and summary["finished"] and summary["violations"] == [] and summary["rounds"] >= 1
    assert [fault["fault"] for fault in summary["faults"]] == ["partition", "pause", "kill"]
    assert [fault["fault"] for fault in summary["not_played"]] == ["reset", "clock-jump"]
    assert not list((tmp_path / "temporary").iterdir()) and not actors(tmp_path / "temporary")


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.soak),
        pytest.param(signal.SIGTERM, marks=pytest.mark.trial),
    ],
)
def test_interrupted_scenario_leaves_only_a_report(started, tmp_path, number):
    process = started(3600)
    temporary = tmp_path / "temporary"
    if number == signal.SIGINT:
        until(
            "the first event",
            lambda: list(temporary.glob("*/home-1/state/runs/*/events.jsonl")) or process.poll() is not None,
            seconds=200.0,
        )
    else:  # while the processes load
        until("the first actor", lambda: len(actors(temporary)) > 0 or process.poll() is not None, seconds=200.0)
    process.send_signal(number)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 128 + number, err
    summary = json.loads((tmp_path / "sims-three-0" / "summary.json").read_text())
    assert not summary["finished"] and summary["level"] == "L1"
    assert not list(temporary.iterdir()) and not actors(temporary)


@pytest.mark.trial
def test_killed_player_leaves_no_process_and_sweep_removes_its_files(started, tmp_path):
    process = started(3600)
    temporary = tmp_path / "temporary"
    until("the first actor", lambda: len(actors(temporary)) > 0 or process.poll() is not None, seconds=200.0)
    process.kill()
    process.communicate(timeout=240)
    until("the end of the actors", lambda: not actors(temporary), seconds=200.0)
    (left,) = temporary.iterdir()
    assert left.name.startswith(PREFIX)
    (temporary / f"{PREFIX}{os.getpid()}-mine").mkdir()
    assert sweep(temporary) == 1
    assert [path.name for path in temporary.iterdir()] == [f"{PREFIX}{os.getpid()}-mine"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("ten-regions-30", "30 real processes are too many"), ("byzantine-19pct", "real daemons cannot lie")],
)
def test_real_level_refuses_scenarios_that_need_virtual_time(name, said, tmp_path, monkeypatch, capsys):
    from thinwire.node.cli.main import main

    monkeypatch.chdir(tmp_path)
    assert main(["sim", name, "--real"]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_mesh_on_other_system_says_it_needs_linux(monkeypatch):
    import asyncio

    from thinwire.sims.processes.proxy_testbed import ProxyTestbed
    from thinwire.sims.scenario.parser import load

    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(EmulationError, match="needs Linux"):
        asyncio.run(ProxyTestbed(load("home-fibre-8")).open())
