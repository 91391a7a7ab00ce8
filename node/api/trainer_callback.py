"""Callback with which a Trainer of the library transformers takes part in a swarm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

Wrap: TypeAlias = Callable[[nn.Module, torch.optim.Optimizer, int, Callable[[], Tensor | None]], torch.optim.Optimizer]
"""Function of model, optimizer, samples of a step, and source of its loss; returns an optimizer."""


class StepLoss:
    """Loss of one step of a Trainer: a sum over its micro-batches.

    The trainer passes it to callbacks only after the step. A micro-batch counts with the weight with which the trainer
    propagates its loss backward: by tokens, or equally. This weight is the gradient at the loss, so the sum is right for
    every version and setting of the trainer. scaler: that of the gradients, which multiplies them by its scale.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None = None) -> None:
        self._scaler = scaler
        self._sum: Tensor | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def observe(self, model: nn.Module, inputs: object, outputs: object) -> None:
        """Remember the loss of a forward pass, once it is propagated backward; a hook of the model."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        # With gradient checkpointing, layers are computed twice, but not the whole model, to which the hook belongs.
        if model.training and isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
            value = loss.detach() / (1.0 if self._scaler is None else self._scaler.get_scale())
            loss.register_hook(lambda weight: self._add(value * weight))

    def _add(self, part: Tensor) -> None:
        self._sum = part if self._sum is None else self._sum + part

    def take(self) -> Tensor | None:
        """Return the loss since the last call, on its device; None if the model has given none."""
        taken, self._sum = self._sum, None
        return taken


class SwarmCallback(TrainerCallback):
    """Takes part in a swarm while a Trainer trains, see `Swarm.trainer_callback`.

    `wrap` makes a member, `done` returns whether the run is over, `leave` leaves the swarm.
    """

    def __init__(self, wrap: Wrap, done: Callable[[], bool], leave: Callable[[], None]) -> None:
        self._wrap, self._done, self._leave = wrap, done, leave

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **present: Any
    ) -> None:
        """Become a member with the trainer's model and optimizer."""
        optimizer = present["optimizer"]
        assert isinstance(optimizer, AcceleratedOptimizer)
        model, loss = present["model"], StepLoss(optimizer.scaler)
        batch = args.train_batch_size * args.gradient_accumulation_steps
        wrapped = self._wrap(model, optimizer.optimizer, batch, loss.take)
        self._observed = model.register_forward_hook(loss.observe)
        # The trainer has this object already, and no callback can replace it: so initialize it again, with the other optimizer.
        AcceleratedOptimizer.__init__(optimizer, wrapped, device_placement=False, scaler=optimizer.scaler)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **present: Any
    ) -> None:
        """End training with the run."""
        control.should_training_stop |= self._done()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **present: Any
    ) -> None:
        """Leave the swarm, so that no peer waits for one that does not train any more."""
        self._observed.remove()
        self._leave()
