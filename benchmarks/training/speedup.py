"""Speed-up of 2, 4 and 8 peers over one at equal loss, by outer method, with all models in lockstep on one GPU.

    python -m benchmarks.training.speedup [--device cuda] [--seconds 240] [--peers 2 4 8] [--seeds 3] [--json FILE]

A byte language model learns the source of Python's standard library and of installed packages. Each peer has its own part
of the text; all have the same batch, the same number of inner steps and the same inner optimizer. The inner learning rate is
the best of a grid for one peer alone (AdamW, and Muon for muloco), and is constant after the warm-up, so that a run can end
at any step. Outer methods have the defaults of the manifest, apart from the common number H of inner steps between
exchanges, and a DiLoCo that takes the plain average. Codecs, rules, replicas and rounds are those of the product; only the
network, members and votes are left out.

The speed-up at a loss is the inner steps that one peer alone needs to reach it, divided by those that each of N peers needs:
the gain in time if exchanges took none. The losses are those that one peer alone with the same inner optimizer reaches after
50, 75 and 100 % of the steps; a curve reaches a loss when its lowest value so far does, linearly interpolated. "synchronous"
is data parallelism: a step on the mean gradient of all peers. With a constant rate an average over peers also lowers the
noise of the parameters, which one peer alone could lower by a decay of the rate.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from thinwire.node.training.batches import split
from thinwire.node.training.corpus import Corpus, open_corpus
from thinwire.node.training.inner_optimizer import InnerConfig
from thinwire.node.training.models.tokenizer import load_tokenizer
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.manifest.parser import parse

from benchmarks.training.curves import ALONE, ALONE_MUON, TOGETHER, Result, cut, table
from benchmarks.training.lockstep import Clock, Pairs, Plain, Rounds, Training, evaluate, play
from benchmarks.training.stacked import Lane, StackedTrainers
from benchmarks.training.toy import SHARDS, Toy

METHODS = {
    "diloco": 'method = "diloco"',
    "diloco lr 1, mom. 0": 'method = "diloco"\nlr = 1.0\nmomentum = 0.0\nnesterov = false',
    "sparseloco": 'method = "sparseloco"',
    "noloco": 'method = "noloco"',
    "streaming": 'method = "streaming"\noverlap = 0\nlocal_mix = 0.0',
    "streaming overlap 1": 'method = "streaming"\noverlap = 1',
    "muloco": 'method = "muloco"',
}
"""Name -> keys of [outer] besides sync_every."""

HELD_OUT = 128
"""Sequences of an evaluation."""


@dataclass(frozen=True)
class Setting:
    """Sizes of model, batch and round that all trainings share."""

    layers: int
    width: int
    context: int
    batch: int
    steps: int
    """Inner steps between two exchanges."""

    def manifest(self, outer: str) -> Manifest:
        """Return the manifest of a method with its defaults."""
        model = f"[model]\nlayers = {self.layers}\nwidth = {self.width}\ncontext = {self.context}\n"
        return parse(f"{model}[inner]\nbatch = {self.batch}\n[outer]\n{outer}\nsync_every = {self.steps}\n")

    def toy(self, corpus: Corpus, seed: int, peers: int) -> Toy:
        """Return model and data of a training."""
        return Toy(
            split(corpus, self.context, seed, SHARDS),
            seed,
            steps=self.steps,
            peers=[bytes([index]) * 32 for index in range(peers)],
            layers=self.layers,
            width=self.width,
            batch=self.batch,
        )


def gathered(target: Path, limit: int) -> None:
    """Write source files of the standard library and of installed packages to `target`, at most `limit` bytes."""
    roots = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    seen = set[Path]()
    with target.open("wb") as stream:
        for file in (file for root in roots for file in sources(root)):
            if file.resolve() in seen:
                continue
            seen.add(file.resolve())
            content = file.read_bytes()
            if stream.tell() + len(content) > limit:
                return
            stream.write(content + b"\n")


def sources(root: Path) -> Iterator[Path]:
    """Yield the Python files under a folder in a fixed order, those of installed packages in its subfolders not."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in ("site-packages", "dist-packages", "__pycache__"))
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


@dataclass(frozen=True)
class Job:
    """Everything that a process needs to train: options, file of the text, and when it began (seconds since the epoch)."""

    options: argparse.Namespace
    text: Path
    began: float

    @property
    def setting(self) -> Setting:
        """Sizes."""
        options = self.options
        return Setting(options.layers, options.width, options.context, options.batch, options.pace)

    @property
    def bf16(self) -> bool:
        """True if matrix products are in bfloat16."""
        return self.options.precision == "bf16" or (not self.options.precision and self.options.device != "cpu")

    def corpus(self) -> Corpus:
        """Return the text as bytes."""
        return open_corpus(self.text, load_tokenizer("bytes", Path()), self.text.parent)

    def inner(self, stack: int, rate: float) -> InnerConfig:
        """Return the inner optimizer of the stack of AdamW (0) or of Muon (1), with the manifest's defaults but the rate."""
        inner = self.setting.manifest(METHODS["muloco" if stack else "diloco"]).inner
        warmup = min(inner.warmup, self.options.steps // 4)
        return InnerConfig(inner.optimizer, rate, warmup=warmup, momentum=inner.momentum, adam_lr=inner.adam_lr)

    def stack(self, lanes: Sequence[Lane], config: InnerConfig) -> StackedTrainers:
        """Return models on the device."""
        if self.options.device != "cpu":
            torch.set_num_threads(1)
        return StackedTrainers(lanes, config, self.options.device, torch.bfloat16 if self.bf16 else None)

    def say(self, message: str) -> None:
        """Print progress."""
        print(f"{time.time() - self.began:6.1f} s  {message}", file=sys.stderr, flush=True)


def held_out(toy: Toy) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of an evaluation, [HELD_OUT, context] each."""
    inputs, targets = zip(*toy.split.evaluation(HELD_OUT, 1), strict=True)
    return torch.cat(inputs), torch.cat(targets)


def tune(job: Job, stack: int, rate: float) -> float:
    """Return the mean loss of one peer alone with a rate, over the seeds."""
    corpus, pace = job.corpus(), job.options.pace
    toys = [job.setting.toy(corpus, seed, 1) for seed in range(job.options.seeds)]
    trainers = job.stack([Lane(toy, toy.peers[0]) for toy in toys], job.inner(stack, rate))
    for _ in range(0, job.options.tune_steps, pace):
        trainers.run_steps(pace)
    loss = float(np.mean(trainers.evaluate(trainers.vectors(range(len(toys))), [held_out(toy) for toy in toys])))
    job.say(f"{trainers.config.optimizer} with rate {rate:g}: loss {loss:.4f} after {trainers.step} steps")
    return loss


def best(losses: dict[float, float]) -> float:
    """Return the rate with the lowest finite loss, the first one if there is none."""
    return min(losses, key=lambda rate: losses[rate] if math.isfinite(losses[rate]) else math.inf)


def compete(job: Job, seeds: Sequence[int], rates: Sequence[float]) -> tuple[list[Result], dict[str, float]]:
    """Train all methods with some seeds; return the results, and the seconds that inner and outer steps took."""
    options, corpus = job.options, job.corpus()
    trainings, lanes = planned(job.setting, corpus, options.peers, seeds, options.methods)
    samples = {one.toy.seed: held_out(one.toy) for one in trainings if one.name == ALONE}
    stacks = [job.stack(places, job.inner(stack, rates[stack])) for stack, places in enumerate(lanes) if places]
    for one in stacks if options.compile else ():
        job.say(f"seeds {seeds}: {one.compile().splitlines()[:1] or 'compiled'}")
    clock, each, last = Clock(stacks), options.pace * options.evaluate_every, [time.time()]
    job.say(f"seeds {seeds}: {sum(map(len, lanes))} models of {stacks[0].layout.total} parameters")

    def look() -> bool:
        evaluate(clock, trainings, samples)
        now = time.time()
        took, last[0] = now - last[0], now
        loss = trainings[0].curve[-1][1]
        job.say(f"seeds {seeds}, step {clock.step}: {1e3 * took / each:.1f} ms a step, loss {loss:.3f}")
        return bool(clock.step < options.steps and now - job.began + 1.5 * took < options.seconds)

    # All seeds share the processors.
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 1) * len(seeds) // options.seeds)) as pool:

        async def work(function: Callable[[], Any]) -> Any:
            return await asyncio.get_running_loop().run_in_executor(pool, function)

        try:
            asyncio.run(play(clock, trainings, look, each, work))
        except Exception:
            if not trainings[0].curve:
                raise
            job.say(traceback.format_exc())  # the curves so far are valid
    return [Result(one.name, len(one.lanes), one.toy.seed, one.curve, one.failure) for one in trainings], clock.seconds


def planned(
    setting: Setting, corpus: Corpus, peers: Sequence[int], seeds: Sequence[int], names: Sequence[str]
) -> tuple[list[Training], list[list[Lane]]]:
    """Return all trainings, and the lanes of the stacks of AdamW and of Muon. Lanes of a method are neighbours."""
    lanes: list[list[Lane]] = [[], []]
    trainings: list[Training] = []
    toys = {(seed, count): setting.toy(corpus, seed, count) for seed in seeds for count in (1, *peers)}

    def add(toy: Toy, stack: int, make: Callable[[int, int], Training], together: str = "") -> None:
        trainings.append(make(stack, len(lanes[stack])))
        lanes[stack] += [Lane(toy, peer, together) for peer in toy.peers]

    for stack, name in enumerate((ALONE, ALONE_MUON)):
        if stack == 0 or "muloco" in names:
            for seed in seeds:
                toy = toys[seed, 1]
                add(toy, stack, lambda stack, first, name=name, toy=toy: Plain(name, toy, stack, first))  # type: ignore[misc]
    for name in (TOGETHER, *names):
        for seed in seeds:
            for count in peers:
                toy = toys[seed, count]
                if name == TOGETHER:
                    add(toy, 0, lambda stack, first, toy=toy: Plain(TOGETHER, toy, stack, first), f"{seed} {count}")  # type: ignore[misc]
                    continue
                manifest = setting.manifest(METHODS[name])
                kind = Pairs if manifest.outer.gossip else Rounds
                add(
                    toy,
                    int(manifest.inner.optimizer == "muon"),
                    lambda stack, first, name=name, toy=toy, kind=kind, manifest=manifest: kind(  # type: ignore[misc]
                        name, toy, stack, first, manifest
                    ),
                )
    return trainings, lanes


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="of matrix products; bf16 on a GPU")
    parser.add_argument("--compile", action="store_true", help="compile the model; needs a compiler, and a minute")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences of each peer's inner step")
    parser.add_argument("--steps", type=int, default=6000, help="most inner steps of each peer")
    parser.add_argument("--H", type=int, default=30, dest="pace", help="inner steps between exchanges")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3], help="of AdamW, for one peer alone"
    )
    parser.add_argument("--muon-rates", type=float, nargs="+", default=[3e-3, 6e-3, 1e-2, 2e-2])
    parser.add_argument("--tune-steps", type=int, default=600, help="inner steps with each rate")
    parser.add_argument("--evaluate-every", type=int, default=1, help="rounds")
    parser.add_argument("--megabytes", type=float, default=64.0, help="most text")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end all trainings at the same step by then")
    parser.add_argument("--processes", type=int, default=0, help="0: one on a CPU, six on a GPU")
    parser.add_argument("--json", type=Path)
    return parser


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    seeds, workers = list(range(options.seeds)), options.processes or (1 if options.device == "cpu" else 6)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        job = Job(options, Path(folder, "corpus.txt"), time.time())
        gathered(job.text, int(options.megabytes * 1e6))
        digest = hashlib.sha256(job.text.read_bytes()).hexdigest()
        job.say(f"text: {job.corpus().tokens} bytes, sha256 {digest}")
        each: Callable[..., Iterator[Any]] = map
        if workers > 1:
            # A process for each seed: the outer steps of one run beside the inner steps of the others.
            each = stack.enter_context(ProcessPoolExecutor(workers, get_context("spawn"))).map
        grids: list[dict[float, float]] = [dict.fromkeys(options.rates, 0.0), dict.fromkeys(options.muon_rates, 0.0)]
        asked = [(kind, rate) for kind, grid in enumerate(grids) for rate in grid if len(grid) > 1]
        asked = [(kind, rate) for kind, rate in asked if not kind or "muloco" in options.methods]
        for (kind, rate), loss in zip(asked, each(partial(_tune, job), asked), strict=True):
            grids[kind][rate] = loss
        rates = [best(grid) for grid in grids]
        for rate, grid in zip(rates, grids, strict=True):
            if len(grid) > 1 and rate in (min(grid), max(grid)) and any(grid.values()):
                job.say(f"the best rate, {rate}, is at the edge of its grid: the figures are not tuned")
        parts = [[seed] for seed in seeds] if workers > 1 else [seeds]
        found: list[tuple[list[Result], dict[str, float]]] = list(each(partial(_compete, job, rates), parts))
    results = cut([one for part, _ in found for one in part])
    steps, step_tokens = max(one.curve[-1][0] for one in results if one.curve), options.batch * options.context
    tokens = steps * step_tokens * sum(one.peers for one in results)
    about = {name: value for name, value in vars(options).items() if name != "json"} | {
        "text": digest,
        "precision": "bf16" if job.bf16 else "fp32",
        "grids": grids,
        "rates": rates,
        "steps": steps,
        "tokens": tokens,
        "seconds of each process": [seconds for _, seconds in found],
        "torch": torch.__version__,
    }
    if options.json:
        options.json.write_text(json.dumps({"about": about, "results": [asdict(one) for one in results]}) + "\n")
    print(json.dumps(about))
    print(
        f"{steps} inner steps of {step_tokens} tokens, H = {options.pace}, {options.seeds} seeds, "
        f"{tokens / 1e6:.0f} M tokens in all, rates {rates}"
    )
    print(table(results, step_tokens))
    return 0


def _tune(job: Job, asked: tuple[int, float]) -> float:
    return tune(job, *asked)


def _compete(job: Job, rates: Sequence[float], seeds: Sequence[int]) -> tuple[list[Result], dict[str, float]]:
    return compete(job, seeds, rates)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
