"""Two daemons that train large models: outer step, state transfer, checkpoint and memory, by size and method.

    python -m benchmarks.daemon.largemodels                                  124, 350 and 1,300 million parameters
    python -m benchmarks.daemon.largemodels --only 124M --device cuda

The first daemon trains alone for two rounds, then the second one joins and receives the state, then both train. "sync" is the
median of their rounds, from the last inner step to the new parameters. "state s" counts from the start of the second daemon's
process, so first weights are in it. Copies are the peak of memory above model and inner optimizer, in fp32 copies of the
parameters (`benchmarks.daemon.memory`), of each daemon; "device": of a GPU's memory above the peak of a training step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.daemon.memory import TEXT, spawn
from benchmarks.support import machine

RUN = """[run]
name = "large"
[model]
layers = {layers}
width = {width}
heads = {heads}
context = 128
[inner]
batch = 1
{inner}
[outer]
{outer}
sync_every = 2
[exchange]
codec = "{codec}"
min_peers = 1
straggler_timeout = 900.0
"""

ALONE = 2
"""Rounds of the first daemon before the second one joins, so that there is a state to transfer."""

Daemon: TypeAlias = tuple[subprocess.Popen[str], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One row: sizes of the model, outer method and codec."""

    layers: int
    width: int
    heads: int
    codec: str = "int8(block=256)"
    outer: str = 'method = "diloco"'
    fragments: int = 1
    inner: str = ""


SPARSE = "topk(k=64,chunk=4096)|2bit|rice"
PLAIN = 'optimizer = "sgd"\nlr = 0.1\nbetas = [0, 0]'
"""Without moments two daemons with 1.3 billion parameters need 42 GB, with AdamW 63. Copies do not count the moments anyway."""

CASES = {
    "124M": Case(18, 768, 12),
    "124M-sparse": Case(18, 768, 12, SPARSE, 'method = "sparseloco"'),
    "350M": Case(28, 1024, 16),
    "350M-sparse": Case(28, 1024, 16, SPARSE, 'method = "sparseloco"'),
    "1.3B": Case(26, 2048, 16, outer='method = "streaming"\nfragments = 4', fragments=4, inner=PLAIN),
    "1.3B-sparse": Case(26, 2048, 16, SPARSE, 'method = "sparseloco"', inner=PLAIN),
    "2M": Case(3, 256, 4),
}
"""The models have bytes as tokens, so nearly all of their parameters are in the layers. Dense averages have int8 payloads."""


COLUMNS = ("parameters", "sync s", "sent MB", "state MB", "state s", "host copies", "device copies")


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Run one case; return the figures of its row, in seconds, bytes and copies.

    Raises RuntimeError if a daemon fails, or has no rounds in time.
    """
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        (folder / "run.toml").write_text(RUN.format(**vars(case)))
        (folder / "text.txt").write_text(TEXT)
        common = ["--data", str(folder / "text.txt"), "--log", "json", "--port", "0"]
        common += ["--device", options.device, "--threads", str(options.threads)]
        daemons = [spawn(["start", str(folder / "run.toml"), *common], folder / "0")]
        try:
            (first, alone), *_ = daemons
            assert first.stdout is not None
            invite = first.stdout.readline().split()[-1]
            _wait(daemons, lambda: len(alone.get("rounds", ())) >= ALONE, options.patience)
            daemons.append(spawn(["join", invite, *common], folder / "1"))
            joined = daemons[1][1]
            _wait(daemons, lambda: len(_shared(joined)) >= options.rounds * case.fragments, options.patience)
        finally:
            for process, _ in daemons:
                process.kill()
                process.wait()
    return _row(alone, joined)


def _row(alone: dict[str, Any], joined: dict[str, Any]) -> dict[str, Any]:
    parameters, both = alone["parameters"], _shared(joined)
    before = {after["round"]: one["bytes_up"] for one, after in pairwise(joined["rounds"])}
    row: dict[str, Any] = {
        "parameters": parameters,
        "sync s": round(statistics.median(one["sync_seconds"] for one in both), 3),
        "sent MB": round(statistics.median(one["bytes_up"] - before.get(one["round"], 0) for one in both) / 1e6, 2),
        "state MB": round(joined["synced"]["bytes"] / 1e6),
        "state s": round(joined["synced"]["wall"] - joined["start"]["wall"], 2),
    }
    for name, base, peak in (("host copies", "base", "peak"), ("device copies", "gpu_base", "gpu_peak")):
        row[name] = [round((one.get(peak, 0) - one.get(base, 0)) / (4 * parameters), 2) for one in (alone, joined)]
    return row


def _shared(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rounds with two contributors."""
    return [one for one in report.get("rounds", ()) if one["contributors"] > 1]


def _wait(daemons: list[Daemon], done: Callable[[], bool], patience: float) -> None:
    """Wait until `done`. Raises RuntimeError if a daemon ends with an error before, or after `patience` seconds."""
    end = time.monotonic() + patience
    while not done():
        if any(process.poll() for process, _ in daemons) or time.monotonic() > end:
            raise RuntimeError(f"no figures: exit codes {[process.poll() for process, _ in daemons]}")
        time.sleep(0.05)


def main() -> None:
    """Parse the options, run the cases one after the other, print a table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=[name for name in CASES if name[:2] != "2M"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of both daemons")
    parser.add_argument("--patience", type=float, default=1800.0, help="seconds until a daemon must have ended")
    parser.add_argument("--folder", type=Path, help="where homes and checkpoints are; default: the temporary folder")
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    for name in options.only:
        rows[name] = measure(CASES[name], options)
        print(f"{name}: {json.dumps(rows[name])}", file=sys.stderr, flush=True)
    print(f"\n{machine.describe()}\n")
    print("| | " + " | ".join(COLUMNS) + " |\n|" + "---|" * (len(COLUMNS) + 1))
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(str(row[column]).strip("[]") for column in COLUMNS) + " |")
    print("\n" + json.dumps({"machine": machine.describe(), "rows": rows}))


if __name__ == "__main__":
    main()
