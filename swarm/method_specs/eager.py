"""Eager updates (arXiv:2502.12996): a round is in progress during all inner steps of the next one."""

from __future__ import annotations

from typing import ClassVar

from thinwire.swarm.method_specs.base import CostRow, LearningRate, MethodSpec, Momentum, OuterSgd, Steps


class Eager(MethodSpec, frozen=True, tag="eager"):
    """[outer] of the method "eager": each peer replaces its own last contribution in the mean.

    lr, momentum, nesterov: of the outer SGD on the mean pseudo-gradient.
    """

    private_start: ClassVar[bool] = True
    costs: ClassVar[CostRow] = "eager"

    sync_every: Steps = 30
    lr: LearningRate = 0.2
    momentum: Momentum = 0.9
    nesterov: bool = True

    @property
    def sgd(self) -> OuterSgd:
        """Hyper-parameters of the outer SGD."""
        return OuterSgd(self.lr, self.momentum, self.nesterov)

    @property
    def overlap_steps(self) -> int:
        """All inner steps of a round."""
        return self.sync_every
