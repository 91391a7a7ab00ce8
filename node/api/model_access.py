"""Access of a peer to the parameters and buffers of a user's module."""

from __future__ import annotations

import sys
from typing import cast

import torch
from thinwire.compression.core.types import Floats
from thinwire.compression.device import Vector
from thinwire.node.api.ranks import GroupError
from thinwire.node.state.layout import Layout, layout_of
from thinwire.swarm.choices import BufferRule
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module without the wrappers of torch.compile and DistributedDataParallel.

    Raises GroupError for FullyShardedDataParallel: its flat shards differ on the ranks, and look like whole parameters.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported here: that takes a second
    if fsdp is not None and any(isinstance(one, fsdp.FullyShardedDataParallel) for one in model.modules()):
        raise GroupError(
            "the model is sharded by FullyShardedDataParallel, which has no parameters that can be averaged",
            "shard the model with torch.distributed.fsdp.fully_shard instead",
        )
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = cast(nn.Module, model._orig_mod)
        else:
            return model


def checked(model: nn.Module, optimizer: torch.optim.Optimizer, buffers: BufferRule) -> tuple[Layout, nn.Module]:
    """Return the layout of a model, and the model without wrappers.

    Raises TypeError, ValueError and GroupError, see `Swarm.wrap`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    module = unwrapped(model)
    layout = layout_of(module, buffers=buffers)
    if not layout.total:
        raise ValueError("the model has no trainable parameters: there is nothing to average")
    known = {id(parameter) for parameter in module.parameters()}
    if any(id(tensor) not in known for group in optimizer.param_groups for tensor in group["params"]):
        raise ValueError("the optimizer holds tensors that are not parameters of this model: they would stay local")
    return layout, module


class ModelAccess:
    """Parameters and buffers of a module in this process."""

    def __init__(self, layout: Layout, module: nn.Module) -> None:
        self.layout, self.module = layout, module
        self.devices = sorted({parameter.device for parameter in module.parameters()}, key=str)

    def first(self) -> Floats:
        """Return parameters and buffers as they are."""
        return self.layout.first(self.module)

    def read(self, start: int, stop: int, out: Vector) -> None:
        """Read a range, see replica.Read."""
        self.layout.read(self.module, out, start)

    def write(self, theta: Floats, start: int = 0, keep: float = 0.0) -> None:
        """Set a range, see ParameterWrite."""
        self.layout.write(self.module, theta, start, keep)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for queued GPU work: two threads use the parameters, never at the same time."""
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
