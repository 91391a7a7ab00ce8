"""Memory of a daemon above its model and inner optimizer, at the peak of its rounds, in fp32 copies of the parameters.

    python -m benchmarks.daemon.memory                  4 daemons, 25 million parameters, int8, 6 rounds
    python -m benchmarks.daemon.memory --tight          as if the machine had no memory for copies of checkpoints

The memory of a model and AdamW (weights, gradients, two moments) is measured in the same process before it becomes a peer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks.support import machine
from benchmarks.support.peer_script import PEERS, environment

RUN = """[run]
name = "memory"
rounds = {rounds}
[model]
layers = {layers}
width = {width}
heads = 8
context = 32
[inner]
batch = 1
[outer]
method = "{method}"
sync_every = 2
[exchange]
codec = "{codec}"
straggler_timeout = 60.0
"""


def main() -> None:
    """Parse the options, run the daemons, print what they used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--codec", default="int8(block=256)")
    parser.add_argument("--method", default="diloco")
    parser.add_argument("--tight", action="store_true", help="no memory is left for copies of checkpoints")
    options = parser.parse_args()
    if options.tight:
        os.environ["TIGHT"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        report = run(options, Path(folder))
    print(f"\n{machine.describe()}\n")
    print("| peer | parameters | base MB | peak MB | above base MB | fp32 copies |\n|---|---|---|---|---|---|")
    worst = 0.0
    for number, one in enumerate(report):
        above, copy = one["peak"] - one["base"], 4 * one["parameters"]
        worst = max(worst, above / copy)
        print(
            f"| {number} | {one['parameters']:,} | {one['base'] / 1e6:.0f} | {one['peak'] / 1e6:.0f} | {above / 1e6:.0f} "
            f"| {above / copy:.2f} |"
        )
    print("\n" + json.dumps({"machine": machine.describe(), "worst": round(worst, 2)}))


def run(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Start one daemon, let the others join, wait for the last round; return the report of each."""
    toml = folder / "run.toml"
    model = {"layers": options.layers, "width": options.width}
    toml.write_text(RUN.format(rounds=options.rounds, method=options.method, codec=options.codec, **model))
    text = folder / "text.txt"
    text.write_text(TEXT)
    common = ["--data", str(text), "--threads", "1", "--log", "json", "--port", "0"]
    first, report = spawn(["start", str(toml), "--wait-for", str(options.peers), *common], folder / "0")
    processes, reports = [first], [report]
    try:
        assert first.stdout is not None
        invite = first.stdout.readline().split()[-1]
        for number in range(1, options.peers):
            process, report = spawn(["join", invite, *common], folder / str(number))
            processes.append(process)
            reports.append(report)
        for process in processes:
            if process.wait(600):
                raise RuntimeError(f"a daemon ended with code {process.returncode}")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return reports


TEXT = "the quick brown fox jumps over the lazy dog. " * 20_000


def spawn(arguments: list[str], home: Path) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start a daemon; return it and what it has reported so far: its memory, and the events of its start and its rounds."""
    process = subprocess.Popen(
        [sys.executable, str(PEERS / "daemon_peer.py"), *arguments, "--home", str(home)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(OMP_NUM_THREADS="1"),
    )
    report: dict[str, Any] = {}

    def listen() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            if isinstance(found, dict) and ({"base", "peak"} & found.keys()):
                report.update(found)
            elif isinstance(found, dict) and found.get("kind") == "round":
                report.setdefault("rounds", []).append(found)
            elif isinstance(found, dict) and found.get("kind") in ("start", "synced", "ready"):
                report[found["kind"]] = found
            elif "error" in line or "Traceback" in line:
                sys.stderr.write(line)

    threading.Thread(target=listen, daemon=True).start()
    return process, report


if __name__ == "__main__":
    main()
