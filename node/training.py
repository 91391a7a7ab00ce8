"""From a manifest and this machine's settings to something that trains: model, data, inner optimizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from thinwire.compression.codec import Floats
from thinwire.swarm.manifest import Manifest, ManifestError

from .corpus import open_corpus
from .data import Batches, Split, cursor_after, shards_of, split
from .fragments import Layout, layout_of
from .inner import InnerConfig
from .learner import Share, StepReport
from .model import ModelConfig, Transformer
from .snapshot import PrivateState
from .tokenizer import Tokenizer, load_tokenizer
from .trainer import Trainer
from .waiting import Work, at_once


@dataclass(frozen=True, slots=True)
class Training:
    """What a daemon trains: the Learner of life.

    place: which of PLACES parts of the shards are this peer's; None: what follows from its key. work: where it computes.
    """

    trainer: Trainer
    layout: Layout
    split: Split
    tokenizer: Tokenizer
    manifest: Manifest
    place: int | None = None
    work: Work = at_once

    async def steps(self, n: int, stop: asyncio.Event) -> StepReport:
        """Make `n` inner steps, fewer when `stop` is set on the way. Raises Diverged."""
        report: StepReport = await self.work(lambda: self.trainer.run_steps(n, stop))
        return report

    def assign(self, share: Share) -> None:
        """Take this peer's shards: derived from the seed and its place in the group, or those of `place` when it has one; or
        all, of a text of its own.
        """
        self.trainer.batches.assign(own_shards(self.manifest, share, self.place))
        batches, lease, most = self.trainer.batches, share.lease, self.manifest.inner.batch
        batches.lease(lease)
        if lease is not None and self.manifest.inner.global_batch:
            self.trainer.portions = tuple(min(most, lease.samples - at) for at in range(0, lease.samples, most))
        if self.manifest.outer.work == "by-power" or lease is not None:
            # Peers make different numbers of steps, or none; the learning rate is the same for all.
            self.trainer.step = self.manifest.steps_after(share.round)

    def skip_to(self, round: int, peers: int) -> None:
        """Stand where a peer stands that has trained for `round` rounds in a group of `peers`."""
        manifest = self.manifest
        self.trainer.step = manifest.steps_after(round)
        samples = self.trainer.step * manifest.inner.batch * manifest.inner.accumulate * max(1, peers)
        self.trainer.batches.cursor = cursor_after(self.split, samples)

    def parameters(self) -> Floats:
        """A copy of all parameters; before the first step they are equal on every peer."""
        theta = np.empty(self.layout.total, np.float32)
        self.layout.read(self.trainer.model, theta)
        return theta

    def read(self, start: int, stop: int, out: Floats) -> None:
        """Copy parameters [start, stop) as float32."""
        self.layout.read(self.trainer.model, out, start)

    def write(self, theta: Floats, start: int = 0, keep: float = 0.0) -> None:
        """See Learner."""
        self.layout.write(self.trainer.model, theta, start, keep)

    def private(self) -> PrivateState:
        """What only this peer has, for a checkpoint that is written before the next step."""
        tensors, numbers = self.trainer.save(copy=False)
        return PrivateState(tensors, dict(numbers))

    def restore(self, private: PrivateState) -> bool:
        """Take up the private state of a checkpoint; False when it does not fit (the optimizer's moments warm up anew)."""
        try:
            numbers = {name: value for name, value in private.values.items() if isinstance(value, int)}
            self.trainer.load(private.tensors, numbers)
        except ValueError:
            return False
        return True


def own_shards(manifest: Manifest, share: Share, place: int | None = None) -> tuple[int, ...]:
    """The shards of the data that are a peer's; see `Training` for `place`."""
    data = manifest.data
    if data.domains:
        return tuple(range(data.shards))
    if place is not None:
        return tuple(range(place % data.shards, data.shards, PLACES))
    return shards_of(manifest.run.seed, data.shards, share.group, share.me)


PLACES = 64
"""Peers that can be told their place by hand; each has every 64th shard."""


def prepare(
    manifest: Manifest,
    *,
    data: Path | None,
    device: str,
    threads: int,
    cache: Path,
    here: Path,
    clock: Callable[[], float],
    place: int | None = None,
    work: Work = at_once,
) -> Training:
    """Build everything. `here` is where the manifest's tokenizer file is looked for, `clock` gives seconds.

    Raises DataError, DeviceError, and ManifestError for a run whose model only the Python interface can be given.
    """
    if manifest.model.kind == "custom":
        raise ManifestError(
            f"run {manifest.run.name} trains a model of someone's own",
            "take part from Python: thinwire.join(…) and swarm.wrap(model, optimizer)",
        )
    if threads:
        torch.set_num_threads(threads)
    tokenizer = load_tokenizer(manifest.data.tokenizer, here, manifest.data.tokenizer_hash)
    model, batches = build(manifest, tokenizer.vocab), batches_of(manifest, tokenizer, data, cache)
    layout = layout_of(model)
    autocast = torch.bfloat16 if device.startswith("cuda") else None
    trainer = Trainer(model, inner_of(manifest), batches, device, autocast, clock=clock)
    return Training(trainer, layout, batches.split, tokenizer, manifest, place, work)


def batches_of(manifest: Manifest, tokenizer: Tokenizer, data: Path | None, cache: Path) -> Batches:
    """The manifest's training batches, of all shards. Raises DataError."""
    corpus, said = open_corpus(data, tokenizer, cache), manifest.data
    cut = split(corpus, manifest.model.context, manifest.run.seed, said.shards, said.holdout)
    return Batches(cut, manifest.inner.batch, range(said.shards))


def inner_of(manifest: Manifest) -> InnerConfig:
    """The manifest's inner optimizer."""
    inner = manifest.inner
    return InnerConfig(
        optimizer=inner.optimizer,
        lr=inner.lr,
        betas=inner.betas,
        weight_decay=inner.weight_decay,
        warmup=inner.warmup,
        schedule=inner.schedule,
        steps=manifest.schedule_steps,
        accumulate=inner.accumulate,
        clip=inner.clip,
        momentum=inner.momentum,
        adam_lr=inner.adam_lr,
    )


def build(manifest: Manifest, vocab: int) -> Transformer:
    """The manifest's model with its first parameters."""
    shape = manifest.model
    config = ModelConfig(vocab, shape.layers, shape.width, shape.heads, shape.context, shape.mlp, shape.tied)
    return Transformer(config, manifest.run.seed)
