"""Seconds and bytes to a fixed held-out loss, 4 peers on emulated home links: synchronous training, torchft's DiLoCo, and ours.

    python -m benchmarks.training.loss --torchft out/torchft       as root; 50 Mbit/s down, 10 up, 60 ms

The demo's text and model, in all programs with the same first weights, batches of every peer, inner optimizer and clipping; the
DiLoCo family with the same H. Time counts from a common start, at which all peers are connected, to the moment at which the
common parameters are at the loss, on a line between the two snapshots around it; of methods whose replicas differ, to
that of the last peer. Snapshots are judged afterwards. Bytes are what a peer's link carried upwards, with all headers.
Synchronous training averages all gradients in every step, with gloo, in one piece. torchft averages in one piece, too.
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
from benchmarks.support.actors import torchft_python
from benchmarks.support.homelinks import HomeLinks
from benchmarks.training import learning
from benchmarks.training.learning import Program, Task

SYNCHRONOUS, TORCHFT = "gloo synchronous", "torchft diloco fp32"


def programs(options: argparse.Namespace) -> dict[str, Program]:
    """Return all programs by name."""
    step = {"outer_lr": options.outer_lr, "outer_momentum": options.outer_momentum}
    made = [
        Program(SYNCHRONOUS, "comparison/gloo_learner.py"),
        Program(
            "diloco-int8",
            "thinwire_learner.py",
            "int8(block=256)",
            f'method = "diloco"\nlr = {options.outer_lr}\nmomentum = {options.outer_momentum}',
        ),
        Program(
            "streaming-int4",
            "thinwire_learner.py",
            "int4(block=256)",
            f'method = "streaming"\nlr = {options.outer_lr}\nmomentum = {options.outer_momentum}\n'
            f"fragments = {options.fragments}\noverlap = {options.overlap}\nlocal_mix = {options.alpha}",
            options.fragments,
        ),
        Program(
            "sparseloco",
            "thinwire_learner.py",
            "topk(k=64,chunk=4096)|2bit|rice",
            'method = "sparseloco"',
        ),
        Program(
            "noloco",
            "thinwire_learner.py",
            "int4(block=256)",
            f'method = "noloco"\nlr = {options.outer_lr}\nmomentum = {options.outer_momentum}\ngamma = {options.outer_lr}',
        ),
    ]
    if options.torchft:
        python = torchft_python(options.torchft)
        made.append(Program(TORCHFT, "comparison/torchft_learner.py", options={"python": python, **step}))
    return {program.name: program for program in made}


def main() -> None:
    """Parse the options, train one program after the other, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--torchft", type=Path, help="virtual environment of torchft; without it only gloo and ours run"
    )
    parser.add_argument("--only", nargs="+", help="programs")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--up", type=float, default=10.0, help="Mbit/s of every peer")
    parser.add_argument("--down", type=float, default=50.0, help="Mbit/s of every peer")
    parser.add_argument("--rtt", type=float, default=60.0, help="ms")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--H", type=int, default=24, help="inner steps between two exchanges")
    parser.add_argument("--outer-lr", type=float, default=0.9)
    parser.add_argument("--outer-momentum", type=float, default=0.6)
    parser.add_argument("--fragments", type=int, default=2)
    parser.add_argument("--overlap", type=int, default=12)
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--loss", type=float, default=2.2, help="nats per byte to be reached")
    parser.add_argument("--windows", type=int, default=40, help="times H steps that are trained")
    parser.add_argument("--steps", type=int, default=250, help="steps of synchronous training")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--samples", type=int, default=512, help="of the held-out text")
    parser.add_argument("--json", type=Path, help="where to write the figures with all losses as well")
    options = parser.parse_args()
    task = Task(
        options.peers, options.layers, options.width, options.context, options.batch, options.lr, 30, options.seed
    )
    known = programs(options)
    rows: list[dict[str, Any]] = []
    with HomeLinks(2, options.up, options.down, options.rtt) as links:
        measured = links.measured()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        cut = learning.prepare(task, max(options.steps, options.windows * options.H), place)
        for turn in range(options.turns):
            for name in options.only or known:
                with HomeLinks(options.peers, options.up, options.down, options.rtt) as links:
                    row = judge(task, cut, known[name], links, place, options)
                rows.append(row)
                shown = {key: value for key, value in row.items() if key not in ("curve", "program")}
                print(f"turn {turn + 1}: {name}: {shown}", file=sys.stderr, flush=True)
    report = {"machine": machine.describe(), "task": vars(task), "links": measured, "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{machine.describe()}; held-out loss {options.loss:g}; links: {measured}\n")
    print(table(rows))


def judge(
    task: Task, cut: Any, program: Program, links: HomeLinks, place: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Train with one program; return the seconds until it reached the loss, and the MB that it had sent by then."""
    synchronous = program.name == SYNCHRONOUS
    run = learning.train(
        task,
        program,
        links,
        place,
        steps=options.steps if synchronous else options.windows * options.H + options.H,
        windows=options.windows,
        every=5 if synchronous else 1,
        H=options.H,
    )
    ranks = range(task.peers) if program.name == "noloco" else [0]
    curves = []
    for rank in ranks:
        found = learning.losses(task, cut, run.snapshots[rank], options.samples)
        moments = [moment - run.began for moment in run.answers[rank]["moments"]]
        curves.append(list(zip(moments, found, strict=True)))
    times = [reached(curve, options.loss) for curve in curves]
    at = None if None in times else max(time for time in times if time is not None)
    before = links.carried_at(run.began)
    sent = links.carried_at(run.began + at) if at is not None else links.carried()
    bytes_up = statistics.mean(after - start for after, start in zip(sent, before, strict=True))
    steps = max(answer["steps"] for answer in run.answers)
    return {
        "program": program.name,
        "seconds": at and round(at, 1),
        "mb": round(bytes_up / 1e6, 2),
        "per_step": round((run.ended - run.began) / steps, 4),
        "steps": steps,
        "last_loss": round(curves[0][-1][1], 3),
        "missing": sum(answer.get("missing", 0) + answer.get("failed", 0) for answer in run.answers),
        "digests": len({answer.get("digest", "") for answer in run.answers}),
        "cpu": round(run.cpu, 1),
        "emulation_cpu": round(run.emulation, 1),
        "foreign": round(run.foreign, 3),
        "curve": curves,
    }


def reached(curve: list[tuple[float, float]], loss: float) -> float | None:
    """Seconds at which a curve is at a loss for the first time; None when it is not."""
    for number, (at, found) in enumerate(curve):
        if found <= loss:
            if number == 0:
                return at
            before, worse = curve[number - 1]
            return before + (at - before) * (worse - loss) / (worse - found)
    return None


def table(rows: list[dict[str, Any]]) -> str:
    """Medians of all turns, in Markdown."""
    seconds: dict[str, list[float]] = {}
    for row in rows:
        seconds.setdefault(row["program"], []).append(row["seconds"] if row["seconds"] is not None else float("inf"))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    lines = [
        "| program | seconds | × synchronous | × torchft | MB up a peer | s a step | steps in all | last loss | foreign CPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, median in medians.items():
        row = next(row for row in rows if row["program"] == name)
        than = [f"{medians[other] / median:.1f}" if other in medians else "" for other in (SYNCHRONOUS, TORCHFT)]
        cells = (name, f"{median:.1f}", *than, row["mb"], f"{row['per_step']:.3f}", row["steps"], row["last_loss"])
        lines.append("| " + " | ".join(map(str, cells)) + f" | {row['foreign']:.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
