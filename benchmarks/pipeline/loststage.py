"""Held-out loss after the middle stage was lost, by the source from which it was restored.

    python -m benchmarks.pipeline.loststage                     # ten minutes on one core
    python -m benchmarks.pipeline.loststage --steps 100 --seeds 1

A byte model with one block in each stage trains on the source of Python's standard library. After `--steps` steps the middle
stage is lost, with the moments of its optimizer. It is restored from

- "copy": its own values from before the last tenth of the training;
- "mean": the mean of its neighbours, weighted by their last gradients (`checkfree.average`), with a learning rate 1.1 times as
  high;
- "anew": its first weights, with the same higher learning rate;
- "nothing lost": itself, for comparison.

Columns: held-out loss before the loss of the stage, immediately after it, and after these numbers of further steps.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from thinwire.node.pipeline.model.section import ModelSection, cut
from thinwire.node.pipeline.model.stage_optimizer import StageOptimizer
from thinwire.node.pipeline.recovery.checkfree import average
from thinwire.node.pipeline.recovery.stage_source import FASTER
from thinwire.node.training.batches import Batches, Split, split
from thinwire.node.training.corpus import open_corpus
from thinwire.node.training.inner_optimizer import InnerConfig
from thinwire.node.training.models.tokenizer import load_tokenizer
from thinwire.node.training.models.transformer import ModelConfig, Transformer

from benchmarks.pipeline.skipping import SHARDS, apply, gradient, through
from benchmarks.support import machine

AFTER = (20, 40, 60)
"""Steps since the stage was lost after which the model is evaluated."""

SOURCES = ("nothing lost", "copy", "mean", "anew")


class Replica:
    """All stages in one process. `paths`: every micro-batch visits all of them."""

    def __init__(self, layers: int, width: int, context: int, inner: InnerConfig, seed: int, micros: int) -> None:
        model = Transformer(ModelConfig(256, layers=layers, width=width, heads=4, context=context), seed)
        self.sections = [ModelSection(model, part, not stage) for stage, part in enumerate(cut(layers, (1,) * layers))]
        self.updates = [StageOptimizer(part.module, inner) for part in self.sections]
        self.norms, self._inner, self._paths, self._step = [0.0] * layers, inner, [tuple(range(layers))] * micros, 0

    def train(self, source: Batches, steps: int, batch: int) -> None:
        """Make this number of further steps."""
        for _ in range(steps):
            batches = [source.next(batch) for _ in self._paths]
            gradient(self.sections, batches, self._paths)
            self.norms = [update.squares() ** 0.5 for update in self.updates]
            apply(self.updates, self._step, self._paths, batches[0][0].numel(), self._inner.clip, False)
            self._step += 1

    def loss(self, data: Split) -> float:
        """Return the held-out loss."""
        with torch.no_grad():
            found = [float(through(self.sections, self._paths[0], *each)) for each in data.evaluation(32, 8)]
        return float(np.mean(found))

    def lose(self, stage: int, values: Sequence[torch.Tensor], *, faster: float) -> None:
        """Replace a stage by one with these values and without moments. `faster`: factor of its learning rate."""
        for parameter, value in zip(self.sections[stage].module.parameters(), values, strict=True):
            parameter.data.copy_(value)
        self.updates[stage] = StageOptimizer(self.sections[stage].module, self._inner)
        self.updates[stage].faster = faster

    def mean(self, stage: int) -> list[torch.Tensor]:
        """Return the mean of the neighbours' values, weighted by the norms of their last gradients."""
        before, after = (self.sections[one].module.parameters() for one in (stage - 1, stage + 1))
        norms = self.norms[stage - 1], self.norms[stage + 1]
        return [_mean(one, two, norms) for one, two in zip(before, after, strict=True)]


def _mean(one: torch.Tensor, two: torch.Tensor, norms: tuple[float, float]) -> torch.Tensor:
    before, after = (each.detach().numpy().ravel() for each in (one, two))
    return torch.from_numpy(average(before, after, *norms)).view(one.shape)


def _values(section: ModelSection) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in section.module.parameters()]


def main() -> None:
    """Train once for each seed, and continue from there with each source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--micros", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a micro-batch")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine.describe())
    print("| seed | source | before | at once | " + " | ".join(f"+{steps}" for steps in AFTER) + " |")
    print("|---|---|---|---|" + "---|" * len(AFTER))
    stage = options.layers // 2
    with TemporaryDirectory() as folder:
        text = open_corpus(None, load_tokenizer("bytes", Path()), Path(folder))
        for seed in range(1, options.seeds + 1):
            data = split(text, options.context, seed, SHARDS, 0.02)
            inner = InnerConfig(lr=3e-3, warmup=options.steps // 20)
            replica = Replica(options.layers, options.width, options.context, inner, seed, options.micros)
            source = Batches(data, options.batch, range(SHARDS))
            first = _values(replica.sections[stage])
            replica.train(source, options.steps - options.steps // 10, options.batch)
            copied = _values(replica.sections[stage])
            replica.train(source, options.steps // 10, options.batch)
            values = {"copy": copied, "mean": replica.mean(stage), "anew": first}
            before = replica.loss(data)
            for name in SOURCES:
                again, more = copy.deepcopy((replica, source))
                if name in values:
                    again.lose(stage, values[name], faster=1.0 if name == "copy" else FASTER)
                losses = [again.loss(data)]
                for last, steps in zip((0, *AFTER), AFTER, strict=False):
                    again.train(more, steps - last, options.batch)
                    losses.append(again.loss(data))
                later_losses = " | ".join(f"{loss:.3f}" for loss in losses)
                print(f"| {seed} | {name} | {before:.3f} | {later_losses} |", flush=True)


if __name__ == "__main__":
    main()
