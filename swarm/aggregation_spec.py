"""AggregationSpec: aggregation rule of a run, and the number of contributors that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from thinwire.swarm.choices import Aggregation

NEEDS: Mapping[Aggregation, tuple[int, int]] = {
    "centered-clip": (2, 1),
    "trimmed-mean": (2, 1),
    "median": (2, 1),
    "geometric-median": (2, 1),
    "flag": (2, 1),
    "krum": (2, 3),
    "multi-krum": (2, 3),
    "bulyan": (4, 3),
}
"""Rule -> (a, b): with f liars it needs a·f + b contributors. The other rules need one."""

ITERATED: Mapping[Aggregation, int] = {"centered-clip": 20, "geometric-median": 32, "flag": 5}
"""Rules that iterate -> default number of iterations."""


class AggregationSpec(NamedTuple):
    """Aggregation rule with its parameters.

    max_liars: f, largest number of contributors of one round that may lie. iterations: largest number of them; 0: the rule's
    default.
    """

    rule: Aggregation = "mean"
    max_liars: int = 1
    iterations: int = 0

    @property
    def needs(self) -> int:
        """Least number of contributors."""
        factor, extra = NEEDS.get(self.rule, (0, 1))
        return factor * self.max_liars + extra

    @property
    def max_iterations(self) -> int:
        """Largest number of iterations, with the rule's default."""
        return self.iterations or ITERATED.get(self.rule, 0)
