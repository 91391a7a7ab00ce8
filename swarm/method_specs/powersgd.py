"""PowerSGD (arXiv:1905.13727): DiLoCo with matrices as two thin factors; a step takes two rounds."""

from __future__ import annotations

from typing import ClassVar

from thinwire.swarm.choices import OnExclusion
from thinwire.swarm.method_specs.base import CostRow, Defaults, ResidualRule
from thinwire.swarm.method_specs.diloco import DiLoCo


class PowerSGDMethod(DiLoCo, frozen=True, tag="powersgd"):
    """[outer] of the method "powersgd".

    on_exclusion: see SparseLoCo. The other keys are those of DiLoCo.
    """

    codecs: ClassVar[tuple[str, ...]] = ("powersgd",)
    defaults: ClassVar[Defaults] = {"exchange": {"codec": "powersgd(rank=4)"}}
    tracks_data: ClassVar[bool] = False
    scored: ClassVar[bool] = False
    computable: ClassVar[bool] = False
    costs: ClassVar[CostRow] = "powersgd"
    rounds_per_step: ClassVar[int] = 2

    on_exclusion: OnExclusion = "drop"

    @property
    def residual(self) -> ResidualRule:
        """Rule of error feedback."""
        return ResidualRule(on_exclusion=self.on_exclusion)
