"""Cost of watching a peer: CPU of its reports, of `thinwire page` and `top`, and of the daemon while both are attached.

    python -m benchmarks.daemon.monitoring

Two daemons train, and the first one writes TensorBoard's files if that is installed. Beside the first one run `thinwire
page`, with a client that reads its event stream as a browser does and another one that reads `/metrics` every five seconds
as Prometheus does, and `thinwire top` on a terminal of 100 x 40. In every other turn all of them are stopped (SIGSTOP), so
that the daemon's CPU per round is measured with and without them. CPU time is measured, which a busy machine changes less
than wall time.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import os
import pty
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from thinwire.node.peer.status import read_status
from thinwire.node.runtime.directories import directories

from benchmarks.support import machine

RUN = """[run]
name = "watched"
[model]
layers = 2
width = 64
heads = 2
context = 64
[inner]
batch = 8
[outer]
sync_every = 10
"""
THINWIRE = str(Path(sys.executable).with_name("thinwire"))
SCRAPE_SECONDS = 5.0
WARM_UP = 10.0
"""Seconds before the first turn, in which the viewers read the history and the daemon compiles its kernels."""


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="of a turn")
    parser.add_argument("--turns", type=int, default=6, help="with the viewers, and as many without them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        report = measured(Path(folder), stack, options.seconds, options.turns) | {"machine": machine.describe()}
    print(f"\n{report['machine']}; the daemon had {report['daemon_of_a_core']:.0%} of a core\n")
    print("| what | share of the daemon's CPU | share of a core |\n|---|---|---|")
    for name, what in {
        "reports": "status and event log of the daemon" + (", TensorBoard" if tools() else ""),
        "page": f"`thinwire page`, its event stream read, its metrics read every {SCRAPE_SECONDS:g} s",
        "top": "`thinwire top`",
    }.items():
        print(f"| {what} | {report[name]:.2%} | {report[f'{name}_of_a_core']:.2%} |")
    print(
        f"CPU of the daemon per round, with viewers against without: {report['daemon']:+.2%} "
        f"({report['least']:+.2%} to {report['most']:+.2%}, median of {options.turns} pairs of turns)"
    )
    print("\n" + json.dumps(report))


def measured(folder: Path, stack: ExitStack, seconds: float, turns: int) -> dict[str, Any]:
    """Shares of the viewers' CPU, and of what they add to that of the daemon."""
    toml, text, home = folder / "run.toml", folder / "text.txt", folder / "a"
    toml.write_text(RUN)
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20_000)
    common = ["--data", str(text), "--threads", "1", "--log", "json", "--port", "0", "--host", "127.0.0.1"]
    timed = folder / "reports"
    program = [sys.executable, "-m", "benchmarks.daemon.timed_reports", str(timed)]
    daemon = spawned(stack, "start", str(toml), *common, "--home", str(home), *tools(), program=program)
    assert daemon.stdout is not None
    invite = daemon.stdout.readline().split()[-1]
    spawned(stack, "join", invite, *common, "--home", str(folder / "b"))
    page = spawned(stack, "page", "--port", "0", "--home", str(home))
    assert page.stdout is not None
    url = page.stdout.readline().strip()
    top = on_terminal(stack, "top", "--home", str(home))
    threading.Thread(target=read_stream, args=(url + "api/v1/events",), daemon=True).start()
    threading.Thread(target=scrape, args=(url + "metrics",), daemon=True).start()
    while rounds(home) < 5:
        time.sleep(0.5)
    time.sleep(WARM_UP)
    per_round: dict[bool, list[float]] = {True: [], False: []}
    spent = {"daemon": 0.0, "page": 0.0, "top": 0.0, "reports": 0.0}
    for turn in range(2 * turns):
        watched = turn % 4 in (0, 3)  # both come first equally often, so a drift of the machine cancels out
        for viewer in (page, top):
            viewer.send_signal(signal.SIGCONT if watched else signal.SIGSTOP)
        time.sleep(1.0)
        before, began = [*cpu(daemon, page, top), float(timed.read_text())], rounds(home)
        time.sleep(seconds)
        after, ended = [*cpu(daemon, page, top), float(timed.read_text())], rounds(home)
        used = [late - early for early, late in zip(before, after, strict=True)]
        per_round[watched].append(used[0] / max(1, ended - began))
        if watched:
            spent = {name: spent[name] + one for name, one in zip(spent, used, strict=True)}
    for viewer in (page, top):
        viewer.send_signal(signal.SIGCONT)
    more = [with_them / without - 1 for with_them, without in zip(per_round[True], per_round[False], strict=True)]
    wall = turns * seconds
    return {
        **{f"{name}_of_a_core": round(one / wall, 5) for name, one in spent.items()},
        **{name: round(spent[name] / spent["daemon"], 5) for name in ("reports", "page", "top")},
        "daemon": round(statistics.median(more), 5),
        "least": round(min(more), 5),
        "most": round(max(more), 5),
        "daemon_seconds": round(spent["daemon"], 2),
        "rounds": rounds(home),
    }


def tools() -> list[str]:
    """Return the options for the tools of others that are installed."""
    return ["--monitor", "tensorboard"] if importlib.util.find_spec("tensorboard") else []


def cpu(*processes: subprocess.Popen[Any]) -> list[float]:
    """CPU seconds of each."""
    return [machine.cpu_seconds([process.pid]) for process in processes]


def rounds(home: Path) -> int:
    """Return the newest round of the daemon of a home."""
    status = read_status(directories(home).status)
    return 0 if status is None else status.round


def spawned(stack: ExitStack, *arguments: str, program: Sequence[str] = (THINWIRE,)) -> subprocess.Popen[str]:
    """Start a command of thinwire that ends with the stack."""
    process = subprocess.Popen([*program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def on_terminal(stack: ExitStack, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a command on a terminal whose output is thrown away."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen([THINWIRE, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)

    def drain() -> None:
        try:
            while os.read(ours, 65536):
                pass
        except OSError:
            pass  # the command has ended

    threading.Thread(target=drain, daemon=True).start()
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def read_stream(url: str) -> None:
    """Read server-sent events until the server ends."""
    try:
        with urllib.request.urlopen(url) as stream:
            for _ in stream:
                pass
    except OSError:
        pass


def scrape(url: str) -> None:
    """Read metrics again and again; a stopped server answers late."""
    while True:
        try:
            with urllib.request.urlopen(url) as answer:
                answer.read()
        except OSError:
            return
        time.sleep(SCRAPE_SECONDS)


if __name__ == "__main__":
    main()
