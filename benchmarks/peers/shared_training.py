"""Training that all programs of loss.py and overlap.py share: the same model, first weights, batches and inner optimizer.

Reads nothing of thinwire but the file of its model, so that it also runs in environments of others.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


def build(options: dict[str, Any]) -> nn.Module:
    """The built-in model; `source` is its file, `model` its sizes."""
    spec = importlib.util.spec_from_file_location("built_in_model", options["source"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    model: nn.Module = module.Transformer(module.ModelConfig(256, **options["model"]), options["seed"])
    return model


class SharedTraining:
    """One peer's training. `tokens`: a file of its batches, [steps, batch, context + 1]; `every`: syncs between two snapshots.

    `pace`: seconds that a step takes at least, as if the peer had a slower machine of its own.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.model = build(options)
        self._tokens = np.load(options["tokens"])
        self._warmup, self._lr = options["warmup"], options["lr"]
        self._clip, self._every, self._pace = options["clip"], options["every"], options.get("pace", 0.0)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=self._lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.step = 0
        self._syncs, self._due = 0, 0.0
        self._moments: list[float] = []
        self._snapshots: list[NDArray[np.float32]] = []

    def begin(self) -> None:
        """The first step's time starts."""
        self._due = time.monotonic()

    def gradients(self) -> Tensor:
        """Forward and backward on the next batch, with this step's learning rate; the loss."""
        for group in self.inner.param_groups:
            group["lr"] = self._lr * min(1.0, (self.step + 1) / self._warmup)
        rows = torch.from_numpy(self._tokens[self.step % len(self._tokens)].astype(np.int64))
        self.inner.zero_grad(set_to_none=True)
        loss: Tensor = self.model(rows[:, :-1], rows[:, 1:])[1]
        loss.backward()
        self.step += 1
        return loss

    def clip(self) -> None:
        """Clip the gradients, as all programs do before the inner optimizer's step."""
        nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)

    def rest(self) -> None:
        """Sleep for the rest of the step's time."""
        if self._pace:
            self._due = max(self._due + self._pace, time.monotonic() - self._pace)
            time.sleep(max(0.0, self._due - time.monotonic()))

    def snapshot(self, named: dict[str, Tensor] | None = None) -> None:
        """Keep the parameters that all peers have in common now: the model's, or those given."""
        self._syncs += 1
        if self._every and self._syncs % self._every == 0:
            self._moments.append(time.monotonic())
            values = dict(self.model.named_parameters()) if named is None else named
            flat = [values[name].detach().flatten().float() for name, _ in self.model.named_parameters()]
            self._snapshots.append(torch.cat(flat).numpy())

    def save(self, path: str) -> list[float]:
        """Write the snapshots; their moments."""
        if self._snapshots:
            np.save(path, np.stack(self._snapshots))
        return self._moments


def interface() -> str:
    """The network device that is not loopback; loopback when there is no other."""
    import socket

    return next((name for _, name in socket.if_nameindex() if name != "lo"), "lo")
