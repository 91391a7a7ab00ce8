"""The simulation finds each of ten planted bugs, and finds nothing without them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kit.planted import product as planted
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.simulation.world import simulate
from thinwire.sims.trials.trial import PACE, STALL, trial

PEERS = 8
PIECES = tuple(Fault(12.0, "partition", pair, 34.0) for pair in ((0, 1), (2, 3), (4, 5)))
"""Partition without a quorum for longer than a round is tried."""

HALVES = (Fault(5.2, "partition", (0, 2, 4), 8.0),)
KILLS = tuple(Fault(3.1 + 0.37 * turn, "kill", (2 + turn,)) for turn in range(5))
PAUSES = (Fault(20.0, "pause", (2,), 9.0), Fault(20.3, "pause", (3,), 9.0))
BACK = (
    Fault(3.0, "liar", (3,), 25.0, 0.0, "silent"),
    *(Fault(5.0 + at, "clock-jump", (peer,), 0.0, -30.0) for at in range(4) for peer in range(8) if peer != 3),
)
"""While all peers wait for a silent one, clocks are set back."""

# Planted bug; seed; faults (None: the seed's); seconds; invariants that may find it.
CASES = {
    "apply_before_commit": (20, None, 25.0, {"agreement", "lockstep", "progress"}),
    "residual_not_rolled_back": (2, PIECES, 62.0, {"weight"}),
    "timers_before_draining": (3, PAUSES, 33.0, {"false-death"}),
    "arrival_order": (3, None, 25.0, {"aggregate"}),
    "double_apply_after_heal": (1, None, 25.0, {"aggregate"}),
    # Proposals name their electorate, so in most seeds rounds stop instead; in this one both halves commit.
    "stale_view": (12, HALVES, 30.0, {"agreement", "lockstep"}),
    "lost_wake_up": (5, KILLS, 25.0, {"progress"}),
    "chunk_counted_twice": (0, None, 25.0, {"aggregate"}),
    "weight_from_the_wire": (6, (Fault(3.0, "liar", (3,), 12.0, 0.0, "false-weight"),), 25.0, {"weight"}),
    "clock_jump": (7, BACK, 30.0, {"progress"}),
}


TRIES = 12
"""Maximum number of seeds: a bug shows only under certain conditions."""


def _play(name: str, later: int = 0):
    seed, faults, seconds, _ = CASES[name]
    scenario = trial(seed + later, PEERS).with_(duration=seconds, faults=faults)
    if name in ("lost_wake_up", "clock_jump"):  # rounds that are mostly exchange, so that a fault hits one
        scenario = replace(scenario, peers=tuple(replace(peer, step_seconds=0.02, join=0.0) for peer in scenario.peers))
    return simulate(scenario, preset=PACE, stall=STALL, first=True)


@pytest.mark.parametrize("plant", planted.PLANTED, ids=lambda plant: plant.__name__)
def test_simulation_finds_planted_bug(plant, monkeypatch):
    plant(monkeypatch)
    runs = (_play(plant.__name__, later).violations for later in range(TRIES))
    found = next(filter(None, runs), ())
    assert found and found[0].oracle in CASES[plant.__name__][3]


@pytest.mark.soak  # the swarms of other tests have no planted bug either
@pytest.mark.parametrize("name", CASES)
def test_simulation_without_planted_bug_finds_nothing(name):
    assert not _play(name).violations


SHIPPED = 100
ELSEWHERE = {"residual_not_rolled_back"}
"""Bugs that the trial does not find: a round is given up only after its end. The test above has the time."""


@pytest.mark.soak
@pytest.mark.parametrize(
    "plant", [p for p in planted.PLANTED if p.__name__ not in ELSEWHERE], ids=lambda plant: plant.__name__
)
def test_trial_seeds_find_planted_bug(plant, monkeypatch):
    plant(monkeypatch)
    found = None
    for seed in range(SHIPPED):
        found = next(iter(simulate(trial(seed), preset=PACE, stall=STALL, first=True).violations), None)
        if found is not None:
            print(f"{plant.__name__}: seed {seed}, {found.oracle}")
            break
    assert found is not None
