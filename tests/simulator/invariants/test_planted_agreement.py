"""The simulation finds each of eleven planted mistakes of the agreement, and finds nothing without them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
from kit.histories import save_each_round, short_rounds
from kit.planted import agreement
from kit.planted.two_quorums import TwoQuorums, arrange
from thinwire.node.peer.peer import OWN_STATE, PATIENCE
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.simulation.world import simulate
from thinwire.sims.trials import families
from thinwire.sims.trials.trial import PACE

STALL = 16.0
"""Longest time in seconds without a round while no fault is active."""


@dataclass(frozen=True)
class Case:
    """Swarm in which a mistake shows, and the invariants that may find it. `plot`: faults that depend on the course."""

    oracles: set[str]
    peers: int = 3
    faults: tuple[Fault, ...] = ()
    seconds: float = 40.0
    joins: Mapping[int, float] | None = None
    plot: tuple[int, str] | None = None


HALF = Fault(5.2, "refuse", (0, 1), 6.0)
MINORITY = Fault(5.2, "refuse", (0, 1), 16.0)
TWICE = (Fault(5.2, "refuse", (0, 1), 3.0), Fault(19.0, "refuse", (0, 1), 3.0))
"""Twice without a quorum, each time for less than `exchange.orphan`."""

CASES = {
    "promise_forgets_votes": Case({"agreement"}, plot=(0, "stays")),
    "quorum_without_unreachable": Case({"agreement"}, 5, (HALF,), 20.0),
    "vote_before_it_is_stored": Case({"agreement"}, plot=(0, "restarts")),
    "farewell_without_vote": Case({"agreement"}, plot=(0, "leaves")),
    "chain_not_checked": Case({"agreement"}, 5, (Fault(5.0, "liar", (2,), 20.0, 0.0, agreement.LIE),), 20.0, {4: 8.0}),
    "older_state_taken": Case({"lineage", "lockstep"}, 5, (Fault(8.0, "outage", (0, 1, 2, 3, 4), 6.0),), 50.0),
    "lineage_never_yields": Case({"lineage", "lockstep"}, 5, (MINORITY,), 50.0),
    "both_halves_decide": Case({"agreement"}, 4, (HALF,), 20.0),
    "lost_folder_keeps_its_vote": Case({"agreement"}, plot=(0, "loses its folder")),
    "orphan_timer_not_reset": Case({"lineage"}, 5, TWICE, 30.0),
    "equivocation_ignored": Case({"double-vote"}, 4, (Fault(5.0, "liar", (3,), 40.0, 0.0, "double-vote"),), 30.0),
}

TRIES = 24
"""Maximum number of seeds.

With each, peers take their steps in another order, and have other leaders and sources, which follow from the run id.
"""


def _play(patch: pytest.MonkeyPatch, case: Case, seed: int):
    save_each_round(patch)
    agreement.lying_offer(patch)
    if case.plot is not None:
        arrange(patch, TwoQuorums(*case.plot))
    scenario = short_rounds(case.peers, *case.faults, seconds=case.seconds, seed=seed, joins=case.joins)
    scenario = replace(scenario, manifest=f'{scenario.manifest}[run]\nname = "seed-{seed}"\n')
    return simulate(scenario, preset=PACE, stall=STALL, still=True, first=True).violations


@pytest.mark.parametrize("plant", agreement.PLANTED, ids=lambda plant: plant.__name__)
def test_simulation_finds_planted_mistake_of_the_agreement(plant):
    case = CASES[plant.__name__]
    for seed in range(1, 1 + TRIES):
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            found = _play(patch, case, seed)
        if found:
            break
    assert found and found[0].oracle in case.oracles


@pytest.mark.soak  # the swarms of other tests have no mistake either
@pytest.mark.parametrize("name", CASES)
def test_simulation_of_the_agreement_without_mistake_finds_nothing(name, monkeypatch):
    assert not _play(monkeypatch, CASES[name], 1)


HARSH = 100
"""Maximum number of seeds of the harsh mix that are played."""

ELSEWHERE = {"farewell_without_vote", "equivocation_ignored"}
"""Mistakes that the harsh mix does not find: no peer leaves or votes twice in it. The test above has peers that do."""

NAMES = [name for name in families.FAMILIES if name != "merge"]


def _harsh(name: str, seed: int):
    """Play a seed of the harsh mix, with a liar where the mistake needs one."""
    family = NAMES[seed % len(NAMES)]
    scenario = families.harsh(family, seed)
    if name == "chain_not_checked":
        lie = Fault(3.0, "liar", (2,), families.HARSH_CALM - 3.0, 0.0, agreement.LIE)
        faults = tuple(sorted((*scenario.faults, lie), key=lambda fault: fault.at))
        scenario = replace(scenario, faults=faults)
    stall = families.FAMILIES[family].stall + OWN_STATE * PATIENCE
    return simulate(scenario, preset=PACE, stall=stall, still=True, first=True).violations


@pytest.mark.soak
@pytest.mark.parametrize(
    "plant", [p for p in agreement.PLANTED if p.__name__ not in ELSEWHERE], ids=lambda plant: plant.__name__
)
def test_harsh_seeds_find_planted_mistake_of_the_agreement(plant, monkeypatch):
    """Seeds that fail without the mistake do not count."""
    agreement.lying_offer(monkeypatch)
    found = None
    for seed in range(HARSH):
        with monkeypatch.context() as patch:
            plant(patch)
            found = next(iter(_harsh(plant.__name__, seed)), None)
        if found is not None and not _harsh(plant.__name__, seed):
            print(f"{plant.__name__}: seed {seed}, {found.oracle}: {found.detail}")
            break
        found = None
    assert found is not None
