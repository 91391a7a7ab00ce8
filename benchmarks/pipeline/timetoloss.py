"""Time of a replica of four stages to a fixed loss, for each boundary: steps of a real training × seconds of a step.

    python -m benchmarks.pipeline.timetoloss                    # an hour on one core
    python -m benchmarks.pipeline.timetoloss --seeds 1 --steps 200

Seconds of a step are those of benchmarks/pipeline/pipeline.py: virtual time, real frames and codecs, four stages, 100 Mbit/s
each way, 50 ms round trip, a model of width 1024. Steps are those of a byte model on the source of Python's standard library
that is small enough to be trained here, its activations encoded and decoded at every boundary; subspaces are as large a part
of its width. The loss is the held-out one that exact boundaries reach in `--steps`; a boundary that does not reach it in
`--patience` times as many has "inf".
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from thinwire.compression.boundary_codec import Boundary
from thinwire.node.pipeline.model.subspace_model import confine
from thinwire.node.training.batches import Batches, Split, split
from thinwire.node.training.corpus import open_corpus
from thinwire.node.training.inner_loop import Trainer
from thinwire.node.training.inner_optimizer import InnerConfig
from thinwire.node.training.models.tokenizer import load_tokenizer
from thinwire.node.training.models.transformer import ModelConfig, Transformer

from benchmarks.pipeline.crossing import Staged
from benchmarks.pipeline.pipeline import MICROS, STAGES, links
from benchmarks.support import machine

SHARDS, VOCABULARY = 16, 256
PARTS = {"subspace 8x": 8, "subspace 32x": 32}
BOUNDARIES = ("fp32", "bf16", "rows(bits=8)", "tah", *PARTS)


def spec(name: str, width: int) -> str:
    """A boundary for a model of this width."""
    return f"subspace(k={width // PARTS[name]})" if name in PARTS else name


def trained(name: str, data: Split, seed: int, options: argparse.Namespace) -> Trainer:
    """Model, data and optimizer that train through a boundary."""
    size = ModelConfig(VOCABULARY, STAGES, options.width, heads=options.width // 32, context=options.context)
    whole = Transformer(size, seed)
    boundary = Boundary(spec(name, options.width), options.width, VOCABULARY, seed)
    if boundary.confined:
        confine(whole, boundary.confined, seed)
    inner = InnerConfig(lr=options.lr, warmup=options.steps // 20, schedule="constant")
    model = Staged(whole, (1,) * STAGES, boundary)
    return Trainer(model, inner, Batches(data, options.batch, range(SHARDS)), clock=time.perf_counter)


def course(trainer: Trainer, data: Split, target: float, most: int, every: int) -> list[tuple[int, float]]:
    """Steps and the held-out loss, from time to time, until this is the target."""
    found: list[tuple[int, float]] = []
    while not found or (found[-1][1] > target and found[-1][0] < most):
        trainer.run_steps(every)
        found.append((trainer.step, trainer.evaluate(data.evaluation(32, 8))))
    return found


def steps_to(found: list[tuple[int, float]], target: float) -> float:
    """Steps at which the loss was the target, between two measurements; infinite when it never was."""
    before = found[0]
    for at, loss in found:
        if loss <= target:
            part = (before[1] - target) / (before[1] - loss) if before[1] > loss else 1.0
            return before[0] + part * (at - before[0])
        before = at, loss
    return math.inf


def main() -> None:
    """Train through each boundary, print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--patience", type=float, default=5.0)
    parser.add_argument("--every", type=int, default=25, help="steps between two evaluations")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--only", nargs="*", default=list(BOUNDARIES), choices=BOUNDARIES)
    parser.add_argument("--unit", type=float, default=0.025, help="seconds of a forward pass at a stage")
    parser.add_argument("--mbit", type=float, default=100.0, help="of every link, each way")
    parser.add_argument("--cache", type=Path, help="where the tokens are kept [nowhere]")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine.describe(), file=sys.stderr)
    seconds = {row["boundary"]: row for row in links(1024, 256, options.unit, options.mbit * 125_000)}
    counts: dict[str, list[float]] = {}
    with TemporaryDirectory() as folder:
        text = open_corpus(None, load_tokenizer("bytes", Path()), options.cache or Path(folder))
        for seed in range(1, options.seeds + 1):
            data = split(text, options.context, seed, SHARDS, 0.02)
            target = -math.inf
            for name in dict.fromkeys(("fp32", *options.only)):
                most = options.steps if name == "fp32" else round(options.patience * options.steps)
                found = course(trained(name, data, seed, options), data, target, most, options.every)
                if name == "fp32":
                    target = min(loss for _, loss in found)
                counts.setdefault(name, []).append(steps_to(found, target))
                row = {"seed": seed, "boundary": name, "target": target, "steps": counts[name][-1], "last": found[-1]}
                print(json.dumps(row), file=sys.stderr, flush=True)
    print(table(counts, seconds))


def table(counts: dict[str, list[float]], seconds: dict[str, dict[str, Any]]) -> str:
    """Results, one line for each boundary."""
    lines = [
        f"| boundary | tokens/s ({MICROS} micro-batches) | step, s | steps to the loss | seconds to the loss | of exact |",
        "|---|---|---|---|---|---|",
    ]
    exact = seconds["fp32"]["seconds"]
    for name, found in counts.items():
        row = seconds[spec(name, 1024)]
        steps, spent = ", ".join(f"{one:.0f}" for one in found), [one * row["seconds"] for one in found]
        ratio = sum(spent) / sum(one * exact for one in counts["fp32"])
        times = ", ".join(f"{one:.0f}" for one in spent)
        lines.append(f"| {name} | {row['tokens_per_second']} | {row['seconds']} | {steps} | {times} | {ratio:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
