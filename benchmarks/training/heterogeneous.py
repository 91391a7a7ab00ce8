"""Perplexity of a swarm with weak peers that compress their activations, beside a swarm of full replicas.

    python -m benchmarks.training.heterogeneous                 # an hour on one core
    python -m benchmarks.training.heterogeneous --rounds 20 --seeds 1 --only "one group: subspace 8x"

A byte model on the source of Python's standard library, trained by four replicas, each with its own shards, in outer rounds
of one fragment at a time (a layer each; plain averages, the best outer step on this toy). Some of the replicas are groups that
hold the model in stages of a layer each: what crosses between these is encoded and decoded as between peers. All make equally
many steps of equally many tokens. "wrong start": the pseudo-gradient of a group is taken from the agreed parameters, as
though the projection were its work. The figure is the held-out loss (nats per byte) of the whole model at the end.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from thinwire.compression.boundary_codec import Boundary
from thinwire.compression.core.types import Floats
from thinwire.node.pipeline.model.whole_model_view import WholeModelView
from thinwire.node.state.fragments import stages_of
from thinwire.node.state.layout import Layout, layout_of
from thinwire.node.training.inner_loop import Trainer
from thinwire.node.training.inner_optimizer import InnerConfig

from benchmarks.pipeline.crossing import Staged
from benchmarks.support import machine
from benchmarks.training.toy import Toy, text


class Full:
    """A replica that holds the whole model."""

    def __init__(self, toy: Toy, peer: bytes) -> None:
        self.module = toy.model()
        self.layout = layout_of(self.module)
        self.trainer = self.train(toy, peer)

    def train(self, toy: Toy, peer: bytes) -> Trainer:
        """Return its trainer, here with boundaries that lose nothing."""
        return self._trainer(toy, peer, Boundary("fp32", toy.width, 256, toy.seed))

    def _trainer(self, toy: Toy, peer: bytes, boundary: Boundary) -> Trainer:
        staged = Staged(self.module, (1,) * toy.layers, boundary)
        return Trainer(staged, toy.config(), toy.batches(peer), clock=time.perf_counter)

    def read(self, start: int, stop: int, out: Floats) -> None:
        self.layout.read(self.module, out, start)

    def write(self, theta: Floats, start: int) -> None:
        self.layout.write(self.module, theta, start)


class Coded(Full):
    """A group whose boundaries lose something of a model that is not confined."""

    def __init__(self, spec: str, toy: Toy, peer: bytes) -> None:
        self._spec = spec
        super().__init__(toy, peer)

    def train(self, toy: Toy, peer: bytes) -> Trainer:
        return self._trainer(toy, peer, Boundary(self._spec, toy.width, 256, toy.seed))


class Projected(Full):
    """A group that trains a projection of the model."""

    kind = WholeModelView

    def __init__(self, part: int, toy: Toy, peer: bytes) -> None:
        self._k = toy.width // part
        super().__init__(toy, peer)

    def train(self, toy: Toy, peer: bytes) -> Trainer:
        self._boundary = Boundary(f"subspace(k={self._k})", toy.width, 256, toy.seed)
        self._projection = self.kind(self.module, self.layout, self._k, toy.seed)
        self._freeze()
        return self._trainer(toy, peer, self._boundary)

    def read(self, start: int, stop: int, out: Floats) -> None:
        self._projection.read(start, stop, out)

    def write(self, theta: Floats, start: int) -> None:
        self._projection.write(theta, start)
        self._freeze()

    def _freeze(self) -> None:
        self._boundary.freeze(self._projection.frozen.rows(256, self.module.config.width))


class Naive(WholeModelView):
    """View that treats the part that the projection removes as if training had removed it."""

    def write(self, theta: Floats, start: int = 0, keep: float = 0.0) -> None:
        super().write(theta, start, keep)
        for lift in self._lifts.values():
            lift.whole = lift.projected


class Wrong(Projected):
    """A group with the wrong start."""

    kind = Naive


RUNS: Mapping[str, tuple[str, ...]] = {
    "all full": ("full",) * 4,
    "one group: int8 rows": ("full",) * 3 + ("rows(bits=8)",),
    "one group: TAH int4": ("full",) * 3 + ("tah",),
    "one group: subspace 8x": ("full",) * 3 + ("8",),
    "one group: subspace 32x": ("full",) * 3 + ("32",),
    "one group: 8x, wrong start": ("full",) * 3 + ("-8",),
    "two groups: subspace 8x": ("full",) * 2 + ("8",) * 2,
    "two groups: 8x, wrong start": ("full",) * 2 + ("-8",) * 2,
    "four groups: subspace 8x": ("8",) * 4,
    "three full, no weak peers": ("full",) * 3,
    "two full, no weak peers": ("full",) * 2,
}
"""Name -> kind of each replica: "full", a boundary codec, or the factor of a subspace, negative with the wrong start."""


def replica(kind: str, toy: Toy, peer: bytes) -> Full:
    """Return a replica of a kind of RUNS."""
    if kind == "full":
        return Full(toy, peer)
    if kind.lstrip("-").isdigit():
        return Wrong(-int(kind), toy, peer) if kind.startswith("-") else Projected(int(kind), toy, peer)
    return Coded(kind, toy, peer)


def train(toy: Toy, kinds: tuple[str, ...]) -> float:
    """The held-out loss after the toy's rounds, each of all fragments in turn."""
    replicas = [replica(kind, toy, peer) for kind, peer in zip(kinds, toy.peers, strict=False)]
    judge = Full(toy, toy.peers[0])
    layout: Layout = judge.layout
    theta = np.empty(layout.total, np.float32)
    layout.read(judge.module, theta)
    for one in replicas:
        one.write(theta, 0)
    for _ in range(toy.rounds):
        for part in stages_of(layout, toy.layers):
            for one in replicas:
                one.trainer.run_steps(toy.steps // toy.layers)
            for start, stop in part.spans:
                found = np.empty((len(replicas), stop - start), np.float32)
                for one, out in zip(replicas, found, strict=True):
                    one.read(start, stop, out)
                theta[start:stop] = found.mean(axis=0)
                for one in replicas:
                    one.write(theta[start:stop], start)
    judge.write(theta, 0)
    return toy.loss(judge.trainer)


def main() -> None:
    """Train each swarm, print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--cache", type=Path, help="where the tokens are kept [nowhere]")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine.describe(), file=sys.stderr)
    print("| swarm | loss, each seed | perplexity / that of all full |\n|---|---|---|")
    usual: list[float] = []
    with TemporaryDirectory() as folder:
        for name in dict.fromkeys(("all full", *options.only)):
            losses = []
            for seed in range(1, options.seeds + 1):
                inner = InnerConfig(lr=4e-3, warmup=30, schedule="cosine")
                sizes = {"layers": options.stages, "width": options.width, "batch": options.batch}
                toy = Toy(text(options.cache or Path(folder), seed), seed, options.rounds, 12, inner, **sizes)
                losses.append(train(toy, RUNS[name]))
                print(f"{name}, seed {seed}: {losses[-1]:.3f}", file=sys.stderr, flush=True)
            usual = usual or losses
            ratios = ", ".join(f"{math.exp(one - full):.3f}" for one, full in zip(losses, usual, strict=True))
            print(f"| {name} | {', '.join(f'{one:.3f}' for one in losses)} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
