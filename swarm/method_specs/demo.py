"""DeMo (arXiv:2411.19870): each SGD step exchanges the strongest coefficients of each momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta
from thinwire.swarm.choices import Collective, Denominator, OnExclusion
from thinwire.swarm.method_specs.base import (
    CostRow,
    Defaults,
    LearningRate,
    MethodSpec,
    OuterSgd,
    ResidualDecay,
    ResidualRule,
    Steps,
)


class DeMo(MethodSpec, frozen=True, tag="demo"):
    """[outer] of the method "demo".

    lr: length of the sign step.
    weight_decay: weight decay of the sign step.
    residual_decay, denominator, on_exclusion: see SparseLoCo.
    """

    codecs: ClassVar[tuple[str, ...]] = ("demo",)
    collective: ClassVar[Collective] = "all-gather"
    defaults: ClassVar[Defaults] = {
        "inner": {"optimizer": "sgd", "lr": 1.0, "betas": (0.0, 0.0), "weight_decay": 0.0, "warmup": 0},
        "exchange": {"codec": "demo(k=32,chunk=4096)|2bit|rice", "collective": "all-gather"},
    }
    required: ClassVar[Mapping[str, tuple[Mapping[str, object], str, str]]] = {
        "inner": (
            {"optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0},
            "the method 'demo' needs plain SGD: inner.optimizer must be 'sgd', inner.betas[0] and inner.weight_decay 0",
            "remove the keys; outer.residual_decay and outer.weight_decay take their place",
        )
    }
    tracks_data: ClassVar[bool] = True
    costs: ClassVar[CostRow] = "sparseloco"

    sync_every: Steps = 1
    lr: LearningRate = 4e-4
    weight_decay: Annotated[float, Meta(ge=0, le=10)] = 0.1
    residual_decay: ResidualDecay = 0.999
    denominator: Denominator = "bounded_contributor_mean"
    on_exclusion: OnExclusion = "drop"

    @property
    def sgd(self) -> OuterSgd:
        """Hyper-parameters of the outer step."""
        return OuterSgd(self.lr)

    @property
    def residual(self) -> ResidualRule:
        """Rule of error feedback."""
        return ResidualRule(self.residual_decay, self.denominator, self.on_exclusion)

    @property
    def sign_decay(self) -> float:
        """Weight decay of the sign step."""
        return self.weight_decay
