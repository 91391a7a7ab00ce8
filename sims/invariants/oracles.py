"""Names of all invariants, and the report of a broken one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

ORACLES: Mapping[str, str] = {
    "agreement": "no two honest peers have different states after one round of one lineage, also if one of them is gone",
    "aggregate": "the new state is the outer step on the mean of what the contributors had announced, bit for bit where all "
    "have the same",
    "mean": "the members of a gossip group move the mean of their replicas as DiLoCo would",
    "bound": "with liars among the contributors, the aggregate is as near to the honest mean as the clipping promises",
    "weight": "a contribution counts with the tokens that went into it, and never with more than the manifest allows",
    "once": "with `data.exactly_once`, no sample is used twice in an epoch, and none is left out",
    "finite": "no honest peer has a parameter that is not finite",
    "round-order": "a peer applies each round once and in order",
    "crash": "no honest process ends by an error of ours, and every exception of a task is retrieved",
    "banned": "no honest peer is banned by an honest one",
    "double-vote": "a peer that votes twice in each ballot is banned by all honest peers fifteen seconds later",
    "false-death": "no peer is declared dead that was reachable all the time",
    "roster": "when nothing has changed for a while, every roster is the set of the running peers",
    "lockstep": "three rounds and ten seconds after the last fault all honest peers are in the same round",
    "lineage": "five rounds and ten seconds after the last fault all honest peers are in one lineage, and none is founded "
    "long after it",
    "standstill": "no honest peer that runs stays in its round for three rounds, the time to found a lineage, and ten seconds "
    "after the last fault that affected it",
    "progress": "without faults, rounds continue and joiners enter",
    "limits": "every queue and table is within its bound",
    "trace": "a rerun of the seed has the same trace",
}
"""Name -> assertion."""

OnViolation = Callable[[str, int, str], None]
"""Reports a violation: oracle, peer, detail."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Violation of an invariant: `at` virtual seconds, by `peer` (index; -1: the swarm)."""

    at: float
    oracle: str
    peer: int
    detail: str
