"""Several programs that do the same thing, run by turns in one session: processes, turns, CPU, memory, foreign load."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support import machine
from benchmarks.support.peer_script import PEERS, environment

HIVEMIND = ["torch==2.13.0", "numpy<2.4", "scipy", "hivemind==1.1.12"]
"""Packages of hivemind's environment. With numpy 2.4 its 8-bit codec fails."""

HEADSTART = 0.05
"""Seconds between the request to begin and the beginning, so that all processes begin together."""


@dataclass
class Turn:
    """One repetition: seconds from the common start to the last end, CPU seconds of all, share of the machine others used.

    loop: CPU seconds of the event loop's thread of a peer, mean of all; 0 if the program does not report them.
    """

    seconds: float
    cpu: float
    foreign: float
    loop: float
    answers: list[dict[str, Any]] = field(repr=False)


class Contestant:
    """The processes of one program. They report `ready`, begin at the moment `at` that they are sent, and answer its `end`.

    `prepares`: before that they are asked to prepare, and answer. `checks`: afterwards they are asked about the result.
    """

    def __init__(
        self, name: str, commands: list[list[str]], *, peers: int, prepares: bool = False, checks: bool = False
    ) -> None:
        self.name, self.peers, self.turns = name, peers, list[Turn]()
        self._prepares, self._checks = prepares, checks
        self.helpers: list[int] = []
        """Processes whose work is neither the program's nor foreign."""
        self.base: list[int] = []
        self.extra = 0.0
        self.processes = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(OMP_NUM_THREADS="1")
            )
            for command in commands
        ]

    def say(self, **fields: Any) -> None:
        """Send a line to all processes."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(fields) + "\n")
            process.stdin.flush()

    def receive(self) -> list[dict[str, Any]]:
        """The next line of every process. Raises RuntimeError when one has ended."""
        received = []
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{self.name}: a process ended with code {process.wait()}")
            received.append(json.loads(line))
        return received

    def turn(self, *, counts: bool = True) -> Turn:
        """One repetition; those that do not count warm up."""
        if self._prepares:
            self.say(prepare=True)
            self.receive()
        pids = machine.family(process.pid for process in self.processes)
        if not self.base:
            self.base = [machine.memory(pid).resident for pid in pids]
        for pid in pids:
            machine.forget_peak(pid)
        moment = time.monotonic() + HEADSTART
        time.sleep(HEADSTART / 2)
        busy, cpu, helped = machine.busy(), machine.cpu_seconds(pids), machine.cpu_seconds(self.helpers)
        self.say(at=moment)
        answers = self.receive()
        seconds = max(answer["end"] for answer in answers) - moment
        loop = statistics.fmean(answer.get("loop", 0.0) for answer in answers)
        spent = machine.cpu_seconds(pids) - cpu
        other = machine.busy() - busy - spent - (machine.cpu_seconds(self.helpers) - helped)
        foreign = max(0.0, other) / ((time.monotonic() - moment) * (os.cpu_count() or 1))
        if self._checks:
            self.say(check=True)
            answers = self.receive()
        made = Turn(seconds, spent, foreign, loop, answers)
        peaks = [machine.memory(pid).peak for pid in pids]
        self.extra = max(self.extra, sum(max(0, p - b) for p, b in zip(peaks, self.base, strict=False)) / self.peers)
        self.peak = sum(peaks) / self.peers
        if counts:
            self.turns.append(made)
        return made

    def median(self, value: Callable[[Turn], float]) -> float:
        """Median over the turns that count."""
        return statistics.median(value(turn) for turn in self.turns)

    def close(self) -> None:
        """End all processes."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def gloo(
    peers: int,
    mb: float,
    port: int,
    *,
    store: str = "127.0.0.1",
    prefix: Callable[[int], Sequence[str]] = lambda rank: (),
) -> Contestant:
    """torch's gloo, fp32. `store`: address of rank 0; peers in namespaces use their only device."""
    own: dict[str, Any] = dict(peers=peers, mb=mb, port=port, store=store)
    commands = [[*prefix(rank), *_command("comparison/gloo_peer.py", rank=rank, **own)] for rank in range(peers)]
    return Contestant("gloo fp32", commands, peers=peers)


def thinwire(
    peers: int,
    mb: float,
    codec: str,
    own: Callable[[int], dict[str, Any]] = lambda rank: {},
    *,
    topology: str = "butterfly",
    shared: bool = False,
    prefix: Callable[[int], Sequence[str]] = lambda rank: (),
) -> Contestant:
    """Ours, over TCP or through shared memory (`shared`).

    `own` gives each rank further options of thinwire_peer.py, `prefix` the words before its command.
    """
    same: dict[str, Any] = dict(peers=peers, mb=mb, codec=codec, topology=topology, shared=shared)
    commands = [[*prefix(rank), *_command("thinwire_peer.py", rank=rank, **same, **own(rank))] for rank in range(peers)]
    prefix_of_name = "" if topology == "butterfly" else f"{topology} "
    end = " shared" if shared else ""
    made = Contestant(f"thinwire {prefix_of_name}{codec.partition('(')[0]}{end}", commands, peers=peers, checks=True)
    made.say(addresses=[answer["address"] for answer in made.receive()])
    return made


def hivemind(
    python: str,
    peers: int,
    mb: float,
    codec: str,
    host: Callable[[int], str] = lambda rank: "127.0.0.1",
    prefix: Callable[[int], Sequence[str]] = lambda rank: (),
) -> Contestant:
    """hivemind with the interpreter of `hivemind_python`. `host`: address of a rank, `prefix`: words before its command."""
    same: dict[str, Any] = dict(python=python, peers=peers, mb=mb, codec=codec)
    commands = [
        [*prefix(rank), *_command("comparison/hivemind_peer.py", rank=rank, host=host(rank), **same)]
        for rank in range(peers)
    ]
    made = Contestant(f"hivemind {codec}", commands, peers=peers, prepares=True)
    made.say(addresses=[answer["address"] for answer in made.receive()])
    return made


def pccl(
    python: str,
    peers: int,
    mb: float,
    codec: str,
    port: int,
    master: str = "127.0.0.1",
    prefix: Callable[[int], Sequence[str]] = lambda rank: (),
) -> Contestant:
    """PCCL with the interpreter of `pccl_python` and "fp32" or "uint8". `master`: address of rank 0, which runs the master."""
    same: dict[str, Any] = dict(python=python, peers=peers, mb=mb, codec=codec, master=f"{master}:{port}")
    commands = [[*prefix(rank), *_command("comparison/pccl_peer.py", rank=rank, **same)] for rank in range(peers)]
    return Contestant(f"pccl {codec}", commands, peers=peers, checks=True)


def pccl_python(folder: Path) -> str:
    """Return the interpreter of a virtual environment into which PCCL was built.

    Raises SystemExit if PCCL is not there. It cannot be installed here, because no package index has it.
    """
    python = folder / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-c", "import pccl"], stdout=subprocess.DEVNULL).returncode:
        raise SystemExit(f"error: {folder} has no PCCL\nhint: build it from its source (docs/benchmarks.md)")
    return str(python)


def hivemind_python(folder: Path) -> str:
    """Return the interpreter of hivemind's own virtual environment, which is made if there is none."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *HIVEMIND], check=True)
    return str(python)


def _command(script: str, *, python: str = sys.executable, **options: Any) -> list[str]:
    return [python, str(PEERS / script), json.dumps(options)]
