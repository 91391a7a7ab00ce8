"""SparseLoCo (arXiv:2508.15706): DiLoCo with 200 times fewer bytes, a part of each pseudo-gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from msgspec import Meta
from thinwire.swarm.choices import Balancing, Collective, Denominator, OnExclusion
from thinwire.swarm.method_specs.base import (
    DEFAULT_RATIO,
    CostRow,
    Defaults,
    LearningRate,
    MethodSpec,
    OuterSgd,
    ResidualDecay,
    ResidualRule,
    StepRatio,
    Steps,
    balanced,
    unused_ratio,
)

LR_AFTER = 0.65
"""Default of lr_after, the value of the paper."""


class SparseLoCo(MethodSpec, frozen=True, tag="sparseloco"):
    """[outer] of the method "sparseloco".

    lr: α of the paper. There is no momentum: error feedback takes its place.
    residual_decay: part of the residual that is carried over to the next round.
    denominator: "contributor_mean" divides every coordinate by the weight of the peers that sent it, "mean" by that of all;
        "bounded_contributor_mean" divides as the first, but a coordinate that few peers sent as if as many as usual had sent
        it, so that one liar cannot move coordinates of its choice in full.
    on_exclusion: treatment of a contribution that the round's record does not name: "drop" treats it as sent, "restore"
        carries it over to the next round. Directions become stale: in our experiments "drop" was better.
    step_balancing, max_step_ratio: see DiLoCo.
    lr_change_round, lr_after: round from which on lr_after replaces lr; 0 = never.
    """

    codecs: ClassVar[tuple[str, ...]] = ("topk",)
    collective: ClassVar[Collective] = "all-gather"
    collectives: ClassVar[tuple[Collective, ...]] = ("sparse-butterfly",)
    defaults: ClassVar[Defaults] = {
        "exchange": {"codec": "topk(k=64,chunk=4096)|2bit|rice", "collective": "all-gather"}
    }
    tracks_data: ClassVar[bool] = True
    scored: ClassVar[bool] = True
    costs: ClassVar[CostRow] = "sparseloco"

    sync_every: Steps = 30
    lr: LearningRate = 1.0
    residual_decay: ResidualDecay = 0.95
    denominator: Denominator = "bounded_contributor_mean"
    on_exclusion: OnExclusion = "drop"
    step_balancing: Balancing = "equal"
    max_step_ratio: StepRatio = DEFAULT_RATIO
    lr_change_round: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0
    lr_after: LearningRate = LR_AFTER

    @property
    def sgd(self) -> OuterSgd:
        """Hyper-parameters of the outer SGD."""
        return OuterSgd(self.lr)

    @property
    def residual(self) -> ResidualRule:
        """Rule of error feedback."""
        return ResidualRule(self.residual_decay, self.denominator, self.on_exclusion)

    def lr_at(self, round: int) -> float:
        """Return the outer learning rate of a round."""
        return self.lr_after if 0 < self.lr_change_round <= round else self.lr

    @property
    def step_ratio(self) -> float:
        """Largest ratio of a peer's inner steps to `sync_every`."""
        return balanced(self.step_balancing, self.max_step_ratio)

    def contradictions(self, sparse: bool) -> Iterator[tuple[str, str]]:
        """Yield contradictions of the method's own keys."""
        yield from unused_ratio(self.step_balancing, self.max_step_ratio)
        if not self.lr_change_round and self.lr_after != LR_AFTER:
            yield (
                "outer.lr_after only applies with outer.lr_change_round",
                "remove the key, or set outer.lr_change_round",
            )
