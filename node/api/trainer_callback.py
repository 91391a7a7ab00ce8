"""Callback with which a Trainer of the library transformers takes part in a swarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

Wrap: TypeAlias = Callable[[nn.Module, torch.optim.Optimizer, int], torch.optim.Optimizer]
"""Function of model, optimizer and samples of a step that returns the optimizer to train with."""


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
        wrapped = self._wrap(
            present["model"], optimizer.optimizer, args.train_batch_size * args.gradient_accumulation_steps
        )
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
        self._leave()
