"""NoLoCo (Kolehmainen et al., arXiv:2506.10911): gossip with random partners; replicas differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from msgspec import Meta
from thinwire.swarm.method_specs.base import (
    DENSE,
    CostRow,
    Defaults,
    LearningRate,
    MethodSpec,
    Momentum,
    OuterSgd,
    ResidualDecay,
    Steps,
)

NEAR = 0.9
"""Fraction of the limit of gamma above which a manifest causes a warning."""


class NoLoCo(MethodSpec, frozen=True, tag="noloco"):
    """[outer] of the method "noloco".

    lr, momentum: β and α of the paper. There is no Nesterov momentum.
    gamma: how strongly partners are drawn together. If it equals lr, the codec is "fp32" and the slow weights have one part,
        one vector travels instead of two. The paper gives no value; its code uses lr.
    residual_decay: part of what the codec has lost that is carried over to the next round.
    slow_weight_parts: n, parts of the slow weights that take turns: a round draws partners together in one of them, so that
        the bytes of the slow weights fall by n (not with "fp32" and gamma = lr, where one vector has both), and replicas need n
        times as many rounds to mix. Δ is averaged as a whole.
    """

    codecs: ClassVar[tuple[str, ...]] = (*DENSE, "topk")
    later: ClassVar[tuple[str, ...]] = ("residual_decay", "slow_weight_parts")
    defaults: ClassVar[Defaults] = {"exchange": {"aggregation": "mean"}}
    gossip: ClassVar[bool] = True
    computable: ClassVar[bool] = True
    costs: ClassVar[CostRow] = "noloco"
    fixed_timeout: ClassVar[str] = "pairs have a separate time-out"

    sync_every: Steps = 50
    lr: LearningRate = 0.7
    momentum: Momentum = 0.5
    gamma: Annotated[float, Meta(gt=0, le=10)] = 0.7
    residual_decay: ResidualDecay = 1.0
    slow_weight_parts: Annotated[int, Meta(ge=1, le=1024)] = 1

    @property
    def sgd(self) -> OuterSgd:
        """β and α as hyper-parameters of an outer SGD."""
        return OuterSgd(self.lr, self.momentum, False)

    def adjusted(self, sparse: bool, stages: int) -> Defaults:
        """Return defaults for sparse codecs, those of SparseLoCo: the residual takes the place of momentum."""
        return {"outer": {"lr": 1.0, "momentum": 0.0, "gamma": 1.0, "residual_decay": 0.95}} if sparse else {}

    def contradictions(self, sparse: bool) -> Iterator[tuple[str, str]]:
        """Yield a message for values with which replicas diverge.

        The limit is that of pairs, because a group with a late or departed peer becomes smaller.
        """
        limit = gamma_limit(self.momentum, parts=self.slow_weight_parts)
        if self.gamma >= limit:
            parts = f" and {self.slow_weight_parts} parts" if self.slow_weight_parts > 1 else ""
            yield (
                f"outer.gamma = {self.gamma:g} makes replicas diverge; "
                f"with momentum {self.momentum:g}{parts} the limit is {limit:g}",
                "lower outer.gamma or outer.momentum; the defaults are 0.7 and 0.5",
            )
        if self.lr >= 2 * (1 + self.momentum):
            yield (
                f"outer.lr = {self.lr:g} makes the mean of all replicas diverge; the limit is {2 * (1 + self.momentum):g}",
                "the default is 0.7",
            )

    def warnings(self) -> tuple[str, ...]:
        """Return a warning if gamma is close to its limit."""
        limit = gamma_limit(self.momentum, parts=self.slow_weight_parts)
        if self.gamma > NEAR * limit:
            return (f"outer.gamma = {self.gamma:g} is near the limit of {limit:g}: replicas stay far from each other",)
        return ()


def gamma_limit(momentum: float, peers: int | None = None, group: int = 2, parts: int = 1) -> float:
    """Return the smallest gamma with which idle replicas diverge, for random groups among `peers`.

    `group`: size of a group; without `peers` the limit of many peers, the lowest one. `parts`: parts of the slow weights that
    take turns.

    The limit is exact: the second moments of the deviations follow a linear map, whose largest eigenvalue is below 1 for
    0 < γ < limit. With a deviation u and the mean ū of its group, E[ū²] = E[uū] = ρ E[u²], where
    ρ = (groups − 1) / (peers − 1) for any sizes; so δ' = αδ − γ(u − ū) has the limit 2 (1 − α²) / (1 − α + 2αρ).

    With n parts a coordinate is drawn once in n rounds, and δ moves it by s = (1 − αⁿ) / (1 − α) times as far until then.
    With D = s times δ just after a draw, and u just before one: D' = αⁿ D − sγ(u − ū) and u' = u + D', the same map with
    αⁿ and sγ.
    """
    alike = (-(-peers // group) - 1) / (peers - 1) if peers else 1 / group
    every, farther = momentum**parts, sum(momentum**turn for turn in range(parts))
    return 2 * (1 - every**2) / (1 - every + 2 * every * alike) / farther
