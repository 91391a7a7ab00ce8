"""`start --local`: the launcher and its whole swarm, as in `make demo` but smaller."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from thinwire.node.peer.status import read_status
from thinwire.node.runtime.directories import directories

# Through parent_watch, so that no process outlives this one.
COMMAND = [sys.executable, "-P", "-m", "thinwire.node.cli.child_main"]
SOME_ROUNDS = re.compile(r"round ([3-9]|\d\d+) ")
"""The display shows only the newest round, so any round may be missing from it."""

MARK = "LAUNCHED_FOR"
"""Environment variable of a launcher and of its processes."""

CAP = 200.0
"""Seconds after which a test that hangs ends."""

# This seed kills the founder. There are enough rounds for the joiner to arrive before the end.
MANIFEST = """
[run]
name = "small"
seed = 2
rounds = {rounds}
[model]
layers = 1
width = 32
heads = 2
context = 64
[inner]
batch = 4
[outer]
sync_every = 60
lr = 0.9
momentum = 0.6
[exchange]
straggler_timeout = 5.0
"""


class Launcher:
    """`thinwire start --local`, with all its files in one directory."""

    def __init__(self, path: Path) -> None:
        self.path, self.home = path, path / "home"
        self.text = path / "text.txt"
        draw = random.Random(0)
        self.text.write_text(" ".join(draw.choice(["lorem", "ipsum", "dolor", "sit", "amet"]) for _ in range(40_000)))
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, *arguments: object, rounds: int) -> None:
        file = self.path / "run.toml"
        file.write_text(MANIFEST.format(rounds=rounds))
        told = ["start", file, "--home", self.home, "--data", self.text, *arguments]
        with open(self.path / "stdout", "wb") as out, open(self.path / "stderr", "wb") as errors:
            self.process = subprocess.Popen(
                [*COMMAND, *map(str, told)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, MARK: str(self.path)},
            )

    def said(self, stream: str) -> str:
        return (self.path / stream).read_text()

    def peers(self) -> list[Path]:
        """Homes of its peers so far."""
        return sorted((self.home / "state" / "local").glob("*/peer-*"))

    def wait(self, what: str, true) -> None:
        until = time.monotonic() + CAP
        while not true():
            assert self.process.poll() is None, f"ended before {what}\n{self.said('stderr')}"
            assert time.monotonic() < until, f"never: {what}\n{self.said('stderr')}"
            time.sleep(0.05)

    def processes(self) -> list[int]:
        """Return the running processes that have inherited our environment, except the launcher."""
        found = []
        for process in psutil.process_iter(["pid", "environ"]):
            if (process.info["environ"] or {}).get(MARK) == str(self.path) and process.pid != self.process.pid:
                found.append(process.pid)
        return found

    def left(self) -> list[int]:
        """Return the processes that do not end within a moment after the launcher."""
        until = time.monotonic() + 30
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.05)
        return left

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def launcher(tmp_path):
    made = Launcher(tmp_path)
    yield made
    made.end()
    assert made.left() == []


def test_local_demo_with_kill_and_late_peer_prints_every_figure(launcher):
    """Three peers, of which the founder is killed (with this seed), and a late joiner; all figures are printed."""
    launcher.run("--local", 3, "--chaos", "--log", "json", rounds=60)
    assert launcher.process.wait(CAP) == 0, launcher.said("stderr")
    assert launcher.left() == []
    verdict = json.loads(launcher.said("stdout"))
    assert verdict["faults"] == [] and verdict["rounds"] == 60 and verdict["steps"] == 3600

    proof = verdict["proof"]
    assert proof["rounds"] == 60 and proof["digests"] > 2 * 60 and proof["round"] == 60 and proof["live"] == 3
    assert proof["differences"] == [] and len(proof["final"]) == 64

    kill, late = verdict["kill"], verdict["newcomer"]
    assert kill["name"] == "peer 1" and kill["recovery"]["round"] == kill["round"] + 1 and kill["recovery"]["first"] > 0
    assert late["name"] == "peer 4" and 0 < late["synced"] < late["first"] <= 60

    # Five words are soon learned, while held-out text is never trained on.
    assert verdict["after"] < verdict["before"] - 2.0 and verdict["alone_after"] < verdict["before"] - 2.0
    assert verdict["alone"] == "peer 2"
    assert [one["name"] for one in verdict["sent"]] == ["peer 1", "peer 2", "peer 3", "peer 4"]
    assert all(one["bytes"] > 10_000 and one["factor"] > 10 for one in verdict["sent"])
    assert verdict["sent"][0]["bytes"] < verdict["sent"][1]["bytes"]

    assert Path(verdict["picture"]).read_bytes()[:4] == b"\x89PNG"
    checkpoint = Path(verdict["checkpoint"])
    assert checkpoint.name == "step-00000060" and (checkpoint / "manifest.json").exists()
    assert json.loads((checkpoint / "manifest.json").read_bytes())["body"]["digest"] == proof["final"]
    assert any(word in verdict["sample"] for word in ("lorem", "ipsum", "dolor", "amet"))

    homes = launcher.peers()
    assert len({(home / "identity.key").read_bytes() for home in homes}) == 4
    lines = [json.loads(line)["message"] for line in launcher.said("stderr").splitlines()]
    assert any(line.startswith("kill -9 of peer 1 after round") for line in lines)
    assert any("round 60 of 60" in line for line in lines)


@pytest.mark.trial
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_interrupted_local_swarm_saves_and_prints_summary(launcher, number):
    """The first Ctrl-C, or the end of the terminal, lets every peer leave and save; a summary is printed."""
    launcher.run("--local", 2, "--log", "plain", rounds=0)
    launcher.wait("some rounds", lambda: SOME_ROUNDS.search(launcher.said("stderr")))
    launcher.process.send_signal(number)
    assert launcher.process.wait(CAP) == 128 + number, launcher.said("stderr")
    assert launcher.left() == []
    screen = launcher.said("stdout")
    assert "bytes sent      peer 1" in screen and "error:" not in launcher.said("stderr")
    for home in launcher.peers():
        assert read_status(directories(home).status).phase == "done"
        assert list(home.glob("state/runs/*/checkpoints/step-*/manifest.json"))


@pytest.mark.trial
def test_peers_end_when_launcher_is_killed(launcher):
    launcher.run("--local", 2, "--log", "plain", rounds=0)
    launcher.wait(
        "two peers", lambda: len([home for home in launcher.peers() if (home / "state" / "status.json").exists()]) == 2
    )
    assert len(launcher.processes()) >= 2
    launcher.process.kill()
    launcher.process.wait()
    assert launcher.left() == []


@pytest.mark.trial
def test_failed_peer_is_named_with_its_log(launcher):
    launcher.text.write_text("too short")
    launcher.run("--local", 2, "--log", "plain", rounds=10)
    assert launcher.process.wait(CAP) == 1
    error, hint = launcher.said("stderr").splitlines()[-2:]
    assert error.startswith("error: peer 1 ended with code 2: ") and "too few" in error
    assert hint.startswith("hint: ") and Path(hint.rpartition("see ")[2]).exists()
    assert launcher.left() == []
