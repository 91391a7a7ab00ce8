"""Seconds of an outer step of DiLoCo between peers on loopback: ours, encrypted, beside torchft's, by turns.

    python -m benchmarks.exchange.outerstep --torchft out/torchft     2 peers, 40 MB

Every peer is a process whose parameters have moved a little. A step begins when all call the inner optimizer, and ends when the
last one has the new parameters: agreement or quorum, pseudo-gradients, their average, vote, outer step. "sync" is what
torchft takes without its quorum: averaging, vote and outer step. torchft gets a virtual environment at the path given.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.exchange import outersteps
from benchmarks.support import machine
from benchmarks.support.actors import Lighthouse, torchft_python

WARM_UP = 3
"""Steps that do not count."""


def main() -> None:
    """Parse the options, step by turns, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--mb", type=float, default=40.0)
    parser.add_argument("--codecs", nargs="+", default=["int8(block=256)", "fp32"])
    parser.add_argument("--turns", type=int, default=11, help="of each program")
    parser.add_argument("--torchft", type=Path, help="virtual environment of torchft; without it only ours runs")
    parser.add_argument("--quiet", type=float, default=5.0, help="seconds to wait before a turn for a quiet machine")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        programs = [
            outersteps.ours(sys.executable, place / str(number), options.mb, codec)
            for number, codec in enumerate(options.codecs)
        ]
        if options.torchft:
            python = torchft_python(options.torchft)
            lighthouse = stack.enter_context(Lighthouse(python))
            programs.append(outersteps.torchft(python, lighthouse, options.mb))
        for program in programs:
            stack.callback(program.close)
            program.open(options.peers)
        rows = compare(programs, options)
    report = {"machine": machine.describe(), "peers": options.peers, "mb": options.mb, "rows": rows}
    print(f"\n{report['machine']}; {options.peers} peers, {options.mb:g} MB\n")
    print(
        "| program | seconds | sync s | CPU s | × torchft | × torchft's sync | foreign CPU |\n|---|---|---|---|---|---|---|"
    )
    for row in rows:
        cells = [row["program"], f"{row['seconds']:.3f}", row["sync"], f"{row['cpu']:.2f}", row["ratio"]]
        print("| " + " | ".join(map(str, [*cells, row["ratio_to_sync"], f"{row['foreign']:.0%}"])) + " |")
    print("\n" + json.dumps(report, indent=1))


def compare(programs: list[outersteps.Steps], options: argparse.Namespace) -> list[dict[str, Any]]:
    """All programs by turns."""
    figures: dict[str, list[tuple[float, float, float, float]]] = {program.name: [] for program in programs}
    pids = machine.family(actor.process.pid for program in programs for actor in program.actors)
    for number in range(WARM_UP + options.turns):
        for program in programs:
            machine.wait_until_quiet(0.1, options.quiet if number >= WARM_UP else 0.0, pids)
            own = machine.family(actor.process.pid for actor in program.actors)
            cpu, load = machine.Load(own), machine.Load(pids)
            moment, answers = program.step()
            spent, foreign = cpu.spent(), load.foreign()
            if number >= WARM_UP and any(answer["contributors"] < options.peers for answer in answers):
                raise RuntimeError(f"{program.name}: a peer is missing from a step: {answers}")
            if number >= WARM_UP:
                seconds = max(answer["end"] for answer in answers) - moment
                sync = max(answer.get("sync", 0.0) for answer in answers)
                figures[program.name].append((seconds, sync, spent, foreign))
                print(f"{number}: {program.name:16} {seconds:.4f} s, foreign {foreign:.0%}", file=sys.stderr)
    medians = {name: [statistics.median(each) for each in zip(*found, strict=True)] for name, found in figures.items()}
    theirs = medians.get("torchft fp32")
    return [
        {
            "program": name,
            "seconds": round(seconds, 4),
            "sync": round(sync, 4) or "",
            "cpu": round(spent, 3),
            "foreign": round(foreign, 3),
            "ratio": round(seconds / theirs[0], 2) if theirs else "",
            "ratio_to_sync": round(seconds / theirs[1], 2) if theirs else "",
            "all_seconds": [round(each[0], 4) for each in figures[name]],
        }
        for name, (seconds, sync, spent, foreign) in medians.items()
    ]


if __name__ == "__main__":
    main()
