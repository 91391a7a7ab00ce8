"""Groups whose origin plans the ways of micro-batches, or moves hosts to where they are waited for, in virtual time."""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from thinwire.node.pipeline.originlearner import OriginLearner
from thinwire.sims.faults import Fault
from thinwire.sims.seeds import PACE, STALL
from thinwire.sims.world import SimWorld, simulate

TOKENS = 8
"""Of a micro-batch."""


@pytest.fixture(scope="module")
def groups():
    spec = importlib.util.spec_from_file_location("sim_test_group", Path(__file__).with_name("test_group.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def seen(monkeypatch):
    """What steps of origins came to, what they said then, and the weights of rounds: (fragment, round) -> {peer: tokens}."""
    steps, said, weights = [], [], defaultdict(dict)
    see, committed = OriginLearner._see, SimWorld.committed

    def outcome(self, outcome):
        see(self, outcome)
        steps.append(outcome)
        said.append(self.said)

    def commit(self, machine, outcome):
        opened = outcome.commit.opened
        weights[opened.fragment, opened.round] = {one.peer: one.weight for one in opened.contributors}
        committed(self, machine, outcome)

    monkeypatch.setattr(OriginLearner, "_see", outcome)
    monkeypatch.setattr(SimWorld, "committed", commit)
    return steps, said, weights


def of(run, name, *peers):
    """Events of a kind, of these peers or of all."""
    return [event for event in run.journal.events if event.name == name and (not peers or event.peer in peers)]


PLANNED = 'micro = 4\npaths = "planned"\nskip = 0.34\n'


def test_a_group_that_plans_and_goes_past_a_third_of_its_stages(groups, seen):
    """Five hosts in two stages, of which each micro-batch visits one; one is killed, and the plan mended."""
    steps, said, weights = seen
    hosts = [groups.peer(index, stage=1 + index % 2, origin=1, join=0.2, step=0.1) for index in range(2, 7)]
    peers = (groups.peer(0), groups.peer(1, stage=0, origin=1, join=0.2, step=0.1), *hosts)
    world = groups.world(peers, faults=(Fault(7.5, "kill", (3,)),), pipeline=PLANNED, seconds=13.0)
    run = simulate(world, preset=PACE, stall=STALL)
    assert run.violations == ()
    found = groups.agreed(run)
    last = max(map(max, found.values()))
    assert last >= 9 and all(max(found[index]) > last - 3 for index in (1, 2, 4, 5, 6)) and max(found[3]) < last - 3
    whys = [event.fields["why"] for event in of(run, "plan", 1)]
    assert whys[0] == "first" and set(whys[2:]) & {"mended", "peers"}, whys
    assert f"planned {len(whys)} times (first 1" in said[-1] and "by plan" in said[-1]
    for outcome in steps:
        assert outcome.finished == set(range(4)) and not outcome.lost and not outcome.skipped
        visits = [micro for peers in outcome.counted.values() for micros in peers.values() for micro in micros]
        assert sorted(visits) == [0, 1, 2, 3]  # one of the two stages, each
        if outcome.planned < 1:  # something is known
            assert outcome.flown == pytest.approx(outcome.planned, rel=0.1)
    checked = 0
    for (fragment, number), said_weights in weights.items():
        turn = 3 * (number - 1) + fragment  # its fragment was sent three turns before, two steps are between two turns
        since = {outcome.step: outcome for outcome in steps if 2 * (turn - 2) <= outcome.step < 2 * (turn + 1)}
        if fragment and len(since) == 6:
            went = {peer: 0 for outcome in since.values() for peer in outcome.counted.get(fragment, {})}
            for peer in went:
                went[peer] = sum(len(one.counted.get(fragment, {}).get(peer, ())) for one in since.values())
            for peer, count in went.items():
                assert said_weights.get(peer, TOKENS * count) == TOKENS * count
                checked += peer in said_weights
    assert checked >= 3


@pytest.mark.trial
def test_a_group_that_goes_past_stages_does_without_one(groups, seen):
    """Stage 1 loses its only holder: every micro-batch visits stage 2 now, and the others need not wait for the group."""
    steps, _, _ = seen
    hosts = [groups.peer(index, stage=index - 1, origin=1, join=0.2, step=0.1) for index in (2, 3)]
    peers = (groups.peer(0, step=0.2), groups.peer(1, stage=0, origin=1, join=0.2, step=0.1), *hosts)
    world = groups.world(peers, faults=(Fault(8.0, "kill", (2,)),), pipeline=PLANNED, seconds=20.0)
    run = simulate(world, preset=PACE, stall=STALL)
    assert run.violations == ()
    groups.agreed(run)
    last = max(event.fields["round"] for event in of(run, "round"))
    assert steps[6].counted.keys() == {1, 2} and steps[-1].counted.keys() == {2} and not steps[-1].lost
    by_fragment = {(turn - 1) % 3: groups.together(run, turn) for turn in range(last - 3, last)}
    assert by_fragment == {0: {2}, 1: {1}, 2: {2}}
    assert [event.fields["stage"] for event in of(run, "stage without holder")][-1] == 1


def weak(groups, *indices, join=0.2):
    return [replace(groups.peer(index, join=join, step=0.1), memory=groups.WEAK) for index in indices]


def test_a_host_moves_to_the_stage_that_is_waited_for(groups, seen):
    """Peer 2 is slow, and alone in its stage; of the two in the other stage the one with less to do comes over."""
    steps, _, _ = seen
    first = weak(groups, 2, 3, 4)
    peers = (groups.peer(0), *weak(groups, 1, join=9.0), replace(first[0], step_seconds=1.0), *first[1:])
    run = simulate(groups.world(peers, pipeline="rebalance = 8.0\nbuddy = 0\n", seconds=36.0), preset=PACE, stall=STALL)
    assert run.violations == ()
    found = groups.agreed(run)
    (moved,) = of(run, "move")
    assert moved.peer == 4 and moved.fields["detail"] == "from stage 2 to 1"
    assert [event.fields["reason"] for event in of(run, "down", 1)] == ["left", "the end"]
    held = [(turn - 1) % 3 for turn in sorted(found[1])]
    assert held == [2] * held.count(2) + [1] * held.count(1) and held.count(2) and held.count(1) >= 2
    assert {(turn - 1) % 3 for turn in found[3]} == {2} and max(found[3]) > max(found[1]) - 3
    assert steps[-1].flown < 0.6 * steps[0].flown
    assert not of(run, "stage without holder")[1:]  # but for the first moment


@pytest.mark.trial
def test_an_empty_stage_gets_a_host_that_can_be_spared(groups):
    """Stage 1 has one host, stage 2 has two: the first is killed, and one of the others takes its place."""
    peers = (groups.peer(0), *weak(groups, 1, join=9.0), *weak(groups, 2, 3, 4))
    faults = (Fault(19.0, "kill", (2,)),)
    world = groups.world(peers, pipeline="rebalance = 20.0\n", seconds=36.0, faults=faults)
    run = simulate(world, preset=PACE, stall=STALL)
    assert run.violations == ()
    found = groups.agreed(run)
    (moved,) = of(run, "move")
    assert moved.fields["detail"] == "from stage 2 to 1" and moved.at > 19
    mover = next(index for index in (1, 3) if len(of(run, "up", index)) == 2)
    last = max(map(max, found.values()))
    assert (max(found[mover]) - 1) % 3 == 1 and max(found[mover]) > last - 3
    assert all(groups.together(run, turn) == {2} for turn in range(last - 2, last + 1))


@pytest.mark.trial
def test_who_was_told_its_stage_stays_there(groups):
    """Its origin asks it once, and then nobody."""
    hosts = [groups.peer(index, stage=stage, origin=1, join=0.2, step=0.1) for index, stage in ((2, 1), (3, 2), (4, 2))]
    peers = (groups.peer(0), groups.peer(1, stage=0, origin=1, join=0.2, step=0.1), replace(hosts[0], step_seconds=1.0))
    run = simulate(
        groups.world((*peers, *hosts[1:]), pipeline="rebalance = 4.0\n", seconds=24.0), preset=PACE, stall=STALL
    )
    assert run.violations == ()
    asked = [event.fields["peer"] for event in of(run, "move")]
    assert len(asked) == len(set(asked)) == 2
    assert {(turn - 1) % 3 for index in (3, 4) for turn in groups.agreed(run)[index]} == {2}


@pytest.mark.parametrize(
    "seed",
    [
        *(pytest.param(seed, marks=pytest.mark.trial) for seed in range(2)),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 60)),
    ],
)
def test_whatever_befalls_groups_that_plan_or_move(groups, seed):
    """All that hold a fragment have one state of it, and rounds go on."""
    several = [peer for index in range(2, 8) for peer in weak(groups, index, join=0.2 + 0.7 * (seed + index) % 3)]
    mix = ({"restart": 8.0, "loss": 8.0, "reset": 16.0}, {"kill": 5.0, "pause": 8.0, "half-open": 8.0, "clog": 4.0})
    pipeline = ("rebalance = 3.0\nholders = 3\n", f"{PLANNED}holders = 2\n")[seed % 2]
    peers = (groups.peer(0), groups.peer(1), *several, groups.peer(8))
    scenario = replace(groups.world(peers, seed=seed, seconds=30.0, pipeline=pipeline), mix=mix[seed // 2 % 2])
    run = simulate(scenario, preset=PACE, stall=STALL)
    assert run.violations == ()
    groups.agreed(run)
