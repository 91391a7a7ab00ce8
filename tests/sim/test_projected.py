"""Swarms in virtual time whose weak peers train a projection of the model, beside peers that train all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from thinwire.sims.faults import Fault
from thinwire.sims.scenario import PeerSpec, Scenario
from thinwire.sims.seeds import PACE, STALL
from thinwire.sims.world import simulate

TOML = """
[run]
rounds = 0
[model]
layers = 3
width = 8
heads = 2
context = 8
[inner]
lr = 0.003
batch = 1
accumulate = 2
warmup = 0
[outer]
method = "streaming"
steps = 6
[pipeline]
stages = 3
codec = "subspace(k=2)"
[exchange]
grace = 1.0
"""
FULL, WEAK = (0, 1), {2: 0, 3: 1, 4: 2}


def peer(index, *, stage=None, join=0.0, step=0.5):
    return PeerSpec(
        index, f"peer-{index}", "Oregon", step_seconds=step, up=2.5e6, down=37.5e6, stage=stage, origin=2, join=join
    )


PEERS = (*map(peer, FULL), *(peer(one, stage=stage, join=0.2, step=0.1) for one, stage in WEAK.items()))


def world(*others, seed=3, seconds, faults=(), codec="int8(block=256)"):
    toml = f'{TOML}codec = "{codec}"\n'
    return Scenario(
        "projected", seed, seconds, toml, (*PEERS, *others), compute="torch", faults=faults, interval=seconds
    )


def rounds(run):
    """Turn -> {peer: event} of all that committed it; every fragment has one state wherever it is held."""
    found = {}
    for event in run.journal.events:
        if event.name == "round":
            found.setdefault(event.fields["round"], {})[event.peer] = event.fields
    for told in found.values():
        assert len({fields["digest"] for fields in told.values()}) == 1
    return found


@pytest.mark.parametrize(
    "codec", ["int8(block=256)", pytest.param("topk(k=64,chunk=4096)|2bit|rice", marks=pytest.mark.trial)]
)
def test_a_group_that_trains_a_projection_beside_full_replicas(codec):
    """Without the rows that were frozen after the newest outer step no host would be ready, and the group in no round."""
    run = simulate(world(seconds=11.0, codec=codec), preset=PACE, stall=STALL)
    assert run.violations == ()
    found = rounds(run)
    assert max(found) >= 9
    for turn in range(4, max(found)):
        weak = next(one for one, stage in WEAK.items() if stage == (turn - 1) % 3)
        assert {*FULL, weak} == set(found[turn])
        assert found[turn][0]["contributors"] == 3
    losses = [found[turn][2]["loss"] for turn in sorted(found) if turn > 3 and 2 in found[turn]]
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.trial
def test_who_comes_later_has_the_frozen_rows_too():
    """A host is killed, another takes its stage, and the origin goes on with it."""
    late = peer(5, stage=2, join=14.0, step=0.1)
    run = simulate(world(late, seconds=20.0, faults=(Fault(9.0, "kill", (4,)),)), preset=PACE, stall=STALL)
    assert run.violations == ()
    found = rounds(run)
    last = [turn for turn in found if 5 in found[turn]]
    assert len(last) >= 2 and all(found[turn][0]["contributors"] == 3 for turn in last[1:])


@pytest.mark.parametrize(
    "seed",
    [
        *(pytest.param(seed, marks=pytest.mark.trial) for seed in range(2)),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 200)),
    ],
)
def test_everything_that_can_go_wrong(seed):
    """Whatever befalls the group, all that hold a fragment have one state of it."""
    mix = ({"restart": 8.0, "loss": 8.0, "reset": 12.0}, {"pause": 8.0, "half-open": 8.0, "clog": 4.0, "reset": 12.0})
    scenario = replace(world(seed=seed, seconds=24.0), mix=mix[seed % 2])
    run = simulate(scenario, preset=PACE, stall=STALL)
    assert run.violations == ()
    rounds(run)
