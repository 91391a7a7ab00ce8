"""The inner optimizer, which each peer runs locally between two exchanges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from thinwire.node.training.muon import MuonWithAdamW, matrices
from thinwire.swarm.choices import InnerOptimizer, RateSchedule
from torch import Tensor, nn

FLOOR = 0.1
"""Fraction of the peak learning rate at the end of a cosine schedule."""


@dataclass(frozen=True, slots=True)
class InnerConfig:
    """The fields of the manifest's [inner], with `steps` resolved.

    steps: inner steps that the schedule spans, 0 = endless.

    lr: peak learning rate. betas: of AdamW's moments; SGD uses the first as its momentum. weight_decay: decoupled, on
    matrices only. warmup: steps over which lr rises. accumulate: batches of one step. clip: largest gradient norm, 0 =
    unlimited. momentum, adam_lr: of Muon, and of the AdamW beside it, which uses betas.
    """

    optimizer: InnerOptimizer = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    warmup: int = 50
    schedule: RateSchedule = "constant"
    steps: int = 0
    accumulate: int = 1
    clip: float = 1.0
    momentum: float = 0.95
    adam_lr: float = 1e-3


def learning_rate(config: InnerConfig, step: int) -> float:
    """Return the learning rate of inner step `step` (from 0).

    It rises linearly, then is constant or falls along half a cosine to a tenth.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant" or config.steps <= config.warmup:
        return config.lr
    done = min(1.0, (step - config.warmup) / (config.steps - config.warmup))
    return config.lr * (FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + math.cos(math.pi * done)))


def make_optimizer(model: nn.Module, config: InnerConfig) -> torch.optim.Optimizer:
    """Return the inner optimizer for the trainable parameters.

    It has separate groups for matrices (with decay) and vectors.

    A group's `share` is its fraction of the learning rate that is set at each step.
    """
    if config.optimizer == "muon":
        return _muon(model, config)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)
    return DecoupledSGD(groups, lr=config.lr, momentum=config.betas[0])


def _muon(model: nn.Module, config: InnerConfig) -> torch.optim.Optimizer:
    hidden, others = matrices(model)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in others if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    return MuonWithAdamW(
        hidden,
        [{**group, "share": config.adam_lr / config.lr} for group in groups if group["params"]],
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        adam_lr=config.adam_lr,
        betas=config.betas,
    )


class DecoupledSGD(torch.optim.SGD):
    """SGD with decoupled weight decay, which does not enter the momentum.

    Loshchilov and Hutter, arXiv 1711.05101.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Run one step; see torch.optim.SGD."""
        decays = [group["weight_decay"] for group in self.param_groups]
        for group, decay in zip(self.param_groups, decays, strict=True):
            if decay:
                torch._foreach_mul_(group["params"], 1.0 - group["lr"] * decay)
            group["weight_decay"] = 0.0
        try:
            return super().step(closure)
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay


class OptimizerArrays(Mapping[str, NDArray[Any]]):
    """Tensors of an optimizer as arrays.

    Those of a GPU are copied to the host when they are read, one at a time. Those in CPU memory are not copied: they change
    with the next step. Narrow floats widen.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> NDArray[Any]:
        value = self._tensors[name]
        wide = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
        array: NDArray[Any] = wide.detach().cpu().numpy()
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def optimizer_arrays(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerArrays:
    """Return the optimizer's tensors under "<entry>/<parameter>"; for any torch optimizer."""
    return OptimizerArrays(
        {
            f"{entry}/{name}": value
            for name, parameter in model.named_parameters()
            for entry, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
    )


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Restore the arrays of `optimizer_arrays`; parameters without an entry in `arrays` start fresh.

    Raises ValueError, before any change, for a name or a shape that does not belong to this model.
    """
    parameters = dict(model.named_parameters())
    on_device = {
        id(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if group.get("fused") or group.get("capturable")
    }
    state: dict[Tensor, dict[str, Any]] = {}
    for key, array in arrays.items():
        entry, _, name = key.partition("/")
        parameter = parameters.get(name)
        if parameter is None or array.shape not in ((), tuple(parameter.shape)):
            raise ValueError(f"optimizer state {key} {array.shape} does not fit the model")
        value = torch.from_numpy(np.array(array))
        # A step count is a CPU scalar, except for optimizers that stay on the GPU; moments have their parameter's
        # device and type.
        if array.shape == tuple(parameter.shape) and entry != "step":
            value = value.to(parameter.device, parameter.dtype)
        elif id(parameter) in on_device:
            value = value.to(parameter.device)
        state.setdefault(parameter, {})[entry] = value
    for parameter in parameters.values():
        optimizer.state.pop(parameter, None)
    optimizer.state.update(state)
