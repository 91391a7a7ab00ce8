"""A byte language model of about 100,000 parameters on several replicas in one process, for `quality.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from thinwire.compression.core.types import Floats
from thinwire.node.state.layout import Layout, layout_of
from thinwire.node.training.batches import Batch, Batches, Split, shards_of, split
from thinwire.node.training.corpus import open_corpus
from thinwire.node.training.inner_loop import Trainer
from thinwire.node.training.inner_optimizer import InnerConfig
from thinwire.node.training.models.tokenizer import load_tokenizer
from thinwire.node.training.models.transformer import ModelConfig, Transformer

PEERS = [bytes([index]) * 32 for index in range(4)]
SHARDS = 256


@dataclass(frozen=True)
class Toy:
    """Model, data and length of a training: `rounds` of `steps` inner steps on each replica, of `batch` sequences."""

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
        """Return a model; its first parameters are the same on every replica."""
        size = ModelConfig(256, self.layers, self.width, heads=self.width // 16, context=self.split.context)
        return Transformer(size, self.seed)

    def config(self, **changes: Any) -> InnerConfig:
        """Return the settings of the inner optimizer, with a schedule over all steps."""
        return replace(self.inner, steps=self.rounds * self.steps, **changes)

    def trainers(self, config: InnerConfig | None = None) -> list[Trainer]:
        """Return a trainer for each replica."""
        config = config or self.config()
        return [Trainer(self.model(), config, self.batches(peer), clock=time.perf_counter) for peer in self.peers]

    def batches(self, peer: bytes) -> Batches:
        """Return the batches of a replica, from its own share of the text."""
        return Batches(self.split, self.batch, shards_of(self.seed, SHARDS, self.peers, peer))

    def loss(self, trainer: Trainer) -> float:
        """Return the held-out loss in nats per byte."""
        return trainer.evaluate(self.split.evaluation(64, 32))


class Step(Protocol):
    """Outer step: computes the next common parameters from the changes of all replicas, in place."""

    def __call__(self, theta: Floats, deltas: Sequence[Floats], round: int) -> None: ...


Make = Callable[[Toy, Layout], Step]


class Mixed:
    """Batches of all replicas in turn. A step on one batch of each replica is a step of data parallelism."""

    def __init__(self, sources: Sequence[Batches]) -> None:
        self._sources, self._at, self.batch = sources, 0, sources[0].batch

    def next(self, size: int = 0) -> Batch:
        """Return a batch of the replica whose turn it is."""
        self._at += 1
        return self._sources[(self._at - 1) % len(self._sources)].next(size)


def synchronous(toy: Toy) -> float:
    """Return the loss after data parallelism: each inner step uses the gradients of all replicas."""
    mixed = cast(Batches, Mixed([toy.batches(peer) for peer in toy.peers]))
    trainer = Trainer(toy.model(), toy.config(accumulate=len(toy.peers)), mixed, clock=time.perf_counter)
    trainer.run_steps(toy.rounds * toy.steps)
    return toy.loss(trainer)


def apart(toy: Toy) -> float:
    """Return the mean loss of replicas that never average, each trained on its own share of the text."""
    trainers = toy.trainers()
    for trainer in trainers:
        trainer.run_steps(toy.rounds * toy.steps)
    return float(np.mean([toy.loss(trainer) for trainer in trainers]))


def train(toy: Toy, make: Make, config: InnerConfig | None = None, steps: int = 0) -> float:
    """Train in rounds: inner steps on each replica, then an outer step. `steps`: H; 0: the toy's."""
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


def text(cache: Path, seed: int, context: int = 32) -> Split:
    """The standard library's source as bytes, cut into shards and a held-out part."""
    tokenizer = load_tokenizer("bytes", Path())
    return split(open_corpus(None, tokenizer, cache), context, seed, SHARDS, 0.02)
