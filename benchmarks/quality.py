"""What a codec or an outer method costs in loss: a byte language model of some 100,000 parameters, trained every way we have.

    python benchmarks/quality.py [--seeds 2] [--rounds 100] [--replicas 4] [--lr 4e-3] [--schedule cosine]
                                 [--only NAME ...] [--json FILE]

Four replicas (or --replicas) in one process, each with its own shards of the standard library's source; codecs, rules, inner
and outer optimizers are those of the product, only the network is left out. What is measured is the held-out loss (nats per
byte) of the outer parameters at the end; where replicas differ, the mean of theirs. Everything follows from the seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from thinwire.collectives.aggregate import RULES
from thinwire.collectives.halves import halves
from thinwire.collectives.pairing import others
from thinwire.collectives.shards import grid
from thinwire.collectives.sieve import parts
from thinwire.compression import demo, registry, sparsemean
from thinwire.compression.chunks import Chunks
from thinwire.compression.codec import Floats
from thinwire.compression.feedback import ErrorFeedback
from thinwire.compression.kernels import outer_step
from thinwire.compression.lowrank import LowRank, PowerSGD
from thinwire.compression.portions import Portions
from thinwire.compression.portions import layout as runs
from thinwire.compression.sparse import Sparse
from thinwire.node.co2 import Co2Replica
from thinwire.node.corpus import open_corpus
from thinwire.node.data import Batch, Batches, Split, shards_of, split
from thinwire.node.eager import EagerRounds
from thinwire.node.fragments import Layout, layout_of
from thinwire.node.inner import InnerConfig, learning_rate
from thinwire.node.methods import METHODS, WIDE
from thinwire.node.model import ModelConfig, Transformer
from thinwire.node.outer import Read, Write
from thinwire.node.paired import PairedReplica, Pull
from thinwire.node.power import steps_by_power
from thinwire.node.sparse import chunks_of
from thinwire.node.tokenizer import load_tokenizer
from thinwire.node.trainer import Trainer
from thinwire.sims.table import Table
from thinwire.swarm.manifest import parse

PEERS = [bytes([index]) * 32 for index in range(4)]
SHARDS = 256


@dataclass(frozen=True)
class Toy:
    """What is trained, and for how long: `rounds` of `steps` inner steps on each replica, of `batch` sequences."""

    split: Split
    seed: int
    rounds: int = 100
    steps: int = 10
    inner: InnerConfig = field(default_factory=lambda: InnerConfig(lr=4e-3, warmup=50, schedule="cosine"))
    peers: Sequence[bytes] = tuple(PEERS)
    layers: int = 2
    width: int = 64
    batch: int = 8

    def model(self) -> Transformer:
        """The same first parameters on every replica."""
        size = ModelConfig(256, self.layers, self.width, heads=self.width // 16, context=self.split.context)
        return Transformer(size, self.seed)

    def config(self, **changes: object) -> InnerConfig:
        """The inner optimizer, its schedule over all steps."""
        return replace(self.inner, steps=self.rounds * self.steps, **changes)  # type: ignore[arg-type]

    def trainers(self, config: InnerConfig | None = None) -> list[Trainer]:
        """One for each replica."""
        config = config or self.config()
        return [Trainer(self.model(), config, self.batches(peer), clock=time.perf_counter) for peer in self.peers]

    def batches(self, peer: bytes) -> Batches:
        """A replica's own share of the text."""
        return Batches(self.split, self.batch, shards_of(self.seed, SHARDS, self.peers, peer))

    def loss(self, trainer: Trainer) -> float:
        """Held-out loss, nats per byte."""
        return trainer.evaluate(self.split.evaluation(64, 32))


class Step(Protocol):
    """An outer step: from what the replicas have trained to the next common parameters, in place."""

    def __call__(self, theta: Floats, deltas: Sequence[Floats], round: int) -> None: ...


Make = Callable[[Toy, Layout], Step]


class Mixed:
    """The batches of all replicas in turn: one step on as many as there are is a step of data parallelism."""

    def __init__(self, sources: Sequence[Batches]) -> None:
        self._sources, self._at, self.batch = sources, 0, sources[0].batch

    def next(self, size: int = 0) -> Batch:
        """Of whose turn it is."""
        self._at += 1
        return self._sources[(self._at - 1) % len(self._sources)].next(size)


def synchronous(toy: Toy) -> float:
    """Data parallelism: every inner step on the gradients of all."""
    mixed = Mixed([toy.batches(peer) for peer in toy.peers])
    trainer = Trainer(toy.model(), toy.config(accumulate=len(toy.peers)), mixed, clock=time.perf_counter)  # type: ignore[arg-type]
    trainer.run_steps(toy.rounds * toy.steps)
    return toy.loss(trainer)


def apart(toy: Toy) -> float:
    """Nothing is ever averaged: what one replica makes of its own share, the mean of all."""
    trainers = toy.trainers()
    for trainer in trainers:
        trainer.run_steps(toy.rounds * toy.steps)
    return float(np.mean([toy.loss(trainer) for trainer in trainers]))


def paired(
    gamma: float,
    lr: float = 0.7,
    momentum: float = 0.5,
    group: int = 2,
    seen: Callable[[int, Sequence[PairedReplica]], None] = lambda number, replicas: None,
) -> Callable[[Toy], float]:
    """NoLoCo: in every round each replica averages with one partner, or some, drawn as the product draws them. `seen` is called
    after each.
    """

    def run(toy: Toy) -> float:
        trainers, view, how = toy.trainers(), sorted(toy.peers), halves("fp32", lr=lr, gamma=gamma)
        layout = layout_of(trainers[0].model)
        cut, theta = grid(layout.total, how), np.empty(layout.total, np.float32)
        layout.read(trainers[0].model, theta)
        replicas = [PairedReplica(layout.digest, theta, ()) for _ in trainers]

        def read(trainer: Trainer) -> Read:
            return lambda start, stop, out: layout.read(trainer.model, out, start)

        for number in range(toy.rounds):
            for trainer in trainers:
                trainer.run_steps(toy.steps)
            sent = [list(one.offer(read(t), cut, how)) for one, t in zip(replicas, trainers, strict=True)]
            for index, (one, trainer) in enumerate(zip(replicas, trainers, strict=True)):
                drawn = others(bytes(32), number, view, toy.peers[index], group)
                came, place = [sent[toy.peers.index(peer)] for peer in drawn], sum(p < toy.peers[index] for p in drawn)
                pull = Pull(momentum, lr, gamma)
                one.step(read(trainer), sent[index], came, cut, how, members=(), pull=pull, place=place)
                layout.write(trainer.model, one.theta)
            seen(number, replicas)
        return float(np.mean([toy.loss(trainer) for trainer in trainers]))

    return run


def train(toy: Toy, make: Make, config: InnerConfig | None = None, steps: int = 0) -> float:
    """Rounds of inner steps on every replica, each followed by an outer step. `steps`: H, the toy's where it is 0."""
    config, steps = config or toy.config(), steps or toy.steps
    trainers = toy.trainers(config)
    layout = layout_of(trainers[0].model)
    theta = np.empty(layout.total, np.float32)
    layout.read(trainers[0].model, theta)
    outer = make(toy, layout)
    for number in range(toy.rounds * toy.steps // steps):
        deltas = []
        for trainer in trainers:
            layout.write(trainer.model, theta)
            trainer.run_steps(steps)
            delta = np.empty(layout.total, np.float32)
            layout.delta(trainer.model, theta, delta)
            deltas.append(delta)
        outer(theta, deltas, number)
    layout.write(trainers[0].model, theta)
    return toy.loss(trainers[0])


def mean_of(vectors: Sequence[Floats]) -> Floats:
    """Their mean, exactly as the product's codec of whole numbers takes it."""
    codec, out = registry.dense("fp32"), np.empty_like(vectors[0])
    RULES["mean"](codec, [vector.view(np.uint8).data for vector in vectors], [1.0] * len(vectors), out)
    return out


def dense(spec: str, lr: float = 1.0, momentum: float = 0.0) -> Make:
    """DiLoCo: chunks are encoded, averaged in fp32, encoded once more, and everybody applies what that says.

    A plain average was the best outer step on this toy, of (lr, momentum) (1, 0), (0.7, 0.5), (0.4, 0.8) and (0.7, 0.9).
    """

    def make(toy: Toy, layout: Layout) -> Step:
        codec = registry.dense(spec)
        cut, velocity = grid(layout.total, codec), np.zeros(layout.total, np.float32)

        def step(theta: Floats, deltas: Sequence[Floats], round: int) -> None:
            for index in range(len(cut)):
                start, stop = cut.span(index)
                payloads = [np.empty(codec.nbytes(stop - start), np.uint8) for _ in deltas]
                for delta, payload in zip(deltas, payloads, strict=True):
                    codec.encode(delta[start:stop], payload)
                mean, result = np.empty(stop - start, np.float32), np.empty(codec.nbytes(stop - start), np.uint8)
                RULES["mean"](codec, [payload.data for payload in payloads], [1.0] * len(payloads), mean)
                codec.encode(mean, result)
                codec.decode(result.data, mean)
                outer_step(theta[start:stop], velocity[start:stop], mean, lr, momentum, True)

        return step

    return make


def sparse(
    spec: str = "topk(k=64,chunk=4096)|2bit|rice",
    *,
    beta: float = 0.95,
    lr: float = 1.0,
    denominator: str = "contributor_mean",
    excluded: float = 0.0,
    on_exclusion: str = "drop",
) -> Make:
    """SparseLoCo. `excluded`: the part of all contributions that rounds leave out."""

    def make(toy: Toy, layout: Layout) -> Step:
        codec = registry.parse(spec)
        chunks = chunks_of(layout, codec.chunk)  # type: ignore[attr-defined]
        memories = [ErrorFeedback(codec, chunks, beta, on_exclusion) for _ in toy.peers]  # type: ignore[arg-type]
        draw = np.random.default_rng(toy.seed)

        def step(theta: Floats, deltas: Sequence[Floats], round: int) -> None:
            out = draw.random(len(deltas)) < excluded
            if out.all():
                out[int(draw.integers(len(deltas)))] = False
            payloads = [memory.prepare(delta) for memory, delta in zip(memories, deltas, strict=True)]
            selected = [
                memory.codec.decode(p, chunks)
                for memory, p, left in zip(memories, payloads, out, strict=True)
                if not left
            ]
            mean = sparsemean.mean(selected, [1.0] * len(selected), chunks, denominator)
            theta -= np.float32(lr) * mean
            for memory, left in zip(memories, out, strict=True):
                memory.commit(excluded=bool(left))

        return step

    return make


def sieved(
    spec: str = "topk(k=64,chunk=4096)|2bit|rice", *, keep: float = 0.5, wide: int = WIDE, beta: float = 0.95
) -> Make:
    """SparseLoCo whose chunks have owners that send a part of each sum, as the product makes it of payloads."""

    def make(toy: Toy, layout: Layout) -> Step:
        codec: Sparse = registry.parse(spec)  # type: ignore[assignment]
        portions = Portions(codec, replace(codec, k=min(codec.chunk, wide * codec.k)), keep)
        cut = parts(layout.total, portions, codec.chunk)
        chunks = runs(layout.total, cut.chunk, codec.chunk)
        memories = [ErrorFeedback(codec, chunks, beta) for _ in toy.peers]
        kept: dict[int, Floats] = {}

        def step(theta: Floats, deltas: Sequence[Floats], round: int) -> None:
            sent = []
            for memory, delta in zip(memories, deltas, strict=True):
                payload = memory.prepare(delta)
                sent.append(list(portions.split(payload, memory.choice)))  # type: ignore[arg-type]
                memory.commit()
            for index in range(len(cut)):
                start, stop = cut.span(index)
                weights = [1.0] * len(sent)
                result, kept[index] = portions.thin(
                    [one[index] for one in sent], weights, kept.get(index), stop - start
                )
                portions.wide.decode(result, runs(stop - start, stop - start, codec.chunk)).scatter(
                    theta[start:stop], -1.0
                )

        return step

    return make


def low_rank(rank: int, lr: float = 1.0, momentum: float = 0.0) -> Make:
    """DiLoCo with PowerSGD: two averages a round."""

    def make(toy: Toy, layout: Layout) -> Step:
        chunks = Chunks(tuple((piece.name, piece.shape) for piece in layout.pieces))
        states = [LowRank(PowerSGD(rank), chunks, toy.seed) for _ in toy.peers]
        velocity = np.zeros(layout.total, np.float32)

        def step(theta: Floats, deltas: Sequence[Floats], round: int) -> None:
            first = mean_of([state.prepare(delta) for state, delta in zip(states, deltas, strict=True)])
            second = mean_of([state.turn(first) for state in states])
            mean = [state.commit(second) for state in states][0]
            outer_step(theta, velocity, mean, lr, momentum, True)

        return step

    return make


def demo_run(spec: str, beta: float = 0.999, lr: float = 3e-3) -> Callable[[Toy], float]:
    """DeMo: every gradient goes into the replica's momentum, and its strongest coefficients are exchanged in every step."""

    def make(toy: Toy, layout: Layout) -> Step:
        codec: demo.Demo = registry.parse(spec)  # type: ignore[assignment]
        chunks = chunks_of(layout, codec.chunk)
        momenta = [np.zeros(layout.total, np.float32) for _ in toy.peers]
        schedule = toy.config(lr=lr)

        def step(theta: Floats, deltas: Sequence[Floats], round: int) -> None:
            selected = []
            for momentum, gradient in zip(momenta, deltas, strict=True):
                demo.accumulate(momentum, gradient, beta, lr)
                selected.append(codec.select(momentum, chunks))
                selected[-1].scatter(momentum, -1.0)
            mean = demo.mean(selected, [1.0] * len(selected), chunks)
            demo.step(theta, mean, learning_rate(schedule, round), 0.1)

        return step

    def run(toy: Toy) -> float:
        plain = toy.config(optimizer="sgd", lr=1.0, betas=(0.0, 0.0), weight_decay=0.0, warmup=0, schedule="constant")
        return train(toy, make, plain, steps=1)

    return run


class Naive(EagerRounds):
    """One-round overlap without eager updates: everybody applies what is late, and that alone."""

    _share = 0.0  # type: ignore[assignment]


class Heavy(Co2Replica):
    """CO2 whose steps all count in full, however late they come."""

    def penalty(self, *told: object) -> float:
        return 1.0


def overlapped(outer: str, *, naive: bool = False) -> Callable[[Toy], float]:
    """Methods that train while they exchange, with the product's rounds and replicas around a table."""

    def run(toy: Toy) -> float:
        manifest = parse(f'[exchange]\ncodec = "fp32"\n[outer]\nsteps = {toy.steps}\n{outer}')
        trainers = toy.trainers()
        layout = layout_of(trainers[0].model)

        def learner(trainer: Trainer) -> tuple[Floats, Read, Write]:
            theta = np.empty(layout.total, np.float32)
            layout.read(trainer.model, theta)
            return (
                theta,
                lambda start, stop, out: layout.read(trainer.model, out, start),
                lambda theta, start=0, keep=0.0: layout.write(trainer.model, theta, start, keep),
            )

        async def play() -> Floats:
            table = Table(manifest, layout, [learner(trainer) for trainer in trainers])
            if naive:
                for seat in table.seats:
                    if isinstance(seat.replica, Co2Replica):
                        seat.replica.__class__ = Heavy
                    else:
                        seat.rounds.__class__ = Naive
            await table.play(
                toy.rounds * toy.steps // manifest.pace, lambda index, steps: trainers[index].run_steps(steps).tokens
            )
            assert len({seat.replica.digest for seat in table.seats}) == 1
            return table.seats[0].replica.theta

        layout.write(trainers[0].model, asyncio.run(play()))
        return toy.loss(trainers[0])

    return run


UNEQUAL = (1.0, 1.3, 2.0, 4.0)
"""Time that an inner step takes each replica, where they are unequal."""


def asynchronous(outer: str, *, grace: float = 0.5) -> Callable[[Toy], float]:
    """Methods that wait for nobody, by the clock of unequal machines, until as many steps are made as in other runs.

    A round is of those that are ready `grace` after the first, in units of the quickest one's step.
    """

    def run(toy: Toy) -> float:
        manifest = parse(f'[exchange]\ncodec = "fp32"\n[outer]\nsteps = {toy.steps}\n{outer}')
        method, chosen = METHODS[manifest.outer.method], manifest.outer
        total = toy.rounds * toy.steps * len(PEERS)
        counts = [toy.steps] * len(PEERS)
        if chosen.work == "by-power":
            speeds = [1 / seconds for seconds in UNEQUAL]
            counts = [steps_by_power(own, speeds, toy.steps, chosen.spread) for own in speeds]
        pace = sum(1 / seconds for seconds in UNEQUAL)
        trainers = [
            Trainer(
                toy.model(),
                replace(toy.inner, steps=round(total / seconds / pace)),
                toy.batches(peer),
                clock=time.perf_counter,
            )
            for peer, seconds in zip(PEERS, UNEQUAL, strict=True)
        ]
        layout = layout_of(trainers[0].model)
        theta = np.empty(layout.total, np.float32)
        layout.read(trainers[0].model, theta)
        codec = method.codec(manifest, layout)
        replicas: list[Any] = [method.replica.begin(manifest, layout, codec, theta, PEERS) for _ in PEERS]
        cut, made = grid(layout.total, codec), 0
        ready = [(count * seconds, index) for index, (count, seconds) in enumerate(zip(counts, UNEQUAL, strict=True))]
        while made < total:
            closes = min(ready)[0] + grace
            some = sorted(index for at, index in ready if at <= closes)
            ready = [one for one in ready if one[0] > closes]
            payloads, tokens = [], []
            for index in some:
                tokens.append(float(trainers[index].run_steps(counts[index]).tokens))
                made += counts[index]
                model = trainers[index].model
                payloads.append(
                    list(replicas[index].encode(lambda a, b, out, m=model: layout.read(m, out, a), cut, codec))
                )
            results = []
            for chunk in range(len(cut)):
                mean = np.empty(cut.size(chunk), np.float32)
                RULES["mean"](codec, [payload[chunk] for payload in payloads], tokens, mean)
                results.append(mean.view(np.uint8).data)
            for replica in replicas:
                replica.arrive(results, cut, codec, contributors=len(some), members=PEERS)
            for index in some:
                replicas[index].reset()
                layout.write(trainers[index].model, replicas[index].theta)
                ready.append((closes + counts[index] * UNEQUAL[index], index))
        assert len({replica.digest for replica in replicas}) == 1
        layout.write(trainers[0].model, replicas[0].theta)
        return toy.loss(trainers[0])

    return run


def rounds_of(make: Make) -> Callable[[Toy], float]:
    """A way to train of which only the outer step is special."""
    return lambda toy: train(toy, make)


STREAMING = 'method = "streaming"\nfragments = 2\noverlap = {}\nalpha = {}'
TOPK = "topk(k={},chunk=4096)|2bit|rice"
RUNS: dict[str, Callable[[Toy], float]] = {
    "synchronous": synchronous,
    "apart": apart,
    "diloco": rounds_of(dense("fp32")),
    "diloco .4/.8": rounds_of(dense("fp32", 0.4, 0.8)),
    "diloco .7/.9": rounds_of(dense("fp32", 0.7, 0.9)),
    "int8": rounds_of(dense("int8(block=256)")),
    "int4": rounds_of(dense("int4(block=256)")),
    "sparseloco k=64": rounds_of(sparse(TOPK.format(64))),
    "sparseloco k=128": rounds_of(sparse(TOPK.format(128))),
    "sparseloco 1bit": rounds_of(sparse("topk(k=64,chunk=4096)|1bit|rice")),
    "no feedback": rounds_of(sparse(beta=0.0)),
    "beta 1": rounds_of(sparse(beta=1.0)),
    "denominator mean": rounds_of(sparse(denominator="mean")),
    "30% excluded": rounds_of(sparse(excluded=0.3)),
    "sieve": rounds_of(sieved()),
    "sieve, keep .95": rounds_of(sieved(keep=0.95)),
    "sieve, as many": rounds_of(sieved(wide=1)),
    "30% restored": rounds_of(sparse(excluded=0.3, on_exclusion="restore")),
    "demo k=32": demo_run("demo(k=32)"),
    "powersgd rank 8": rounds_of(low_rank(8)),
    "diloco .7/.5": rounds_of(dense("fp32", 0.7, 0.5)),
    "noloco": paired(0.7),
    "noloco gamma 0": paired(0.0),
    "noloco, fours": paired(0.7, group=4),
    "diloco .4/.9": rounds_of(dense("fp32", 0.4, 0.9)),
    "streaming t0": overlapped(STREAMING.format(0, 0.0)),
    "streaming t1 a0": overlapped(STREAMING.format(1, 0.0)),
    "streaming t1 a.5": overlapped(STREAMING.format(1, 0.5)),
    "streaming t5 a.5": overlapped(STREAMING.format(5, 0.5)),
    "naive overlap .4": overlapped('method = "eager"\nlr = 0.4', naive=True),
    "eager .4": overlapped('method = "eager"\nlr = 0.4'),
    "eager .2": overlapped('method = "eager"'),
    "co2": overlapped('method = "co2"'),
    "async naive": asynchronous('method = "buffered-async"\nlr = 0.7\nmomentum = 0.9\nnesterov = true'),
    "async buffered": asynchronous('method = "buffered-async"'),
    "delayed nesterov": asynchronous('method = "delayed-nesterov"'),
    "delayed, by power": asynchronous('method = "delayed-nesterov"\nwork = "by-power"'),
    "co2 .4/.8": overlapped('method = "co2"\nlr = 0.4\nmomentum = 0.8'),
    "co2, no penalty": overlapped('method = "co2"\nlr = 0.4\nmomentum = 0.8', naive=True),
}
"""Name -> a run's loss."""


def text(cache: Path, seed: int, context: int = 32) -> Split:
    """The standard library's source as bytes, cut into shards and a held-out part."""
    tokenizer = load_tokenizer("bytes", Path())
    return split(open_corpus(None, tokenizer, cache), context, seed, SHARDS, 0.02)


def table(losses: dict[str, list[float]]) -> str:
    """What was measured, one way to train a line: mean loss, distance to dense DiLoCo, ratio of perplexities, each seed."""
    lines = [f"{'':<18} {'loss':>7} {'to diloco':>10} {'perplexity':>11}   seeds"]
    usual = float(np.mean(losses["diloco"])) if "diloco" in losses else math.nan
    for name, found in losses.items():
        mean = float(np.mean(found))
        said = " ".join(f"{loss:.3f}" for loss in found)
        lines.append(f"{name:<18} {mean:>7.3f} {mean - usual:>+10.3f} {math.exp(mean - usual):>10.3f}×   {said}")
    return "\n".join(lines)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="quality", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--replicas", type=int, default=len(PEERS))
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate of the inner optimizer")
    parser.add_argument("--schedule", default="cosine", choices=["cosine", "constant"])
    parser.add_argument("--json", type=Path)
    told = parser.parse_args(words)
    torch.set_num_threads(1)
    inner = InnerConfig(lr=told.lr, warmup=told.rounds // 2, schedule=told.schedule)
    peers = [bytes([index]) * 32 for index in range(told.replicas)]
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as cache:
        for seed in range(told.seeds):
            for name in told.only:
                began = time.monotonic()
                loss = RUNS[name](Toy(text(Path(cache), seed), seed, told.rounds, inner=inner, peers=peers))
                losses.setdefault(name, []).append(loss)
                print(
                    f"{name}, seed {seed}: {loss:.3f} in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True
                )
                if told.json:
                    told.json.write_text(json.dumps(losses, indent=1) + "\n")
    print(table(losses))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
