"""A confined section as the whole model has it: where weak peers train in a subspace, and others all of the same model.

What the swarm exchanges, and every peer keeps of a fragment, is the unconfined parameter W. A confined stage trains Z in its
place: after W was set, Z is its projection UᵀW, and what W has beside U·Z is not in this stage's model. For the others W
has become W + U·(Z − UᵀW): so a stage's own pseudo-gradient is that from its projected start, and what it does not see stays
as it is. The embedding is all there: what of it lies outside of the subspace is frozen anew whenever it was set.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from thinwire.compression.codec import Floats
from torch import Tensor

from ..fragments import Layout
from .confined import Confined, ConfinedEmbedding, confine
from .frozen import Frozen
from .section import Section


@dataclass(slots=True)
class _Lift:
    """A parameter that is confined. `whole`: what was set, [rows, columns]; `start`: what the weight was then."""

    module: Confined | ConfinedEmbedding
    whole: Tensor
    start: Tensor
    frozen: Frozen = field(default_factory=Frozen)

    @property
    def projected(self) -> Tensor:
        """What the section has of what was set."""
        module, u = self.module, self.module.u
        return u @ self.start if isinstance(module, Confined) else module.fixed + self.start @ u.mT

    def rows(self, low: int, high: int) -> Tensor:
        """Rows [low, high) of the parameter as the whole model has it."""
        moved, u = self.module.weight.detach() - self.start, self.module.u
        step = u[low:high] @ moved if isinstance(self.module, Confined) else moved[low:high] @ u.mT
        return self.whole[low:high] + step

    def set(self, values: Tensor, inner: slice, keep: float) -> None:
        """Set elements `inner` to keep · what they are + (1 − keep) · values, and project."""
        if keep or values.numel() < self.whole.numel():
            whole = self.rows(0, len(self.whole)).reshape(-1)
            whole[inner] = torch.lerp(values, whole[inner], keep)
            self.whole = whole.view(self.whole.shape)
        else:
            self.whole.copy_(values.view(self.whole.shape))
        module, u = self.module, self.module.u
        if isinstance(module, Confined):
            self.start = u.mT @ self.whole
        else:
            self.frozen = Frozen.encode(self.whole - self.whole @ u @ u.mT)
            module.fixed.copy_(self.frozen.rows(*self.whole.shape))
            self.start = (self.whole - module.fixed) @ u
        module.weight.detach().copy_(self.start)


class Projection:
    """`section` confined to the subspace of `k` and the run's seed; `layout` is that of the model that it is not yet.

    Raises ValueError unless 1 ≤ k ≤ width.
    """

    def __init__(self, section: Section, layout: Layout, k: int, seed: int) -> None:
        wholes = {name: parameter.detach().clone() for name, parameter in section.named_parameters()}
        confine(section, k, seed)
        self._section, self._layout, self._lifts = section, layout, dict[str, _Lift]()
        for name, module in section.named_modules():
            if isinstance(module, Confined | ConfinedEmbedding):
                whole = wholes[f"{name}.weight"]
                self._lifts[f"{name}.weight"] = lift = _Lift(module, whole, module.weight.detach())
                lift.set(whole, slice(None), 0.0)

    @property
    def frozen(self) -> Frozen:
        """The frozen part of the embedding; none where that is not the section's."""
        return next((lift.frozen for lift in self._lifts.values() if lift.frozen.tag), Frozen())

    def read(self, start: int, stop: int, out: Floats) -> None:
        """Copy parameters [start, stop) of the whole model, which are the section's; before a step they are what was set."""
        for piece, inner, outer in self._layout.touched(start, stop):
            lift = self._lifts.get(piece.name)
            if lift is None:
                self._layout.read(self._section, out[outer], start + outer.start)
                continue
            columns = piece.shape[1]
            low, high = inner.start // columns, -(-inner.stop // columns)
            values = lift.rows(low, high).reshape(-1)[inner.start - low * columns : inner.stop - low * columns]
            torch.from_numpy(out[outer]).copy_(values)

    def write(self, theta: Floats, start: int = 0, keep: float = 0.0) -> None:
        """Set parameters [start, start + theta.size) of the whole model, which are the section's; see Learner."""
        for piece, inner, outer in self._layout.touched(start, start + theta.size):
            lift = self._lifts.get(piece.name)
            if lift is None:
                self._layout.write(self._section, theta[outer], start + outer.start, keep)
            else:
                lift.set(torch.from_numpy(np.array(theta[outer])), inner, keep)
