"""Faults that a swarm of real daemons survives. All tests share one swarm and refill it as needed."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
import time

import psutil
import pytest
from thinwire.node.peer.status import read_status
from thinwire.node.runtime.directories import directories


class Swarm:
    """Live daemons, the oldest first."""

    def __init__(self, machine):
        self.machine, self.living, self.count = machine, [], 0

    def join(self, *more):
        """Start one more daemon."""
        name = f"peer{self.count}"
        self.count += 1
        if not self.living:
            daemon = self.machine.found(name, *more)
        else:
            daemon = self.machine.join(name, self.living[0].newest_invite(), *more)
        self.living.append(daemon)
        return daemon

    def come_back(self, founder):
        """Start the founder again, with its folder, and wait until it contributes.

        It must not stay away: those whom it has invited may invite others, and these may not.
        """
        self.machine.found(founder.name)
        self.living.insert(0, founder)
        self.go_on(contributors=len(self.living))

    def top_up(self, n):
        """At least n, all of them members, exchanging with each other."""
        while len(self.living) < n:
            self.join()
        for daemon in self.living:
            daemon.wait("ready")
        self.go_on(contributors=len(self.living))
        return list(self.living)

    def go_on(self, **fields):
        """Wait until all live daemons commit the same new round."""
        reached = max(daemon.round for daemon in self.living)
        for daemon in self.living:
            daemon.wait("round", least=reached + 1, **fields)

    def kill(self, *victims):
        for daemon in victims:
            daemon.kill()
        for daemon in victims:
            daemon.exit()
            self.living.remove(daemon)


@pytest.fixture(scope="module")
def life(shared_machine):
    return Swarm(shared_machine)


@pytest.fixture(autouse=True)
def alike(life):
    """Check after every test that the swarm continues with equal replicas."""
    yield
    life.go_on()
    assert life.machine.check() > 0


@pytest.mark.trial
def test_joiner_during_rounds_contributes_soon_and_delays_nobody(life):
    """The joiner contributes soon, and the others' rounds exclude no peer because of it."""
    old = life.top_up(2)
    joiner = life.join()
    ready = joiner.wait("ready")
    assert ready["round"] > 0 and joiner.of("synced")[0]["bytes"] > 0
    for daemon in life.living:
        daemon.wait("round", least=ready["round"] + 1, contributors=3)
    for daemon in old:
        reasons = {reason for event in daemon.of("round") for reason in event["missing"].values()}
        assert reasons <= {"late"}


@pytest.mark.trial
def test_joiner_killed_while_joining_does_not_disturb_swarm(life):
    """The joiner is killed during its first frames, or during the state transfer."""
    old = life.top_up(2)
    victim = life.join()
    old[0].wait("joined", peer=victim.id)
    life.kill(victim)
    life.go_on(contributors=len(old))


def test_daemon_survives_garbage_on_every_port(life):
    """Random bytes, HTTP, and silent connections at the gate and all other ports."""
    daemon = life.top_up(2)[0]
    ports = _listening(daemon.process.pid)
    gate = int(read_status(directories(daemon.home).status).addresses[0].rsplit(":", 1)[1])
    assert gate in ports and len(ports) >= 2
    draw, idle = random.Random(3), []
    for port in ports:
        for said in (
            draw.randbytes(65536),
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\xff" + bytes(8) + b"\x01\x7f",
            b"",
        ):
            visitor = socket.create_connection(("127.0.0.1", port), timeout=10)
            try:
                visitor.sendall(said)
                if said:
                    visitor.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # closed already: all the better
            idle.append(visitor)
    life.go_on(contributors=len(life.living))
    for visitor in idle:
        visitor.settimeout(20)
        try:
            while visitor.recv(65536):
                pass  # ZeroMQ's greeting
        except ConnectionError:
            pass
        visitor.close()
    life.go_on(contributors=len(life.living))
    assert not [event for event in daemon.of("alarm")]


def _listening(pid):
    """Ports on which a process accepts connections."""
    return sorted(c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == "LISTEN")


def test_stopped_peer_catches_up_after_sigcont(life):
    """After SIGSTOP the others continue; after SIGCONT the peer fetches their state and contributes."""
    _stop_for(life, seconds=8.0)


@pytest.mark.soak
def test_peer_stopped_for_a_minute_catches_up(life):
    _stop_for(life, seconds=60.0)


def _stop_for(life, seconds):
    life.top_up(3)
    sleeper = life.living[-1]
    stopped = sleeper.signal(signal.SIGSTOP)
    life.living.remove(sleeper)
    for daemon in life.living:
        daemon.wait("round", after=stopped + 1.0, contributors=2)
    # The duration of the stop is what this test is about.
    while time.monotonic() < stopped + seconds:
        life.go_on(contributors=2)
    reached = life.living[0].round
    woken = sleeper.signal(signal.SIGCONT)
    assert sleeper.wait("round", after=woken, least=reached)["round"] >= reached
    life.living.append(sleeper)
    for daemon in life.living:
        daemon.wait("round", after=woken, contributors=3)


def test_second_daemon_with_same_key_ends_the_older_one_and_both_say_so(life):
    """Event, stderr and status of both; the newer one and the swarm continue."""
    life.top_up(2)
    older = life.join()
    older.wait("ready")
    twin = life.machine.daemon("twin")
    twin.home.mkdir()
    shutil.copy(older.home / "identity.key", twin.home / "identity.key")
    life.living.remove(older)
    life.living.append(life.machine.join("twin", life.living[0].newest_invite()))
    assert older.exit() == 5
    error, hint = older.complaint()
    assert older.id[:8] in error and "--home" in hint
    assert older.of("duplicate", peer=older.id)
    assert "our key is in use" in read_status(directories(older.home).status).alarm
    twin.wait("yielded", peer=older.id)
    twin.wait_for_stderr("the key was copied")
    twin.wait("ready")
    assert twin.id == older.id
    while "the key was copied" not in read_status(directories(twin.home).status).alarm:
        life.go_on()
    life.go_on(contributors=len(life.living))


@pytest.fixture
def small_disk():
    """Mount a small file system at a directory."""
    mounted = []

    def mount(path):
        command = ["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(path)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("a file system can be mounted by root only")
        mounted.append(str(path))

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", path], check=True)


@pytest.mark.trial
def test_full_disk_stops_logs_and_checkpoints_but_not_training(life, small_disk):
    """Training continues without event log and checkpoint, and one message reports it."""
    life.top_up(2)
    home = life.machine.daemon(f"peer{life.count}").home
    home.mkdir()
    small_disk(home)
    cramped = life.join()
    cramped.wait("ready")
    life.living.remove(cramped)
    together = len(life.living) + 1
    cramped.wait_for_stderr("cannot write the log file")
    for _ in range(3):
        life.go_on(contributors=together)
    cramped.signal(signal.SIGTERM)
    assert cramped.exit() == 0
    assert "no checkpoint: No space left on device" in cramped.stderr
    assert cramped.stderr.count("cannot write the log file") == 1 and "Traceback" not in cramped.stderr


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param([signal.SIGTERM], id="term"),
        pytest.param([signal.SIGHUP, signal.SIGHUP], id="terminal closed", marks=pytest.mark.trial),
    ],
)
def test_signal_makes_daemon_save_and_leave(life, numbers):
    life.top_up(3)
    leaver = life.living.pop()
    asked = [leaver.signal(number) for number in numbers][0]
    assert leaver.exit() == 0
    own = leaver.of("left")[-1]
    assert own["round"] == leaver.round
    for daemon in life.living:
        daemon.wait("left", peer=leaver.id, after=asked)
    checkpoints = sorted(next(leaver.home.glob("state/runs/*/checkpoints")).glob("step-*"))
    assert checkpoints[-1].name == f"step-{own['round']:08d}"
    life.go_on(contributors=len(life.living))


def test_survivors_commit_next_round_after_kills(life):
    """kill -9 at random phases of a round, the founder among them; the survivors commit the next round, and it returns."""
    _kill(life, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 12))
def test_survivors_commit_next_round_after_repeated_kills(life, seed):
    _kill(life, seed)


def _kill(life, seed):
    draw = random.Random(seed)
    founder, *others = life.top_up(6)
    first, second = draw.sample(others, 2)
    for victims in ([first], [founder, second]):
        phase = draw.choice(["announce", "open", "record", "vote", "commit"])
        at = victims[0].wait("phase", phase=phase, after=time.monotonic())["at"]
        life.kill(*victims)
        for daemon in life.living:
            found = daemon.wait("round", after=at, contributors=len(life.living))
            assert found["at"] - at < 60
    life.come_back(founder)
