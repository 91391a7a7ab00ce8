"""Examples, run like a user runs them: averages without training, a custom training loop, a service."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from kit.daemons import COMMAND
from thinwire.node.runtime.settings import MEMBER_PORTS, PORT

EXAMPLES = Path(__file__).parents[3] / "examples"
AVERAGE, OWN_LOOP = EXAMPLES / "average.py", EXAMPLES / "own_loop.py"
UNIT = EXAMPLES / "service" / "thinwire.service"


def _run(example):
    """Run an example on a machine with one gate port for all of its processes, as the default port of a user is."""
    bases = range(20_000 + 100 * (os.getpid() % 100), 32_000, 100)
    with closing(socket.socket()) as probe:
        port = next(base for base in bases if probe.connect_ex(("127.0.0.1", base)))
    environment = os.environ | {"THINWIRE_PORT": str(port)}
    return subprocess.run([sys.executable, example], env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.trial
def test_average_example_two_processes_finish_when_third_is_killed():
    done = _run(AVERAGE)
    assert done.returncode == 0, done.stderr
    met = re.findall(r"process (\d): the mean loss of (\d) is (\S+)", done.stdout)
    assert sorted(met) == [("1", "3", "0.20"), ("2", "3", "0.20"), ("3", "3", "0.20")], done.stdout + done.stderr
    big = re.findall(r"process (\d): (\d) were in it, sum (\d+), all equal: True", done.stdout)
    assert {who for who, _, _ in big} == {"1", "2"}, done.stdout + done.stderr
    assert len({(count, total) for _, count, total in big}) == 1 and big[0][1:] in (("2", "6"), ("3", "14"))
    assert done.stdout.endswith("the others ended with 0 and -9\n")


@pytest.mark.trial
def test_own_loop_example_two_processes_learn_digits():
    done = _run(OWN_LOOP)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"process (\d): test accuracy (0\.\d+) after round (\d+), digest (\w{16})", done.stdout)
    assert [one[0] for one in found] == ["1", "2"], done.stdout + done.stderr
    assert all(float(accuracy) > 0.9 for _, accuracy, _, _ in found), done.stdout
    (_, first, *end), (_, second, *other_end) = found
    assert end == other_end and first == second, "both hold the same network"
    assert done.stdout.endswith("the digests agree\n")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "work", "unit"),
    [("trainer", 40, "steps"), ("accelerate_loop", 80, "batches"), ("lightning_loop", 80, "batches")],
)
def test_example_of_a_library_trains_two_processes_as_one_swarm(name, work, unit):
    """Each process makes ten optimizer steps a round, of two batches each, and both have the same model.

    A process that gives up a round, because the machine is busy, makes as many steps again before it tries the next one.
    """
    done = _run(EXAMPLES / "libraries" / f"{name}.py")
    assert done.returncode == 0, done.stderr
    found = re.findall(r"process (\d): loss (\d\.\d+) after round 4, (\d+) (\w+), digest (\w{16})", done.stdout)
    assert [(one[0], one[3]) for one in found] == [("1", unit), ("2", unit)], done.stdout + done.stderr
    assert all(int(one[2]) >= work and int(one[2]) % (work // 4) == 0 for one in found), done.stdout
    assert found[0][1] == found[1][1] and found[0][4] == found[1][4], "both hold the same model"
    assert float(found[0][1]) < 4.2, "less than of a model without training, 5.5"
    assert done.stdout.endswith("the digests agree\n")


def test_own_loop_example_is_short():
    assert len(OWN_LOOP.read_text().splitlines()) < 70


def _unit():
    """Return the settings of the unit: key -> values."""
    found = {}
    for line in UNIT.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_service_unit_runs_and_stops_a_daemon_as_systemd_would(shared_machine):
    """The command, the environment and the signal of the unit; only user and paths are those of the test."""
    unit, machine = _unit(), shared_machine
    peer = machine.daemon("service")
    values = dict(word.split("=", 1) for line in unit["Environment"] for word in line.split())
    assert values.pop("THINWIRE_HOME") == "/var/lib/" + unit["StateDirectory"][0]
    values |= {"COMMAND": "start", "RUN": str(machine.manifest)}
    program, *words = unit["ExecStart"][0].split()
    assert Path(program).name == Path(COMMAND).name
    peer.run(
        *(values[word[1:]] if word.startswith("$") else word for word in words),
        "--data",
        machine.text,
        "--host",
        "127.0.0.1",
    )
    peer.wait("round")
    peer.process.send_signal(signal.Signals[unit["KillSignal"][0]])
    assert peer.exit() == 0 and peer.of("left"), peer.stderr
    peer.run("join", "tw1-aaaa")
    assert str(peer.exit()) in unit["RestartPreventExitStatus"][0].split(), "a wrong invite does not become right"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="this machine has no systemd")
def test_service_unit_is_valid_for_systemd(tmp_path):
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/thinwire/bin/thinwire", COMMAND))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_container_file_names_the_default_ports_and_existing_files():
    """It is not built here: tests need no container runtime."""
    lines = (EXAMPLES / "service" / "Containerfile").read_text().splitlines()
    assert f"EXPOSE {PORT}-{PORT + MEMBER_PORTS}" in lines
    (installs,) = (line for line in lines if line.startswith("RUN pip install"))
    copied = [word.removeprefix("/src/") for word in installs.split() if word.startswith("/src/")]
    assert copied == ["constraints.txt"] and (EXAMPLES.parent / copied[0]).exists()
    home = next(line.split("=", 1)[1] for line in lines if line.startswith("ENV THINWIRE_HOME="))
    assert f"VOLUME {home}" in lines
