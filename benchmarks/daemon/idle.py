"""Cost of thinwire when nothing happens: CPU of a daemon that waits, and seconds of `thinwire --help`.

    python -m benchmarks.daemon.idle      a minute

A daemon founds a run and waits for a third peer that never comes; the second one, a member of the swarm, is in the middle of
very many inner steps. The CPU of the first is measured, probes, heartbeats and its status file included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.support import machine

RUN = """[run]
name = "idle"
[model]
layers = 1
width = 32
heads = 2
context = 32
[outer]
sync_every = 100000
"""
THINWIRE = str(Path(sys.executable).with_name("thinwire"))


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the idle daemon is watched")
    parser.add_argument("--turns", type=int, default=7, help="of `thinwire --help`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = idle(Path(folder), options.seconds)
    report |= help_seconds(options.turns) | {"machine": machine.describe()}
    print(f"\n{report['machine']}\n")
    print("| what | figure |\n|---|---|")
    print(f"| CPU of a waiting daemon in a swarm of {report['peers']} | {report['idle_share']:.2%} of a core |")
    print(f"| its resident memory | {report['resident_mb']} MB |")
    print(f"| thinwire --help | {report['help_seconds']} s ({report['help_cpu_seconds']} s of CPU) |")
    print(f"| foreign CPU meanwhile | {report['foreign']:.0%} |")
    print("\n" + json.dumps(report))


def idle(folder: Path, seconds: float) -> dict[str, Any]:
    """CPU share of a daemon that waits."""
    toml, text = folder / "run.toml", folder / "text.txt"
    toml.write_text(RUN)
    text.write_text("the quick brown fox jumps over the lazy dog. " * 2000)
    common = ["--data", str(text), "--threads", "1", "--log", "json", "--port", "0"]
    waiting = spawn("start", str(toml), "--wait-for", "3", *common, "--home", str(folder / "a"))
    processes = [waiting]
    try:
        assert waiting.stdout is not None
        invite = waiting.stdout.readline().split()[-1]
        other = spawn("join", invite, *common, "--home", str(folder / "b"))
        processes.append(other)
        os.setpriority(os.PRIO_PROCESS, other.pid, 19)
        state: dict[str, Any] = {}
        end = time.monotonic() + 60
        while state.get("phase") != "waiting" or not state.get("peers"):
            if time.monotonic() > end:
                raise RuntimeError(f"no swarm of two came about: {state}")
            time.sleep(0.5)
            state = status(folder / "a")
        time.sleep(2)
        own = machine.family([waiting.pid])
        busy, cpu, both = machine.busy(), machine.cpu_seconds(own), machine.cpu_seconds([other.pid])
        time.sleep(seconds)
        spent = machine.cpu_seconds(own) - cpu
        elsewhere = machine.busy() - busy - spent - (machine.cpu_seconds([other.pid]) - both)
        if status(folder / "a").get("phase") != "waiting":
            raise RuntimeError("the daemon did not wait long enough")
        return {
            "peers": 1 + len(state["peers"]),
            "idle_share": round(spent / seconds, 5),
            "resident_mb": round(machine.memory(waiting.pid).resident / 1e6),
            "foreign": round(max(0.0, elsewhere) / seconds / (os.cpu_count() or 1), 3),
        }
    finally:
        for process in processes:
            process.kill()
            process.wait()


def spawn(*arguments: str) -> subprocess.Popen[str]:
    """A daemon."""
    return subprocess.Popen([THINWIRE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def status(home: Path) -> dict[str, Any]:
    """Return the status of the daemon of a home."""
    done = subprocess.run([THINWIRE, "status", "--json", "--home", str(home)], capture_output=True, text=True)
    try:
        found: dict[str, Any] = json.loads(done.stdout)["status"] or {}
    except ValueError:
        return {}
    return found


def help_seconds(turns: int) -> dict[str, float]:
    """Median seconds of `thinwire --help`, and of its CPU."""
    seconds, cpu = [], []
    for _ in range(turns):
        before, began = os.times(), time.perf_counter()
        subprocess.run([THINWIRE, "--help"], stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - began)
        after = os.times()
        cpu.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return {
        "help_seconds": round(statistics.median(seconds), 3),
        "help_cpu_seconds": round(statistics.median(cpu), 3),
    }


if __name__ == "__main__":
    main()
