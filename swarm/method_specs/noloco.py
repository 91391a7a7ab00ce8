"""NoLoCo (Kolehmainen et al., arXiv:2506.10911): gossip with random partners; replicas differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from msgspec import Meta
from thinwire.swarm.method_specs.base import CostRow, Defaults, LearningRate, MethodSpec, Momentum, OuterSgd, Steps

NEAR = 0.9
"""Part of the stable range of gamma from which on a manifest is used with a warning."""


class NoLoCo(MethodSpec, frozen=True, tag="noloco"):
    """[outer] of the method "noloco".

    lr, momentum: β and α of the paper. There is no Nesterov momentum.
    gamma: how strongly partners are drawn together. If it equals lr and the codec is "fp32", one vector travels instead of
        two. The paper gives no value; its code uses lr.
    """

    defaults: ClassVar[Defaults] = {"exchange": {"aggregation": "mean"}}
    gossip: ClassVar[bool] = True
    computable: ClassVar[bool] = True
    costs: ClassVar[CostRow] = "gossip"
    fixed_timeout: ClassVar[str] = "pairs have a separate time-out"

    sync_every: Steps = 50
    lr: LearningRate = 0.7
    momentum: Momentum = 0.5
    gamma: Annotated[float, Meta(gt=0, le=10)] = 0.7

    @property
    def sgd(self) -> OuterSgd:
        """β and α as hyper-parameters of an outer SGD."""
        return OuterSgd(self.lr, self.momentum, False)

    def contradictions(self, sparse: bool) -> Iterator[tuple[str, str]]:
        """Yield a message for values with which replicas diverge.

        The limit is that of pairs, because a group with a late or departed peer becomes smaller.
        """
        limit = gamma_limit(self.momentum)
        if self.gamma >= limit:
            yield (
                f"outer.gamma = {self.gamma:g} makes replicas diverge; with momentum {self.momentum:g} the limit is {limit:g}",
                "lower outer.gamma or outer.momentum; the defaults are 0.7 and 0.5",
            )
        if self.lr >= 2 * (1 + self.momentum):
            yield (
                f"outer.lr = {self.lr:g} makes the mean of all replicas diverge; the limit is {2 * (1 + self.momentum):g}",
                "the default is 0.7",
            )

    def warnings(self) -> tuple[str, ...]:
        """Return a warning if gamma is close to its limit."""
        limit = gamma_limit(self.momentum)
        if self.gamma > NEAR * limit:
            return (f"outer.gamma = {self.gamma:g} is near the limit of {limit:g}: replicas stay far from each other",)
        return ()


def gamma_limit(momentum: float, peers: int | None = None, group: int = 2) -> float:
    """Return the smallest gamma with which idle replicas diverge, for random groups among `peers`.

    `group`: size of a group; without `peers` the limit of many peers, the lowest one.

    The limit is exact: the second moments of the deviations follow a linear map, whose largest eigenvalue is below 1 for
    0 < γ < limit. With a deviation u and the mean ū of its group, E[ū²] = E[uū] = ρ E[u²], where
    ρ = (groups − 1) / (peers − 1) for any sizes; so δ' = αδ − γ(u − ū) has the limit 2 (1 − α²) / (1 − α + 2αρ).
    """
    alike = (-(-peers // group) - 1) / (peers - 1) if peers else 1 / group
    return 2 * (1 - momentum**2) / (1 - momentum + 2 * momentum * alike)
