"""The inner loop: steps on this peer's data, synchronous, in the caller's thread."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from thinwire.node.training.batches import Batch, Batches, Cursor
from thinwire.node.training.inner_optimizer import (
    InnerConfig,
    OptimizerArrays,
    learning_rate,
    load_optimizer,
    make_optimizer,
    optimizer_arrays,
)
from thinwire.node.training.learner import StepReport, Stop
from thinwire.node.training.models.causal_model import Loss, loss_of
from thinwire.swarm.identity.errors import HintedError
from torch import nn

DIVERGED_HINT = (
    "start again if only this peer has diverged: it continues with the state of the swarm, or its last checkpoint; else lower "
    "inner.lr or raise inner.warmup, which makes another run, and begin that with --from CHECKPOINT"
)


class Diverged(HintedError):
    """The loss is not finite: this peer's state is useless."""

    exit_code: ClassVar[int] = 1


class CompileError(HintedError):
    """The model cannot be compiled on this machine."""

    exit_code: ClassVar[int] = 3


class Trainer:
    """Trains `model` (of a form that causal_model.py describes) on `batches`.

    `step` counts inner steps since the run began and determines the learning rate; a joiner sets it to the swarm's.
    `autocast`: element type of matrix products, None = that of the parameters. `clock` returns seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        config: InnerConfig,
        batches: Batches,
        device: torch.device | str = "cpu",
        autocast: torch.dtype | None = None,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.model = model.to(device)
        self.config = config
        self.batches = batches
        self.device = torch.device(device)
        self.optimizer = make_optimizer(self.model, config)
        self.step = 0
        self.portions: tuple[int, ...] = (batches.batch,) * config.accumulate
        """Samples of each forward pass of one step."""
        self._loss_of = loss_of(self.model)
        self._compiled: Loss | None = None
        self._autocast = autocast
        self._clock = clock

    def compile(self) -> None:
        """Compile the model for batches of the usual shape, which takes up to minutes. Raises CompileError.

        The module itself, its parameters and their names stay as they are: only inner steps call the compiled form.
        """
        compiled = loss_of(self.model, torch.compile(self.model))
        batch = self.batches.split.batch(self.batches.split.training[: self.portions[0]])
        self._compiled = compiled
        self.model.train()
        try:
            # Torch compiles in the first call. Its random numbers (dropout) must not be missing later.
            with torch.random.fork_rng():
                self._loss(batch).backward()
        except Exception as error:  # compilers raise many kinds
            cause = getattr(error, "inner_exception", error)
            raise CompileError(
                f"the model cannot be compiled: {(str(cause).strip() or type(cause).__name__).splitlines()[0]}",
                "install a C++ compiler, or remove the setting compile",
            ) from error
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    def run_steps(self, n: int, stop: Stop | None = None) -> StepReport:
        """Run n inner steps, or fewer if `stop` is set meanwhile. Raises Diverged if a loss is not finite."""
        self.model.train()
        began = self._clock()
        losses: list[torch.Tensor] = []
        tokens = 0
        for _ in range(n):
            if stop is not None and stop.is_set():
                break
            loss, seen = self._step()
            losses.append(loss)
            tokens += seen
        # Read the losses at the end only: on a GPU every read waits for all queued work.
        values = torch.stack(losses).double().cpu().tolist() if losses else []
        if not all(map(math.isfinite, values)):
            raise Diverged(f"the loss was {values[-1]} at inner step {self.step}", DIVERGED_HINT)
        mean = math.fsum(values) / len(values) if values else math.nan
        return StepReport(len(values), mean, values[-1] if values else math.nan, tokens, self._clock() - began)

    def _step(self) -> tuple[torch.Tensor, int]:
        rate = learning_rate(self.config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("share", 1.0)
        total = torch.zeros((), device=self.device)
        tokens = 0
        for size in self.portions:
            batch = self.batches.next(size)
            loss = self._loss(batch) / (sum(self.portions) / size)
            loss.backward()
            total += loss.detach()
            tokens += batch[1].numel()
        if self.config.clip > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # at the end: a round has the memory of the gradients
        self.step += 1
        return total, tokens

    def _loss(self, batch: Batch) -> torch.Tensor:
        inputs, targets = (tensor.to(self.device, non_blocking=True) for tensor in batch)
        with torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None):
            # Evaluations have other shapes and modes, each of which would be compiled again.
            compiled = self._compiled if self.model.training else None
            return (compiled or self._loss_of)(inputs, targets)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], n: int | None = None) -> float:
        """Return the mean loss per token over the first n batches (all if None); NaN without batches."""
        training = self.model.training
        self.model.eval()
        total, tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for batch in itertools.islice(batches, n):
            total += self._loss(batch).double() * batch[1].numel()
            tokens += batch[1].numel()
        self.model.train(training)
        return total.item() / tokens if tokens else math.nan

    def save(self) -> tuple[OptimizerArrays, dict[str, int]]:
        """Return the state that only this peer has: the optimizer's arrays, and step and cursor.

        The arrays are valid until the next step.
        """
        cursor = self.batches.cursor
        numbers = {"step": self.step, "epoch": cursor.epoch, "position": cursor.position}
        return optimizer_arrays(self.model, self.optimizer), numbers

    def load(self, arrays: Mapping[str, NDArray[Any]], numbers: Mapping[str, int]) -> None:
        """Continue from the result of `save`. Raises ValueError, without any change, if it does not fit."""
        try:
            step, epoch, position = (int(numbers[key]) for key in ("step", "epoch", "position"))
        except KeyError as error:
            raise ValueError(f"a trainer's state without {error}") from None
        if min(step, epoch, position) < 0:
            raise ValueError("a trainer's state with negative numbers")
        load_optimizer(self.model, self.optimizer, arrays)
        self.step = step
        self.batches.cursor = Cursor(epoch, position)
