"""View of a subspace section as part of the whole model, which other peers train.

The swarm exchanges and stores the full parameter W of a fragment. A confined stage trains Z instead: after W was set, Z
is its projection UᵀW, and the remainder of W is not part of this stage's model. For other peers W becomes W + U·(Z −
UᵀW): a stage's pseudo-gradient is measured from its projected start, and the remainder stays as it is. The embedding is
complete: its part outside of the subspace is frozen again whenever it is set.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from thinwire.compression.core.types import Floats
from thinwire.node.pipeline.model.frozen_embedding import FrozenEmbedding
from thinwire.node.pipeline.model.subspace_model import SubspaceEmbedding, SubspaceLinear, confine
from thinwire.node.state.layout import Layout
from thinwire.node.training.models.transformer import Transformer
from torch import Tensor


@dataclass(slots=True)
class _Lift:
    """Confined parameter. `whole`: value that was set, [rows, columns]; `start`: weight at that time."""

    module: SubspaceLinear | SubspaceEmbedding
    whole: Tensor
    start: Tensor
    frozen: FrozenEmbedding = field(default_factory=FrozenEmbedding)

    @property
    def projected(self) -> Tensor:
        """Return the part of the set value that the section has."""
        module, u = self.module, self.module.u
        return u @ self.start if isinstance(module, SubspaceLinear) else module.fixed + self.start @ u.mT

    def rows(self, low: int, high: int) -> Tensor:
        """Return rows [low, high) of the parameter as the whole model has it."""
        moved, u = self.module.weight.detach() - self.start, self.module.u
        step = u[low:high] @ moved if isinstance(self.module, SubspaceLinear) else moved[low:high] @ u.mT
        return self.whole[low:high] + step

    def set(self, values: Tensor, inner: slice, keep: float) -> None:
        """Set elements `inner` to keep · current values + (1 − keep) · values, and project."""
        if keep or values.numel() < self.whole.numel():
            whole = self.rows(0, len(self.whole)).reshape(-1)
            whole[inner] = torch.lerp(values, whole[inner], keep)
            self.whole = whole.view(self.whole.shape)
        else:
            self.whole.copy_(values.view(self.whole.shape))
        module, u = self.module, self.module.u
        if isinstance(module, SubspaceLinear):
            self.start = u.mT @ self.whole
        else:
            self.frozen = FrozenEmbedding.encode(self.whole - self.whole @ u @ u.mT)
            module.fixed.copy_(self.frozen.rows(*self.whole.shape))
            self.start = (self.whole - module.fixed) @ u
        module.weight.detach().copy_(self.start)


class WholeModelView:
    """`module`, of a section or whole, confined to the subspace of `k` and the run's seed.

    `layout`: of the unconfined model. Raises ValueError unless 1 ≤ k ≤ width.
    """

    def __init__(self, module: Transformer, layout: Layout, k: int, seed: int) -> None:
        wholes = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        confine(module, k, seed)
        self._module, self._layout, self._lifts = module, layout, dict[str, _Lift]()
        for name, part in module.named_modules():
            if isinstance(part, SubspaceLinear | SubspaceEmbedding):
                whole = wholes[f"{name}.weight"]
                self._lifts[f"{name}.weight"] = lift = _Lift(part, whole, part.weight.detach())
                lift.set(whole, slice(None), 0.0)

    @property
    def frozen(self) -> FrozenEmbedding:
        """Return the frozen part of the embedding; empty if the section has no embedding."""
        return next((lift.frozen for lift in self._lifts.values() if lift.frozen.tag), FrozenEmbedding())

    def read(self, start: int, stop: int, out: Floats) -> None:
        """Copy the section's parameters [start, stop) of the whole model; before a step, the set values."""
        for piece, inner, outer in self._layout.touched(start, stop):
            lift = self._lifts.get(piece.name)
            if lift is None:
                self._layout.read(self._module, out[outer], start + outer.start)
                continue
            columns = piece.shape[1]
            low, high = inner.start // columns, -(-inner.stop // columns)
            values = lift.rows(low, high).reshape(-1)[inner.start - low * columns : inner.stop - low * columns]
            torch.from_numpy(out[outer]).copy_(values)

    def write(self, theta: Floats, start: int = 0, keep: float = 0.0) -> None:
        """Set the section's parameters [start, start + theta.size) of the whole model; see Learner."""
        for piece, inner, outer in self._layout.touched(start, start + theta.size):
            lift = self._lifts.get(piece.name)
            if lift is None:
                self._layout.write(self._module, theta[outer], start + outer.start, keep)
            else:
                lift.set(torch.from_numpy(np.array(theta[outer])), inner, keep)
