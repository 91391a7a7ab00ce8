"""Effect of skipped stages on a model: perplexity of the whole and of half of it, with and without skipping.

    python -m benchmarks.pipeline.skipping                      # a quarter of an hour on one core
    python -m benchmarks.pipeline.skipping --steps 300 --seeds 1

A byte model on the source of Python's standard library, six stages of one block; the first has embedding and head and is
never skipped. Trained with 33 % skipped, each micro-batch visits four of the six, by plans over even links, new ones every few
steps. "half": the first stage and two of the five others, in order, each such pair as often. The gradient of a stage is divided
by all micro-batches of a step, or by those that went through it. The steps are those of a replica in stages, made here in one
process (tests/swarms/pipelines/test_pipeline.py checks that both are equal).
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from thinwire.node.pipeline.model.section import ModelSection, cut
from thinwire.node.pipeline.model.stage_optimizer import StageOptimizer, clipping
from thinwire.node.pipeline.planner.path_search import search
from thinwire.node.pipeline.planner.problem import Problem
from thinwire.node.training.batches import Batch, Batches, Split, split
from thinwire.node.training.corpus import open_corpus
from thinwire.node.training.inner_optimizer import InnerConfig
from thinwire.node.training.models.tokenizer import load_tokenizer
from thinwire.node.training.models.transformer import ModelConfig, Transformer

from benchmarks.support import machine

STAGES, SHARDS, REPLAN = 6, 16, 10


def plans(length: int, micros: int, seed: int) -> Iterator[list[tuple[int, ...]]]:
    """The stages that each micro-batch of a step visits, step by step."""
    step = 0
    while True:
        if length == STAGES:
            paths: Sequence[Sequence[int]] = [range(STAGES)] * micros
        elif step % REPLAN == 0:
            work, memory = np.ones(STAGES), np.full(STAGES, micros)
            even = 1.0 - np.eye(STAGES)
            stages = tuple((stage,) for stage in range(STAGES))
            instance = Problem("", even, stages, work, memory, length, micros, rounds=1, gap=0.0)
            paths = search(instance, seed=1000 * seed + step, tries=2000, restarts=1).paths
        yield [tuple(path) for path in paths]
        step += 1


def gradient(sections: Sequence[ModelSection], batches: Sequence[Batch], paths: Sequence[Sequence[int]]) -> float:
    """Add up the gradients of micro-batches over their paths; their mean loss."""
    total = 0.0
    for (tokens, targets), path in zip(batches, paths, strict=True):
        loss = through(sections, path, tokens, targets)
        loss.backward()
        total += float(loss.detach())
    return total / len(batches)


def through(
    sections: Sequence[ModelSection], path: Sequence[int], tokens: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """The loss of a micro-batch that visits these stages."""
    x = sections[0].front(tokens)
    for stage in path[1:]:
        x = sections[stage](x)
    return sections[0].loss(x, targets)


def apply(
    updates: Sequence[StageOptimizer],
    step: int,
    paths: Sequence[Sequence[int]],
    tokens: int,
    clip: float,
    by_visits: bool,
) -> None:
    """One inner step of every stage that was visited, as a replica in stages makes it."""
    visits = Counter(stage for path in paths for stage in path)
    divisors = {stage: float(count if by_visits else len(paths)) for stage, count in visits.items()}
    factor = clipping(sum(updates[stage].squares() / divisor**2 for stage, divisor in divisors.items()), clip)
    for stage, divisor in divisors.items():
        updates[stage].apply(step, divisor, factor, tokens * visits[stage])


def train(
    data: Split,
    model: Transformer,
    inner: InnerConfig,
    length: int,
    by_visits: bool,
    *,
    micros: int,
    batch: int,
    seed: int,
) -> list[ModelSection]:
    """The model's sections after `inner.steps` steps."""
    sections = [ModelSection(model, layers, not stage) for stage, layers in enumerate(cut(STAGES, (1,) * STAGES))]
    updates = [StageOptimizer(part.module, inner) for part in sections]
    source = Batches(data, batch, range(SHARDS))
    paths_of_steps = plans(length, micros, seed)
    for step in range(inner.steps):
        paths = next(paths_of_steps)
        batches = [source.next(batch) for _ in range(micros)]
        gradient(sections, batches, paths)
        apply(updates, step, paths, batches[0][0].numel(), inner.clip, by_visits)
    return sections


def perplexities(sections: Sequence[ModelSection], data: Split, count: int = 8) -> tuple[float, float]:
    """Return the perplexity with all stages, and with the first and any two others."""
    halves = [(0, *pair) for pair in combinations(range(1, STAGES), STAGES // 2 - 1)]
    full, half = [], []
    with torch.no_grad():
        for tokens, targets in data.evaluation(32, count):
            full.append(float(through(sections, range(STAGES), tokens, targets)))
            half += [float(through(sections, path, tokens, targets)) for path in halves]
    return math.exp(float(np.mean(full))), math.exp(float(np.mean(half)))


def main() -> None:
    """Train each way and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--micros", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a micro-batch")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--cache", type=Path, help="where the tokens are kept [nowhere]")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine.describe())
    print("| seed | trained with | gradient by | perplexity | of half | half / full |\n|---|---|---|---|---|---|")
    with TemporaryDirectory() as folder:
        text = open_corpus(None, load_tokenizer("bytes", Path()), options.cache or Path(folder))
        for seed in range(1, options.seeds + 1):
            data = split(text, options.context, seed, SHARDS, 0.02)
            for length, by_visits in ((STAGES, False), (4, False), (4, True)):
                model = Transformer(
                    ModelConfig(256, layers=STAGES, width=options.width, heads=4, context=options.context), seed
                )
                inner = InnerConfig(lr=3e-3, warmup=options.steps // 20, schedule="cosine", steps=options.steps)
                sizes = {"micros": options.micros, "batch": options.batch, "seed": seed}
                trained = train(data, model, inner, length, by_visits, **sizes)
                full, half = perplexities(trained, data)
                trained_with = f"{length} of {STAGES} | {'visits' if by_visits else 'all'}"
                print(f"| {seed} | {trained_with} | {full:.3f} | {half:.3f} | {half / full:.3f} |", flush=True)


if __name__ == "__main__":
    main()
