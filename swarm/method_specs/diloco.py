"""DiLoCo (Douillard et al., arXiv:2311.08105): one common outer SGD step with Nesterov momentum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from thinwire.swarm.choices import Balancing
from thinwire.swarm.method_specs.base import (
    DEFAULT_RATIO,
    LearningRate,
    MethodSpec,
    Momentum,
    OuterSgd,
    StepRatio,
    balanced,
    unused_ratio,
)


class DiLoCo(MethodSpec, frozen=True, tag="diloco"):
    """[outer] of the method "diloco".

    lr, momentum, nesterov: of the outer SGD on the mean pseudo-gradient.
    step_balancing: "equal", every peer makes H inner steps; or "by-speed", for unequal machines: as many as fit into the time
        that the median peer needs for H, so that all peers finish together. Contributions count by their tokens either way.
    max_step_ratio: with "by-speed", the largest ratio of a peer's inner steps to H.
    """

    tracks_data: ClassVar[bool] = True
    scored: ClassVar[bool] = True
    computable: ClassVar[bool] = True

    lr: LearningRate = 0.7
    momentum: Momentum = 0.9
    nesterov: bool = True
    step_balancing: Balancing = "equal"
    max_step_ratio: StepRatio = DEFAULT_RATIO

    @property
    def sgd(self) -> OuterSgd:
        """Hyper-parameters of the outer SGD."""
        return OuterSgd(self.lr, self.momentum, self.nesterov)

    @property
    def step_ratio(self) -> float:
        """Largest ratio of a peer's inner steps to `sync_every`."""
        return balanced(self.step_balancing, self.max_step_ratio)

    def contradictions(self, sparse: bool) -> Iterator[tuple[str, str]]:
        """Yield contradictions of the method's own keys."""
        yield from unused_ratio(self.step_balancing, self.max_step_ratio)
