"""Muon for matrices, AdamW for everything else: the inner optimizer of MuLoCo (arXiv 2505.23725)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from thinwire.swarm.identity.errors import NotInstalled
from torch import nn
from torch.optim import AdamW, Optimizer

NEWTON_SCHULZ = 5
"""Steps of the iteration that makes an update nearly orthogonal."""


def matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trainable parameters for Muon, and all others.

    The others are vectors, embeddings, the head, tensors of other ranks.

    The head of a vocabulary is recognized by position and shape: the model's last matrix, if it has the shape of an
    embedding and none is tied to one. Its rows are tokens, not directions.
    """
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    known = {id(table) for table in tables}
    tied = any(
        id(getattr(module, "weight", None)) in known
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
    )
    found = [p for p in model.parameters() if p.ndim == 2 and id(p) not in known]
    head = found[-1] if found and not tied and found[-1].shape in {table.shape for table in tables} else None
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hidden = [p for p in trainable if p.ndim == 2 and id(p) not in known and p is not head]
    chosen = {id(parameter) for parameter in hidden}
    return hidden, [p for p in trainable if id(p) not in chosen]


class MuonWithAdamW(Optimizer):
    """torch's Muon and AdamW as one optimizer: one list of groups, one state.

    Muon's part: Nesterov momentum, then five Newton-Schulz steps; the orthogonal result is scaled by √max(1,
    rows/columns). torch stores the momentum as a mean (lerp) where the paper has a sum: the direction is the same, and
    only the direction is left after the iteration, which torch computes in bfloat16. `rest`: AdamW's groups.

    Raises NotInstalled.
    """

    def __init__(
        self,
        hidden: Iterable[nn.Parameter],
        rest: Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        adam_lr: float,
        betas: tuple[float, float],
    ) -> None:
        try:
            from torch.optim import Muon
        except ImportError:
            raise NotInstalled(
                f"torch {torch.__version__} has no Muon, which inner.optimizer = 'muon' needs",
                "install torch 2.9 or newer",
            ) from None
        hidden, rest = list(hidden), list(rest)
        self._parts: list[Optimizer] = []
        if hidden:
            self._parts.append(
                Muon(hidden, lr=lr, momentum=momentum, weight_decay=weight_decay, ns_steps=NEWTON_SCHULZ)
            )
        if rest:
            self._parts.append(AdamW(rest, lr=adam_lr, betas=betas))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one step of both; see torch.optim.Optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        place = 0
        for part in self._parts:
            # Loading a state replaces this optimizer's groups and state: pass the present ones to the parts.
            count = len(part.param_groups)
            part.state, part.param_groups = self.state, self.param_groups[place : place + count]
            place += count
            part.step()
        return loss
