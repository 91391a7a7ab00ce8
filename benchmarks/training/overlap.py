"""Tokens per second of training with streaming exchanges on emulated home links, in parts of those of training alone, by turns.

    python -m benchmarks.training.overlap            as root; 4 peers, 50 Mbit/s down, 10 up, 60 ms

Alone, the same four processes train side by side on the same machine and never exchange. Four peers share its cores, and the
emulation takes some of them, too; so a step lasts at least `--pace` seconds, as it would on a machine of one's own, and what
is measured is how long training waits for the network.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.support import machine
from benchmarks.support.homelinks import HomeLinks
from benchmarks.training import learning
from benchmarks.training.learning import Program, Task

ALONE = "alone"


def main() -> None:
    """Parse the options, train by turns, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--up", type=float, default=10.0, help="Mbit/s of every peer")
    parser.add_argument("--down", type=float, default=50.0, help="Mbit/s of every peer")
    parser.add_argument("--rtt", type=float, default=60.0, help="ms")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--pace", type=float, default=0.08, help="seconds that a step takes at least")
    parser.add_argument("--H", type=int, default=30)
    parser.add_argument("--fragments", type=int, default=2)
    parser.add_argument("--overlap", type=int, nargs="+", default=[10, 0], help="inner steps while a part is under way")
    parser.add_argument("--codec", default="int4(block=256)")
    parser.add_argument("--windows", type=int, default=8, help="times H steps of each run")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    task = Task(
        options.peers, options.layers, options.width, options.context, options.batch, 3e-3, 30, 7, pace=options.pace
    )
    known = [Program(ALONE, "thinwire_learner.py")]
    for overlap in options.overlap:
        alpha = 0.5 if overlap else 0.0
        outer = f'method = "streaming"\nfragments = {options.fragments}\noverlap = {overlap}\nlocal_mix = {alpha}'
        known.append(Program(f"overlap {overlap}", "thinwire_learner.py", options.codec, outer, part=options.fragments))
    rows: dict[str, list[dict[str, Any]]] = {program.name: [] for program in known}
    steps = options.windows * options.H
    with HomeLinks(2, options.up, options.down, options.rtt) as links:
        measured = links.measured()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        learning.prepare(task, steps, place)
        for turn in range(options.turns):
            for program in known:
                with HomeLinks(options.peers, options.up, options.down, options.rtt) as links:
                    run = learning.train(
                        task, program, links, place, steps=steps, windows=options.windows, every=0, H=options.H
                    )
                made = min(answer["steps"] for answer in run.answers)
                seconds = run.ended - run.began
                row = {
                    "tokens": made * task.peers * task.batch * task.context / seconds,
                    "step": seconds / made,
                    "waited": statistics.mean(answer["waited"] for answer in run.answers) / seconds,
                    "missing": sum(answer["missing"] for answer in run.answers),
                    "cpu": run.cpu / seconds,
                    "emulation": run.emulation / seconds,
                    "foreign": run.foreign,
                }
                rows[program.name].append(row)
                shown = {key: round(value, 4) for key, value in row.items()}
                print(f"turn {turn + 1}: {program.name}: {shown}", file=sys.stderr, flush=True)
    medians = {
        name: {key: statistics.median(row[key] for row in found) for key in found[0]} for name, found in rows.items()
    }
    print(f"\n{machine.describe()}; links: {measured}\n")
    print("| training | tokens/s | of alone | seconds a step | cores of peers | cores of the links | foreign CPU |")
    print("|---|---|---|---|---|---|---|")
    for name, row in medians.items():
        part = row["tokens"] / medians[ALONE]["tokens"]
        print(
            f"| {name} | {row['tokens']:.0f} | {part:.1%} | {row['step']:.4f} | {row['cpu']:.2f} | {row['emulation']:.2f} "
            f"| {row['foreign']:.0%} |"
        )
    print("\n" + json.dumps({"machine": machine.describe(), "links": measured, "medians": medians}, indent=1))


if __name__ == "__main__":
    main()
