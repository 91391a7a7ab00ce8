"""A Trainer of transformers that steps through a swarm's optimizer and ends with the run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from thinwire.node.api.swarm import Swarm
from torch import nn

if TYPE_CHECKING:
    from transformers import Trainer


class Model(nn.Module):
    """A model whose loss is the distance of one parameter from the mean of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": (self.value - x.mean()).square()}


class Summing(Model):
    """The same model with a loss that the number of labels of a whole step divides, as models of transformers have it."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **more: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": (self.value - x.mean(1)).square().sum() / more["num_items_in_batch"]}


class Optimizer(torch.optim.Optimizer):
    """Stands for a SwarmOptimizer: adds to its inner optimizer's step, as an exchange does."""

    def __init__(self, model: Model, inner: torch.optim.Optimizer, loss: Callable[[], torch.Tensor | None]) -> None:
        super().__init__(inner.param_groups, {})
        self.model, self.inner, self.steps, self.loss_of_step = model, inner, 0, loss
        self.losses: list[float] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        before = self.model.value.item()
        self.inner.step()
        loss = self.loss_of_step()
        assert loss is not None
        self.losses.append(loss.item())
        self.steps += self.model.value.item() != before
        if self.steps == 3:
            self.model.value.data.fill_(7.0)  # as an exchange sets parameters


class Member:
    """Stands for a Swarm: a run of three steps."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.optimizer: Optimizer | None = None

    @property
    def done(self) -> bool:
        return self.optimizer is not None and self.optimizer.steps == 3

    def wrap(
        self,
        model: Model,
        inner: torch.optim.Optimizer,
        loss_of_step: Callable[[], torch.Tensor | None],
        **more: object,
    ) -> Optimizer:
        self.log.append((type(inner).__name__, more))
        self.optimizer = Optimizer(model, inner, loss_of_step)
        return self.optimizer

    def leave(self) -> None:
        self.log.append("left")


def trainer(path: Path, member: Member, steps: int, kind: type[Model] = Model) -> Trainer:
    from transformers import Trainer, TrainingArguments  # two seconds, which other processes of tests need not spend

    arguments = TrainingArguments(
        output_dir=str(path), max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=0.1, lr_scheduler_type="constant", use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    data = [{"x": torch.full((2,), 1.0 + 0.1 * number), "labels": torch.zeros(1)} for number in range(64)]
    callback = Swarm.trainer_callback(member, print)  # type: ignore[arg-type]
    return Trainer(kind(), arguments, train_dataset=data, callbacks=[callback])  # type: ignore[arg-type]


def test_trainer_steps_through_the_swarm_and_ends_with_the_run(tmp_path: Path) -> None:
    member = Member()
    subject = trainer(tmp_path, member, steps=50)
    subject.train()
    assert member.log == [("AdamW", {"batch": 8, "on_round": print}), "left"]
    assert subject.state.global_step == 3, "a step is two batches, and the run has three"
    assert subject.model.value.item() == 7.0, "nothing changes what the last exchange set"  # type: ignore[union-attr]


def test_trainer_that_ends_before_the_run_leaves(tmp_path: Path) -> None:
    member = Member()
    trainer(tmp_path, member, steps=2).train()
    assert member.optimizer is not None and member.optimizer.steps == 2 and member.log[-1] == "left"


@pytest.mark.parametrize("kind", [Model, Summing])
def test_swarm_is_told_the_loss_that_the_trainer_logs(tmp_path: Path, kind: type[Model]) -> None:
    member = Member()
    subject = trainer(tmp_path, member, steps=2, kind=kind)
    subject.train()
    logged = [entry["loss"] for entry in subject.state.log_history if "loss" in entry]
    assert member.optimizer is not None and len(logged) == 2 and logged[0] != logged[1]
    assert member.optimizer.losses == pytest.approx(logged, abs=1e-3)
    more = {"num_items_in_batch": 4} if kind is Summing else {}
    model: Any = subject.model
    model(x=torch.ones(4, 2), labels=torch.zeros(4, 1), **more)["loss"].backward()
    assert member.optimizer.loss_of_step() is None, "a model whose training has ended is observed no more"


def test_missing_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "thinwire.node.api.trainer_callback", None)
    with pytest.raises(ImportError, match=r"pip install 'thinwire\[models\]' accelerate"):
        Swarm.trainer_callback(Member())  # type: ignore[arg-type]


@pytest.mark.trial
def test_interface_loads_neither_transformers_nor_accelerate() -> None:
    code = "import sys, thinwire; thinwire.Swarm; sys.exit(bool({'transformers', 'accelerate', 'peft'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0
