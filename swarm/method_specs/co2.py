"""CO2 (arXiv:2401.16265): a round overlaps all inner steps of the next one; late steps count less."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta
from thinwire.swarm.method_specs.base import CostRow, LearningRate, MethodSpec, Momentum, OuterSgd, Steps


class CO2(MethodSpec, frozen=True, tag="co2"):
    """[outer] of the method "co2".

    lr, momentum: α and β of the paper; the momentum has a staleness penalty.
    momentum_clip: φ, largest absolute element of the momentum, in units of a parameter; 0 = not clipped.
    """

    costs: ClassVar[CostRow] = "eager"

    sync_every: Steps = 30
    lr: LearningRate = 1.0
    momentum: Momentum = 0.2
    momentum_clip: Annotated[float, Meta(ge=0, le=1e6)] = 0.0

    @property
    def sgd(self) -> OuterSgd:
        """Hyper-parameters of the outer step."""
        return OuterSgd(self.lr, self.momentum, False)

    @property
    def overlap_steps(self) -> int:
        """All inner steps of a round."""
        return self.sync_every
