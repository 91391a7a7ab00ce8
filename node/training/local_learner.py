"""Training from a manifest and this machine's settings: model, data, inner optimizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from thinwire.compression.core.types import Floats
from thinwire.compression.device import Vector
from thinwire.node.runtime.asyncio_extra import Work, at_once
from thinwire.node.runtime.device import return_freed_memory, whole_memory
from thinwire.node.state.layout import Layout, layout_of
from thinwire.node.state.snapshot import PrivateState
from thinwire.node.training.batches import (
    Batch,
    Batches,
    Split,
    cursor_after,
    shards_of,
    split,
    trial_batches,
    trial_samples,
)
from thinwire.node.training.corpus import Progress, open_corpus
from thinwire.node.training.inner_loop import Trainer
from thinwire.node.training.inner_optimizer import InnerConfig
from thinwire.node.training.learner import StepReport, WorkShare
from thinwire.node.training.models.initial_weights import WeightsError, check_weights, load_weights
from thinwire.node.training.models.lora import with_adapter
from thinwire.node.training.models.missing_hashes import with_all_hashes
from thinwire.node.training.models.model_size import check_memory
from thinwire.node.training.models.tokenizer import Tokenizer, load_tokenizer
from thinwire.node.training.models.transformer import ModelConfig, Transformer
from thinwire.node.training.models.user_model import checkpoint_activations, make_model, read_pretrained
from thinwire.swarm.manifest.manifest import Manifest, ManifestError
from thinwire.swarm.messages.registry import PeerId
from torch import nn


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Loss in nats per token, of this many samples with this many tokens."""

    loss: float
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True)
class LocalLearner:
    """Learner of a daemon.

    `place`: which of PLACES parts of the shards this peer has; None: derived from its key. `work`: runs computations.
    """

    trainer: Trainer
    layout: Layout
    split: Split
    tokenizer: Tokenizer
    manifest: Manifest
    place: int | None = None
    work: Work = at_once

    async def steps(self, n: int, stop: asyncio.Event) -> StepReport:
        """Run `n` inner steps, or fewer if `stop` is set meanwhile. Raises Diverged."""

        def run() -> StepReport:
            return_freed_memory()  # of the last round
            report = self.trainer.run_steps(n, stop)
            return_freed_memory()
            return report

        report: StepReport = await self.work(run)
        return report

    def assign(self, share: WorkShare) -> None:
        """Take this peer's shards.

        They are derived from the seed and its place in the group, or those of `place` if it has one.

        With private data, take all shards.
        """
        self.trainer.batches.assign(own_shards(self.manifest, share, self.place))
        batches, lease, most = self.trainer.batches, share.lease, self.manifest.inner.batch
        batches.lease(lease)
        split = self.split
        batches.repeat(trial_samples(split, most, share.me, share.round) if share.trial else None)
        if lease is not None and self.manifest.inner.global_batch:
            self.trainer.portions = tuple(min(most, lease.samples - at) for at in range(0, lease.samples, most))
        # The learning rate follows the run: joiners, peers that return and peers that make other numbers of steps have
        # the rate of all others.
        self.trainer.step = share.step

    def score(self, base: Floats, step: Floats, peer: PeerId, round: int, salt: bytes) -> tuple[float, float]:
        """Evaluate a step on two batches, see Learner; the parameters are the same afterwards."""
        batch, kept = self.manifest.inner.batch, self.parameters()
        pair = trial_batches(self.split, batch, peer, round, salt)
        try:
            self.write(base)
            before = [self.trainer.evaluate([one]) for one in pair]
            self.write(base - step)
            after = [self.trainer.evaluate([one]) for one in pair]
        finally:
            self.write(kept)
        return before[0] - after[0], before[1] - after[1]

    def held_out_loss(self) -> float:
        """Return the loss of the present model on held-out samples.

        It is in nats per token; NaN if nothing is held out. All evaluations of a run use the same samples.
        """
        return self.trainer.evaluate(self.evaluation())

    def evaluation(self) -> Iterator[Batch]:
        """Yield the held-out samples on which a run is evaluated, at most HELD_OUT.

        They take about a tenth of the time of a round's steps, because a forward pass is a third of a sample's work.
        """
        inner, steps = self.manifest.inner, max(1, self.manifest.pace)
        samples = max(1, min(HELD_OUT, round(0.3 * steps * inner.batch * inner.accumulate)))
        size = min(inner.batch, samples)
        return self.split.evaluation(size, samples // size)

    def evaluate(self, samples: int | None = None, *, whole: bool = False) -> Evaluation | None:
        """Evaluate the present model on held-out samples; return None if there are none.

        whole: use all of the text.
        samples: most sequences, spread evenly over the text; 0: all; None: those on which the run is evaluated.
        """
        split, batch = self.split, self.manifest.inner.batch
        if whole:
            split = replace(split, held_out=np.arange(split.starts[-1]))
        if not split.held_out.size:
            return None
        if samples is not None:
            size, count = split.held_out.size, min(samples or split.held_out.size, split.held_out.size)
            split = replace(split, held_out=split.held_out[np.arange(count) * size // count])
        batches = split.evaluation(batch, -(-split.held_out.size // batch))
        if samples is None:
            batches = replace(self, split=split).evaluation()
        used = 0

        def counted() -> Iterator[Batch]:
            nonlocal used
            for inputs, targets in batches:
                used += len(inputs)
                yield inputs, targets

        loss = self.trainer.evaluate(counted())
        return Evaluation(loss, used, used * self.manifest.model.context)

    def skip_to(self, round: int, peers: int) -> None:
        """Set the state of a peer that has trained for `round` rounds in a group of `peers`."""
        manifest = self.manifest
        self.trainer.step = manifest.steps_after(round)
        samples = self.trainer.step * manifest.inner.batch * manifest.inner.accumulate * max(1, peers)
        self.trainer.batches.cursor = cursor_after(self.split, samples)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.trainer.device

    @property
    def size(self) -> int:
        """Number of all parameters of the model, also of those that are frozen below an adapter."""
        return sum(parameter.numel() for parameter in self.trainer.model.parameters())

    def parameters(self) -> Floats:
        """Return a copy of all parameters; before the first step they are equal on every peer."""
        theta = np.empty(self.layout.total, np.float32)
        self.layout.read(self.trainer.model, theta)
        return theta

    def read(self, start: int, stop: int, out: Vector) -> None:
        """Copy parameters [start, stop) as float32."""
        self.layout.read(self.trainer.model, out, start)

    def write(self, theta: Floats, start: int = 0, keep: float = 0.0) -> None:
        """Set a range of parameters, see Learner."""
        self.layout.write(self.trainer.model, theta, start, keep)

    def private(self) -> PrivateState:
        """Return the state that only this peer has, for a checkpoint that is written before the next step."""
        tensors, numbers = self.trainer.save()
        return PrivateState(tensors, dict(numbers))

    def restore(self, private: PrivateState) -> bool:
        """Restore the private state of a checkpoint.

        Return False if it does not fit (the optimizer's moments then warm up again).
        """
        try:
            numbers = {name: value for name, value in private.values.items() if isinstance(value, int)}
            self.trainer.load(private.tensors, numbers)
        except ValueError:
            return False
        return True


def own_shards(manifest: Manifest, share: WorkShare, place: int | None = None) -> tuple[int, ...]:
    """Return a peer's shards of the data; see `LocalLearner` for `place`."""
    data = manifest.data
    if data.private:
        return tuple(range(data.shards))
    if place is not None:
        return tuple(range(place % data.shards, data.shards, PLACES))
    return shards_of(manifest.run.seed, data.shards, share.group, share.me)


HELD_OUT = 256
"""Most samples of an evaluation during a run."""

PLACES = 64
"""Number of places that can be assigned by hand; each has every 64th shard."""


@dataclass(frozen=True, slots=True)
class Computing:
    """Device, threads and memory use of inner steps, by the settings in node.toml.

    - `threads`: threads of torch; 0: its default.
    - `compiled`: setting `compile`.
    - `checkpointing`: setting `gradient_checkpointing`.
    """

    device: str
    threads: int
    compiled: bool = False
    checkpointing: bool = False


def build_learner(
    manifest: Manifest,
    computing: Computing,
    *,
    data: str | Path | None,
    cache: Path,
    here: Path,
    clock: Callable[[], float],
    place: int | None = None,
    work: Work = at_once,
    weights: Sequence[Path] = (),
    model: str = "",
    tokenizer: Tokenizer | None = None,
    say: Callable[[str], object] = str,
) -> LocalLearner:
    """Build everything that a daemon needs to train.

    - `data`: see source_of. `cache`: directory for its tokens.
    - `here`: directory of the manifest's tokenizer file.
    - `clock`: returns seconds.
    - `weights`: files with the first parameters; none: random ones.
    - `model`: the user's model that may be trained here, see make_model.
    - `tokenizer`: that of the manifest, if it is loaded already.
    - `say`: shows a line of progress to the owner.

    Raises CompileError, DataError, DeviceError, ModelError, WeightsError, and ManifestError for a run whose model can only be
    given through the Python interface. The error of a manifest without hashes names all that are missing.
    """
    if manifest.model.kind == "custom":
        raise ManifestError(
            f"run {manifest.run.name} trains a custom model",
            "take part from Python: thinwire.join(…) and swarm.wrap(model, optimizer)",
        )
    tokenizer = tokenizer or load_tokenizer(manifest.data.tokenizer, here, manifest.data.tokenizer_hash)
    if manifest.lora.rank and weights:
        raise WeightsError(
            "--from does not apply to a run with [lora], whose first values are drawn from run.seed",
            "remove it: the base weights are those of the model that --model or the manifest names",
        )
    check_memory(manifest, model, tokenizer.vocab, here, whole_memory())
    made, layout = with_all_hashes(
        manifest, tokenizer, lambda one: _first_model(one, tokenizer.vocab, model, here, computing.threads, weights)
    )
    batches = batches_of(manifest, tokenizer, data, cache, Progress(clock, say))
    if computing.checkpointing:
        checkpoint_activations(made)
    products = products_of(manifest, computing.device)
    trainer = Trainer(made, inner_of(manifest), batches, computing.device, products, clock=clock)
    if computing.compiled:
        began = clock()
        say("compiling the model, which takes about a minute; training begins after it")
        trainer.compile()
        say(f"compiled the model in {clock() - began:.0f} s")
    return LocalLearner(trainer, layout, batches.split, tokenizer, manifest, place, work)


def _first_model(
    manifest: Manifest, vocab: int, named: str, here: Path, threads: int, weights: Sequence[Path]
) -> tuple[nn.Module, Layout]:
    """Return the model with its first parameters, and its layout."""
    made = build(manifest, vocab, named, here, threads)
    layout = layout_of(made)
    if weights:
        theta = _given(weights, manifest, made, layout)
        check_weights(theta, manifest.model.weights, weights[0])
        layout.write(made, theta)
    return made, layout


def batches_of(
    manifest: Manifest, tokenizer: Tokenizer, data: str | Path | None, cache: Path, progress: Progress | None = None
) -> Batches:
    """Return the manifest's training batches, of all shards. Raises DataError."""
    corpus, settings = open_corpus(data, tokenizer, cache, progress), manifest.data
    cut = split(corpus, manifest.model.context, manifest.run.seed, settings.shards, settings.holdout)
    return Batches(cut, manifest.inner.batch, range(settings.shards))


def products_of(manifest: Manifest, device: str) -> torch.dtype | None:
    """Return the element type of matrix products on a device; None: that of the parameters."""
    precision = manifest.inner.precision
    narrow = device.startswith("cuda") if precision == "auto" else precision == "bf16"
    return torch.bfloat16 if narrow else None


def inner_of(manifest: Manifest) -> InnerConfig:
    """Return the manifest's inner optimizer settings."""
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


def _given(weights: Sequence[Path], manifest: Manifest, model: nn.Module, layout: Layout) -> Floats:
    """Return first parameters from files and checkpoints' directories, or from a folder of transformers.

    Raises WeightsError.
    """
    if manifest.model.kind != "hf" or len(weights) > 1 or not (weights[0] / "config.json").exists():
        return load_weights(weights, layout)
    theta = np.empty(layout.total, np.float32)
    layout.read(read_pretrained(weights[0], model), theta)
    return theta


def build(manifest: Manifest, vocab: int, named: str = "", here: Path = Path(), threads: int = 0) -> nn.Module:
    """Return the manifest's model with its initial parameters, its adapter included.

    See make_model for `named` and `here`. threads: threads of torch from now on; 0: its default.
    """
    if threads:
        torch.set_num_threads(threads)
    shape = manifest.model
    if shape.kind != "transformer":
        model = make_model(manifest, named, vocab, here)
        return with_adapter(manifest, model, named) if manifest.lora.rank else model
    config = ModelConfig(vocab, shape.layers, shape.width, shape.heads, shape.context, shape.mlp, shape.tied)
    return Transformer(config, manifest.run.seed)
