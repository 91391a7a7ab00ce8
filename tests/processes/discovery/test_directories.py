"""Runs that are found without an invite: on the local network with mDNS, and in a hivemind DHT of several processes.

The DHT needs an interpreter with hivemind: this one, or that of the variable HIVEMIND_PYTHON.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import kit
import psutil
import pytest

PROGRAMS = Path(*kit.__path__) / "programs"
HIVEMIND = os.environ.get("HIVEMIND_PYTHON", "") or (sys.executable if find_spec("hivemind") else "")
NODES = 8


def listed(daemon, *flags, name="", cap=60.0):
    """Return the listing of `thinwire runs` once it has a run, or one called `name`: then without all others."""
    until = time.monotonic() + cap
    while True:
        done = daemon.command("runs", "--json", *flags)
        every = json.loads(done.stdout or '{"directory": []}')["directory"]
        found = [run for run in every if name in ("", run["name"])]
        if found or time.monotonic() > until:
            return found, done.stderr


def admit_all(here):
    """Let the manifest admit peers without an invite."""
    here.manifest.write_text(here.manifest.read_text() + '\n[admission]\nmode = "open"\ntrial_rounds = 0\n')


def polluted(garbage):
    """Return what the program that stores garbage prints."""
    command = [HIVEMIND, PROGRAMS / "dht_garbage.py"]
    done = subprocess.run(command, input=json.dumps(garbage), capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("done\n"), done.stderr[-2000:]
    return done.stdout


def dht_node(*bootstrap, **environment):
    """Return a node of the DHT, with its address as `said`."""
    command, pipes = (
        [HIVEMIND, PROGRAMS / "dht_node.py", *bootstrap],
        {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE},
    )
    node = subprocess.Popen(command, **pipes, text=True, env=os.environ | environment, start_new_session=True)
    node.said = node.stdout.readline().strip()
    assert node.said.startswith("/ip4/")
    return node


@pytest.mark.skipif(find_spec("zeroconf") is None, reason="zeroconf is not installed: pip install 'thinwire[lan]'")
def test_run_is_found_and_joined_on_the_local_network(machine, monkeypatch):
    monkeypatch.setenv("THINWIRE_HOST", "127.0.0.1")
    here = machine()
    admit_all(here)
    name = f"e2e-{os.getpid()}"  # Other swarms on this machine answer, too.
    here.manifest.write_text(here.manifest.read_text().replace('"e2e"', f'"{name}"'))
    founder = here.found("founder", "--lan")
    founder.wait("published")
    other = here.daemon("other")
    runs, errors = listed(other, "--lan", name=name)
    if not runs:
        pytest.skip(f"no multicast on the loopback interface here: {errors[-200:]}")
    (run,) = runs
    assert run["run_id"] == founder.of("start")[0]["run"]
    assert (run["model"], run["method"], run["publishers"]) == ("transformer-1x32", "diloco", 1)
    here.join("other", name, "--lan").wait("ready")
    founder.wait("round", contributors=2)
    assert here.daemon("stranger").command("join", "absent", "--lan", "--search", "0").returncode == 4


@pytest.mark.trial
@pytest.mark.skipif(not HIVEMIND, reason="no interpreter with hivemind: set HIVEMIND_PYTHON")
def test_run_is_found_in_a_dht_full_of_garbage(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("THINWIRE_DIRECTORY_PYTHON", HIVEMIND)
    monkeypatch.setenv("THINWIRE_HOST", "127.0.0.1")
    nodes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(NODES):
            nodes.append(dht_node(*([nodes[0].said] if nodes else [])))
        monkeypatch.setenv("THINWIRE_BOOTSTRAP", nodes[0].said)
        here = machine()
        admit_all(here)
        founder = here.found("founder", "--public")
        founder.wait("published")
        run_id = founder.of("start")[0]["run"]
        assert [run["run_id"] for run in listed(here.daemon("looker"))[0]] == [run_id]

        # A stranger stores garbage under both keys at all nodes; nested values kill what deserializes them.
        from kit.planted.cards import card
        from thinwire.node.discovery.dht_source import CARDS_KEY, run_key

        now, run = int(time.time()), bytes.fromhex(run_id)
        bad = {
            "other run": card(1, run=b"o" * 32, issued=now - 4000).wire,
            "expired": card(2, run=run, issued=now - 4000).wire,
            "signature": card(3, run=run, issued=now).wire[:-1] + b"\0",
            "future": card(4, run=run, issued=now + 4000).wire,
        }
        garbage = {
            "keys": [CARDS_KEY, run_key(run)],
            "values": {name: wire.hex() for name, wire in bad.items()},
            "bootstrap": nodes[0].said,
        }
        assert "nested types [True]" in polluted(garbage)
        looked, errors = listed(here.daemon("looker"))
        assert [run["run_id"] for run in looked] == [run_id], errors
        assert looked[0]["publishers"] == 1
        here.join("other", run_id[:16])
        founder.wait("round", contributors=2)
        here.join("third", "e2e")
        founder.wait("round", contributors=3)

        # A nested subkey ends the founder's DHT process; another one publishes the next card.
        (first,) = founder.of("directory")
        polluted({**garbage, "keys": [], "victim": first["addresses"][0]})
        second = founder.wait("directory", after=first["at"])
        assert second["addresses"] != first["addresses"]
        founder.wait("round", least=founder.round + 2)
    finally:
        for node in nodes:
            node.stdin.close()
        for node in nodes:
            node.wait(30)


@pytest.mark.trial
@pytest.mark.skipif(not HIVEMIND, reason="no interpreter with hivemind: set HIVEMIND_PYTHON")
def test_run_is_listed_again_when_the_bootstrap_node_or_the_daemon_of_libp2p_was_killed(machine, monkeypatch, tmp_path):
    """The only bootstrap node comes back with its address; then a process below the one of our DHT node is killed."""
    monkeypatch.setenv("THINWIRE_DIRECTORY_PYTHON", HIVEMIND)
    monkeypatch.setenv("THINWIRE_HOST", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"DHT_NODE_KEY": str(tmp_path / "key"), "DHT_NODE_PORT": str(free.getsockname()[1])}
    node = dht_node(**place)
    address = node.said
    monkeypatch.setenv("THINWIRE_BOOTSTRAP", address)
    try:
        here = machine()
        admit_all(here)
        founder = here.found("founder", "--public")
        founder.wait("published")
        here.join("other", "e2e", "--public").wait("published")  # A neighbour, at which cards can be stored.
        run_id = founder.of("start")[0]["run"]

        killed = time.monotonic()
        os.killpg(node.pid, signal.SIGKILL)
        lost = founder.wait("directory", after=killed, detail="unreachable")
        node = dht_node(**place)
        assert node.said == address
        back = founder.wait("directory", after=lost["at"], detail="reachable again")
        assert [run["run_id"] for run in listed(here.daemon("looker"))[0]] == [run_id]

        (first,) = founder.of("directory", detail="DHT node")
        processes = psutil.Process(founder.process.pid).children(recursive=True)
        (libp2p,) = (process for process in processes if process.name() == "p2pd")
        libp2p.kill()
        failed = founder.wait("directory", after=back["at"], detail="unreachable")
        second = founder.wait("directory", after=failed["at"], detail="DHT node")
        assert second["addresses"] != first["addresses"]
        founder.wait("directory", after=second["at"], detail="reachable again")
    finally:
        os.killpg(node.pid, signal.SIGKILL)
