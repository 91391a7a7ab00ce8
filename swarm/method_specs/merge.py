"""One average at the end: peers train apart, and the run ends with the mean of their models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from thinwire.swarm.method_specs.base import Defaults, MethodSpec, Steps


class Merge(MethodSpec, frozen=True, tag="merge"):
    """[outer] of the method "merge".

    The first round only gathers the peers that are present; then every peer makes its H inner steps.
    """

    defaults: ClassVar[Defaults] = {
        "run": {"rounds": 2},
        "data": {"private": True},
        "exchange": {"codec": "fp32", "straggler_timeout": 3600.0, "aggregation": "mean"},
    }
    required: ClassVar[Mapping[str, tuple[Mapping[str, object], str, str]]] = {
        "run": (
            {"rounds": 2},
            "run.rounds must be 2 with the method 'merge': one round to gather the peers, one to merge",
            "remove run.rounds; outer.sync_every is the length of the training",
        )
    }
    gathers_first: ClassVar[bool] = True
    computable: ClassVar[bool] = True
    fixed_timeout: ClassVar[str] = "there is only one round"

    sync_every: Steps = 1000

    def steps_after(self, round: int) -> int:
        """Return the inner steps of a peer up to the end of a round; none before the first one."""
        return max(0, round - 1) * self.sync_every
