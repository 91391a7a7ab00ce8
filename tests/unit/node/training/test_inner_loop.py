"""The inner training loop: learning, stopping, accumulating, resuming."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from thinwire.node.training import local_learner
from thinwire.node.training.batches import Batches, Split, split
from thinwire.node.training.corpus import Corpus
from thinwire.node.training.inner_loop import Diverged, Trainer
from thinwire.node.training.inner_optimizer import InnerConfig, learning_rate
from thinwire.node.training.learner import WorkShare
from thinwire.node.training.local_learner import Computing, build_learner, inner_of
from thinwire.node.training.models.transformer import ModelConfig, Transformer
from thinwire.swarm.manifest.parser import parse

CONFIG = InnerConfig(lr=1e-2, warmup=2)


def text() -> Split:
    # A text with a simple rule: each token is the one before it plus 1 or 2.
    steps = np.random.default_rng(0).integers(1, 3, 4000)
    return split(Corpus(((np.cumsum(steps) % 20).astype(np.uint8),), 20, ""), 12, 0, 8, 0.05)


def trainer(config: InnerConfig = CONFIG, batch: int = 8, seed: int = 0) -> Trainer:
    ticks = itertools.count()
    model = Transformer(ModelConfig(vocab=20, layers=1, width=16, heads=2, context=12), seed)
    return Trainer(model, config, Batches(text(), batch, range(8)), clock=lambda: float(next(ticks)))


def weights(of: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in of.model.parameters()]


def test_trainer_learns() -> None:
    subject = trainer()
    before = subject.evaluate(subject.batches.split.evaluation(4, 4))
    assert before == pytest.approx(math.log(20), abs=0.1)
    first = subject.run_steps(5)
    subject.run_steps(60)
    last = subject.run_steps(5)
    after = subject.evaluate(subject.batches.split.evaluation(4, 4))
    assert after < 1.2 < first.loss and last.loss < first.loss
    assert subject.step == 70 and first.tokens == 5 * 8 * 12 and first.steps == 5 and first.seconds == 1.0


def test_trainer_is_deterministic() -> None:
    one, two = trainer(), trainer()
    assert one.run_steps(4) == two.run_steps(4)
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(two), strict=True))


def test_trainer_stops_between_steps() -> None:
    subject = trainer()
    stop = threading.Event()
    produced = subject.batches.next

    def third(size: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        if subject.step == 2:
            stop.set()
        return produced(size)

    subject.batches.next = third  # type: ignore[method-assign]
    report = subject.run_steps(100, stop)
    assert report.steps == subject.step == 3
    none = subject.run_steps(5, stop)
    assert (none.steps, none.tokens) == (0, 0) and math.isnan(none.loss)


def test_gradient_accumulation_equals_larger_batch() -> None:
    whole = trainer(batch=8)
    parts = trainer(InnerConfig(lr=1e-2, warmup=2, accumulate=4), batch=2)
    a, b = whole.run_steps(3), parts.run_steps(3)
    assert a.tokens == b.tokens and a.loss == pytest.approx(b.loss, abs=1e-5)
    for one, two in zip(weights(whole), weights(parts), strict=True):
        assert torch.allclose(one, two, atol=2e-4)


def test_gradient_clipping_bounds_the_norm() -> None:
    subject = trainer(InnerConfig(optimizer="sgd", lr=1.0, betas=(0.0, 0.0), weight_decay=0.0, warmup=0, clip=1e-3))
    before = weights(subject)
    subject.run_steps(1)
    moved = math.sqrt(sum((a - b).square().sum().item() for a, b in zip(before, weights(subject), strict=True)))
    assert moved == pytest.approx(1e-3, rel=0.01)


def test_learning_rate_follows_step_count() -> None:
    subject = trainer(InnerConfig(lr=1.0, warmup=1000))
    subject.step = 499
    subject.run_steps(1)
    assert subject.optimizer.param_groups[0]["lr"] == 0.5


def test_saved_trainer_resumes_exactly() -> None:
    first, second = trainer(), trainer(seed=5)
    first.run_steps(3)
    arrays, numbers = first.save()
    second.model.load_state_dict(first.model.state_dict())
    second.load(arrays, numbers)
    assert second.run_steps(3) == first.run_steps(3)
    assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))


@pytest.mark.parametrize("numbers", [{}, {"step": 1, "epoch": 0}, {"step": 1, "epoch": -1, "position": 0}])
def test_misfit_trainer_state_changes_nothing(numbers: dict[str, int]) -> None:
    subject = trainer()
    subject.run_steps(1)
    before = subject.save()
    with pytest.raises(ValueError):
        subject.load({}, numbers)
    assert subject.save()[1] == before[1] and subject.save()[0].keys() == before[0].keys() != set()


def test_non_finite_loss_is_reported() -> None:
    subject = trainer()
    with torch.no_grad():
        next(subject.model.parameters()).fill_(math.nan)
    with pytest.raises(Diverged, match="nan") as error:
        subject.run_steps(2)
    assert error.value.exit_code == 1 and error.value.hint


def test_evaluation_does_not_change_trainer() -> None:
    subject = trainer()
    subject.run_steps(1)
    state, before = subject.save()[1], weights(subject)
    a = subject.evaluate(subject.batches.split.evaluation(4, 3))
    b = subject.evaluate(subject.batches.split.evaluation(4, 8), 3)
    assert a != b and subject.evaluate(subject.batches.split.evaluation(4, 3), 10) == a
    assert math.isnan(subject.evaluate([]))
    assert subject.model.training and subject.save()[1] == state
    assert all(torch.equal(x, y) for x, y in zip(before, weights(subject), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_trainer_works_on_gpu() -> None:
    made = trainer()
    subject = Trainer(made.model, CONFIG, made.batches, "cuda", torch.bfloat16, clock=lambda: 0.0)
    first = subject.run_steps(5)
    subject.run_steps(60)
    assert subject.evaluate(subject.batches.split.evaluation(4, 4)) < 1.2 < first.loss
    arrays, numbers = subject.save()
    subject.load(arrays, numbers)
    subject.run_steps(1)


def learner_of(tmp_path: Path) -> local_learner.LocalLearner:
    (tmp_path / "text.txt").write_text("".join(f"line {number} of a text\n" for number in range(250)))
    manifest = parse(
        "[model]\nlayers = 1\nwidth = 16\nheads = 2\ncontext = 8\n[run]\nrounds = 4\n"
        "[inner]\nschedule = 'cosine'\nwarmup = 2\nbatch = 2\n[outer]\nsync_every = 10\n"
    )
    return build_learner(
        manifest, Computing("cpu", 1), data=tmp_path / "text.txt", cache=tmp_path, here=tmp_path, clock=lambda: 0.0
    )


def test_memory_is_returned_before_the_steps_of_a_round_and_without_gradients_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps have that of the last round meanwhile, and the next round that of the gradients."""
    learner, left, steps = learner_of(tmp_path), list[tuple[int, int]](), list[None]()
    parameters = list(learner.trainer.model.parameters())
    learner.trainer.optimizer.register_step_post_hook(lambda *_: steps.append(None))
    monkeypatch.setattr(
        local_learner,
        "return_freed_memory",
        lambda: left.append((len(steps), sum(one.grad is not None for one in parameters))),
    )
    assert asyncio.run(learner.steps(2, asyncio.Event())).steps == 2
    assert left == [(0, 0), (2, 0)]


def test_learning_rate_of_a_peer_that_returns_follows_the_run(tmp_path):
    learner = learner_of(tmp_path)
    manifest = learner.manifest
    kept = learner.private()  # a checkpoint from before the first round
    assert learner.restore(kept)
    me = bytes(32)
    learner.assign(WorkShare([me], me, 3, step=manifest.steps_after(3)))
    learner.trainer.run_steps(1)
    rate = learning_rate(inner_of(manifest), 30)
    assert rate < 0.3 * manifest.inner.lr
    assert {group["lr"] for group in learner.trainer.optimizer.param_groups} == {rate}
