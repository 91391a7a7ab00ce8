"""Peers that die, restart and join, for every method that test_seeds.py does not play."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from kit import groups
from kit.histories import forks
from kit.scenarios import (
    CHURN,
    INT8,
    TOPK,
    UNEQUAL,
    asynchronous,
    events_of,
    last_round,
    one_round_late,
    one_state,
    play,
    rounds_of,
    streaming,
    two_levels,
)
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.scenario.scenario import Scenario
from thinwire.sims.simulation.world import SimulatedRun

UNEQUAL_CHURN = (
    Fault(6.0, "kill", (3,)),
    Fault(8.2, "restart", (2,), seconds=3.0),
    Fault(11.1, "partition", (4, 5), seconds=3.0),
    Fault(15.3, "restart", (0,), seconds=3.0),
    Fault(18.2, "isolate", (1,), seconds=3.0),
)
"""CHURN for swarms of six unequal peers."""

TRIAL = pytest.mark.trial


@dataclass(frozen=True)
class Scripted:
    """A swarm under scripted churn.

    `rounds`: minimum of rounds; `alive`: peers that follow to the end; `behind`: rounds that they may be behind the
    newest; `learns`: the loss falls below half of its first value; `check`: other conditions.
    """

    scenario: Scenario
    rounds: int = 12
    alive: int = 7
    behind: int = 1
    learns: bool = False
    check: Callable[[SimulatedRun], None] = lambda run: None


def everybody_contributes(run: SimulatedRun) -> None:
    """Check the contributions of an asynchronous method: each peer has some, fast ones in most rounds."""
    rounds = events_of(run, "round")
    assert min(event.fields["contributors"] for event in rounds if not event.peer) < 4
    given = {peer: sum(event.peer == peer and event.fields["tokens"] > 0 for event in rounds) for peer in range(6)}
    assert all(given[peer] >= 3 for peer in given if peer != 3) and given[1] > 1.5 * given[4]


def _asynchronous(method: str) -> Scripted:
    scenario = asynchronous(method, faults=UNEQUAL_CHURN)
    return Scripted(scenario, rounds=20, alive=5, behind=2, learns=True, check=everybody_contributes)


def _streaming(overlap: int, alpha: float) -> Scripted:
    return Scripted(streaming(overlap=overlap, outer=f"local_mix = {alpha}", faults=CHURN))


def _concurrent(fragments: int, overlap: int, codec: str) -> Scripted:
    scenario = streaming(fragments, overlap, codec=codec, faults=CHURN)
    return Scripted(scenario, rounds=3 * fragments, behind=fragments)


SCRIPTED = {
    "eager": (Scripted(one_round_late("eager", faults=CHURN), learns=True),),
    "co2": (Scripted(one_round_late("co2", faults=CHURN), learns=True),),
    "delayed-nesterov": (_asynchronous("delayed-nesterov"),),
    "buffered-async": (_asynchronous("buffered-async"), TRIAL),
    "streaming": (_streaming(2, 0.5),),
    "streaming-without-overlap": (_streaming(0, 0.0), TRIAL),
    "streaming-with-much-overlap": (_streaming(4, 0.0), TRIAL),
    "concurrent-fragments-3": (_concurrent(3, 6, INT8),),
    "concurrent-fragments-2-sparse": (_concurrent(2, 9, TOPK),),
    "concurrent-fragments-3-fp32": (_concurrent(3, 12, "fp32"), TRIAL),
    "one-fragment-sparse": (_concurrent(1, 0, TOPK), TRIAL),
    "hierarchy": (Scripted(two_levels(faults=CHURN), rounds=8),),
    "hierarchy-streaming": (
        Scripted(
            two_levels('method = "streaming"\nsync_every = 12\nfragments = 3\noverlap = 2', faults=CHURN), rounds=8
        ),
    ),
}


@pytest.mark.trial
@pytest.mark.parametrize("case", [pytest.param(one, id=name, marks=marks) for name, (one, *marks) in SCRIPTED.items()])
def test_swarm_under_scripted_churn_follows_one_state_to_the_end(case: Scripted) -> None:
    """All peers but the one that is killed for good."""
    run = play(case.scenario)
    found = one_state(rounds_of(run))
    last = last_round(found)
    assert last > case.rounds
    assert sum(last - case.behind <= max(digests) for digests in found.values()) == case.alive
    losses = [event.fields["loss"] for event in events_of(run, "round") if event.fields["tokens"]]
    assert not case.learns or losses[-1] < 0.5 * losses[0]
    case.check(run)


KILLS = {"kill": 12.0, "loss": 12.0, "reset": 24.0}
STALLS = {"kill": 6.0, "pause": 12.0, "half-open": 12.0, "clog": 6.0}


def _random_one_round_late(method: str) -> Callable[[int], Scenario]:
    return lambda seed: one_round_late(method, peers=6, seed=seed, mix=KILLS)


def _random_streaming(seed: int) -> Scenario:
    return streaming(overlap=1 + seed % 4, outer="local_mix = 0.5", peers=6, seed=seed, mix=KILLS)


def _random_concurrent(seed: int) -> Scenario:
    fragments = (2, 3, 4, 6)[seed % 4]
    overlap, codec = min(12, 12 // fragments + 1 + seed % 7), TOPK if seed % 5 == 4 else INT8
    return streaming(fragments, overlap, peers=6, seed=seed, codec=codec, mix=(KILLS, STALLS)[seed % 2])


def _random_asynchronous(seed: int) -> Scenario:
    method = "buffered-async" if seed % 2 else "delayed-nesterov"
    step = [2 * seconds for seconds in UNEQUAL]
    return asynchronous(method, peers=5, seed=seed, seconds=40.0, step=step, mix=KILLS)


def _random_hierarchy(seed: int) -> Scenario:
    mix = KILLS if seed % 2 else {"pause": 12.0, "liar": 6.0, "restart": 12.0}
    return two_levels(peers=6, seed=seed, seconds=12.0, codec=("fp32", INT8)[seed % 2], mix=mix)


GROUP_MIXES = (
    {"restart": 8.0, "loss": 8.0, "reset": 16.0},
    {"kill": 5.0, "pause": 8.0, "half-open": 8.0, "clog": 4.0},
)


def _random_groups(seed: int) -> Scenario:
    return _groups(seed, mix=GROUP_MIXES[seed % 2])


def _random_planned_groups(seed: int) -> Scenario:
    pipeline = ("rebalance = 3.0\npeers_per_stage = 3\n", f"{groups.PLANNED}peers_per_stage = 2\n")[seed % 2]
    return _groups(seed, pipeline=pipeline, mix=GROUP_MIXES[seed // 2 % 2])


def _groups(seed: int, **more: Any) -> Scenario:
    several = [groups.weak(index, join=0.2 + 0.7 * (seed + index) % 3) for index in range(2, 8)]
    return groups.scenario((*groups.FULL, *several, groups.peer(8)), seed=seed, seconds=30.0, **more)


def _random_projected(seed: int) -> Scenario:
    mix = ({"restart": 8.0, "loss": 8.0, "reset": 12.0}, {"pause": 8.0, "half-open": 8.0, "clog": 4.0, "reset": 12.0})
    return groups.projected(seed=seed, seconds=24.0, mix=mix[seed % 2])


RANDOM: dict[str, tuple[Callable[[int], Scenario], int, int, int]] = {
    "eager": (_random_one_round_late("eager"), 1, 2, 200),
    "co2": (_random_one_round_late("co2"), 1, 2, 200),
    "streaming": (_random_streaming, 1, 2, 200),
    "concurrent-fragments": (_random_concurrent, 1, 2, 200),
    "asynchronous": (_random_asynchronous, 1, 4, 400),
    "hierarchy": (_random_hierarchy, 1, 2, 200),
    "groups": (_random_groups, 0, 2, 100),
    "planned-groups": (_random_planned_groups, 0, 1, 60),
    "projected": (_random_projected, 0, 2, 200),
}
"""Name -> scenario of a seed, and numbers of seeds by default, with `make trial`, and with `make soak`."""

HELD_IN_PARTS = ("groups", "planned-groups", "projected")
"""Scenarios in which peers hold parts of the model: the digests of each part are compared."""


MENDED = {("projected", 153)}
"""Seeds that failed before a rule. Turns without training take time, as results of a committed round may be lacking."""


def _seeds() -> Iterator[Any]:
    for name, (_, default, trial, soak) in RANDOM.items():
        for seed in range(soak):
            marks = () if seed < default else TRIAL if seed < trial or (name, seed) in MENDED else pytest.mark.soak
            yield pytest.param(name, seed, id=f"{name}-{seed}", marks=marks)


@pytest.mark.trial
@pytest.mark.parametrize(("name", "seed"), list(_seeds()))
def test_swarm_under_random_faults_violates_no_invariant(name: str, seed: int) -> None:
    run = play(RANDOM[name][0](seed))
    if name in HELD_IN_PARTS:
        assert forks(run) == {}
