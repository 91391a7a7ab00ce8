"""The learner of a daemon: evaluation on held-out text during a run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from thinwire.node.training.local_learner import Computing, LocalLearner, build_learner
from thinwire.swarm.manifest.parser import parse

SMALL = "[model]\nlayers = 1\nwidth = 16\nheads = 2\ncontext = 8\n"


def learner(tmp_path: Path, toml: str) -> LocalLearner:
    (tmp_path / "text.txt").write_text("a piece of text. " * 3000)
    return build_learner(
        parse(SMALL + toml),
        Computing("cpu", 1),
        data=tmp_path / "text.txt",
        cache=tmp_path / "cache",
        here=tmp_path,
        clock=lambda: 0.0,
    )


@pytest.mark.parametrize(
    ("toml", "samples"),
    [
        ("[outer]\nsync_every = 10\n[inner]\nbatch = 4\naccumulate = 2", 24),  # 0.3 of the 80 samples of a round
        ("[outer]\nsync_every = 1\n[inner]\nbatch = 1", 1),
        ("[outer]\nsync_every = 1000\n[inner]\nbatch = 8\n[data]\nholdout = 0.5", 256),
    ],
)
def test_held_out_loss_takes_a_tenth_of_a_round_and_changes_nothing(tmp_path: Path, toml: str, samples: int) -> None:
    subject, seen = learner(tmp_path, toml), []
    subject.trainer.model.register_forward_pre_hook(lambda model, arguments: seen.append(arguments[0].shape[0]))
    theta = subject.parameters()
    loss = subject.held_out_loss()
    assert sum(seen) == samples and max(seen) <= subject.manifest.inner.batch
    assert loss == pytest.approx(math.log(256), abs=0.2) and loss == subject.held_out_loss()
    assert (subject.parameters() == theta).all() and subject.trainer.model.training and torch.is_grad_enabled()


def test_held_out_loss_without_held_out_text_is_unknown(tmp_path: Path) -> None:
    assert math.isnan(learner(tmp_path, "[data]\nholdout = 0").held_out_loss())
