"""Swarms with weak peers in virtual time: groups that hold the model together, beside peers that hold all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from thinwire.sims.faults import Fault
from thinwire.sims.scenario import PeerSpec, Scenario
from thinwire.sims.seeds import PACE, STALL
from thinwire.sims.world import simulate
from thinwire.swarm.preset import WAN

MODEL = "[model]\nlayers = 3\nwidth = 8\nheads = 2\ncontext = 8\n[inner]\nbatch = 1\naccumulate = 2\nwarmup = 0\n"
KILL = Fault(9.0, "kill", (4,))


def peer(index, *, stage=None, origin=2, join=0.0, step=0.5):
    return PeerSpec(
        index,
        f"peer-{index}",
        "Oregon",
        step_seconds=step,
        up=2.5e6,
        down=37.5e6,
        stage=stage,
        origin=origin,
        join=join,
    )


FULL = (peer(0), peer(1))
GROUP = (
    peer(2, stage=0, join=0.2, step=0.1),
    peer(3, stage=1, join=0.2, step=0.1),
    peer(4, stage=2, join=0.2, step=0.1),
)


def world(peers=(*FULL, *GROUP), *, seed=3, seconds=20.0, faults=(), pipeline="", outer="", rounds=0):
    toml = f'[run]\nrounds = {rounds}\n[outer]\nmethod = "streaming"\nsteps = 6\n{outer}[pipeline]\nstages = 3\n'
    toml += f'codec = "fp32"\n{pipeline}[exchange]\ngrace = 1.0\n{MODEL}'
    return Scenario("group", seed, seconds, toml, peers, compute="torch", faults=faults, interval=seconds)


def rounds(run):
    """Peer -> {turn: digest of its fragment} of what it committed."""
    found = {}
    for event in run.journal.events:
        if event.name == "round":
            found.setdefault(event.peer, {})[event.fields["round"]] = event.fields["digest"]
    return found


def agreed(run):
    """Every fragment has one state wherever it is held, after each of its rounds."""
    found = rounds(run)
    for turn in range(1, max(map(max, found.values())) + 1):
        assert len({digests[turn] for digests in found.values() if turn in digests}) <= 1
    return found


def together(run, turn):
    """Who contributed to a turn, as those say that had part in it."""
    return {
        event.fields["contributors"]
        for event in run.journal.events
        if event.name == "round" and event.fields["round"] == turn
    }


WEAK = 0.15 * 2**20
"""Bytes: less than the whole model takes, more than any stage does."""


def test_a_group_beside_full_replicas():
    """Three that hold a stage each are one replica more: every round has two full ones and the group's stage."""
    run = simulate(world(seconds=14.0), preset=PACE, stall=STALL)
    assert run.violations == ()
    found = agreed(run)
    assert min(map(max, found.values())) >= 10
    for one, stage in ((2, 0), (3, 1), (4, 2)):
        assert {(turn - 1) % 3 for turn in found[one]} == {stage}
        assert len(found[one]) >= 3
    assert all(together(run, turn) == {3} for turn in range(8, 12))
    tokens = {
        event.fields["tokens"] for event in run.journal.events if event.name == "round" and event.fields["round"] > 8
    }
    assert tokens == {2 * 2 * 8}  # a turn's steps, of two micro-batches of eight tokens, at each of them


def test_a_host_is_killed_and_another_takes_its_stage():
    """The full replicas go on meanwhile, and the rest of the group does when somebody comes."""
    late = peer(5, stage=2, join=14.0, step=0.1)
    run = simulate(world((*FULL, *GROUP, late), faults=(KILL,)), preset=PACE, stall=STALL)
    assert run.violations == ()
    found = agreed(run)
    assert [event.fields["stage"] for event in run.journal.events if event.name == "host lost"] == [2]
    assert max(found[4]) == 6 and {(turn - 1) % 3 for turn in found[5]} == {2} and len(found[5]) >= 2
    assert all(together(run, turn) == {3} for turn in range(14, 18))
    waits = [event.fields["sync_seconds"] for event in run.journal.events if event.name == "round" and event.peer < 2]
    assert sum(wait > 0.5 for wait in waits) == 2  # for the one that is dead, and nobody for a group that lacks a stage


@pytest.mark.parametrize("killed", [2, pytest.param(4, marks=pytest.mark.trial)])
def test_weak_peers_find_their_places(killed):
    """Three that are too small, and one more when one was killed: it takes what is missing, be it the origin's place."""
    weak = [replace(peer(index, join=0.2, step=0.1), memory=WEAK) for index in (2, 3, 4)]
    late = replace(peer(5, join=18.0, step=0.1), memory=WEAK)
    faults = (Fault(14.0, "kill", (killed,)),)
    run = simulate(world((*FULL, *weak, late), faults=faults, seconds=38.0), preset=PACE, stall=STALL)
    assert run.violations == ()
    found = agreed(run)
    held = {one: {(turn - 1) % 3 for turn in found[one]} for one in range(2, 6)}
    assert held == {4: {0}, 2: {1}, 3: {2}, 5: held[killed]}
    last = max(map(max, found.values()))
    assert last > 18 and all(together(run, turn) == {3} for turn in range(last - 4, last))
    names = [event.name for event in run.journal.events]
    assert names.count("group") == (2 if killed == 4 else 0)  # hosts that go over to the newcomer's group


@pytest.mark.trial
def test_who_comes_just_after_a_kill_takes_the_stage():
    """The dead one is a member yet, and out of the newcomer's reach."""
    weak = [replace(peer(index, join=0.2, step=0.1), memory=WEAK) for index in (2, 3, 4)]
    late = replace(peer(5, join=15.0, step=0.1), memory=WEAK)
    faults = (Fault(14.0, "kill", (2,)),)
    run = simulate(world((*FULL, *weak, late), faults=faults, seconds=30.0), preset=WAN, stall=STALL)
    assert run.violations == ()
    held = {one: {(turn - 1) % 3 for turn in digests} for one, digests in agreed(run).items()}
    assert held[2] == held[5] == {1}


@pytest.mark.parametrize(
    "seed",
    [
        *(pytest.param(seed, marks=pytest.mark.trial) for seed in range(4)),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 100)),
    ],
)
def test_everything_that_can_go_wrong(seed):
    """Whatever befalls groups, all that hold a fragment have one state of it, and rounds go on."""
    weak = [replace(peer(index, join=0.2 + 0.7 * (seed + index) % 3, step=0.1), memory=WEAK) for index in range(2, 8)]
    mix = ({"restart": 8.0, "loss": 8.0, "reset": 16.0}, {"kill": 5.0, "pause": 8.0, "half-open": 8.0, "clog": 4.0})
    scenario = replace(world((*FULL, *weak, peer(8)), seed=seed, seconds=30.0), mix=mix[seed % 2])
    run = simulate(scenario, preset=PACE, stall=STALL)
    assert run.violations == ()
    agreed(run)


@pytest.mark.trial
def test_with_overlap_too_a_group_without_a_stage_holds_nobody_up_and_goes_on():
    """Training on while a round is under way is over at once when there can be none."""
    late, kill = peer(5, stage=2, join=8.0, step=0.1), Fault(5.0, "kill", (4,))
    scenario = world((*FULL, *GROUP, late), outer="overlap = 1\n", seconds=18.0, faults=(kill,))
    run = simulate(scenario, preset=PACE, stall=STALL)
    assert run.violations == ()
    agreed(run)
    for one in (2, 3, 5):
        assert any(e.name == "round" and e.peer == one and e.at > 10 and e.fields["tokens"] for e in run.journal.events)


@pytest.mark.trial
def test_hosts_leave_an_origin_that_comes_back_as_something_else():
    """It takes what another group lacks; after a while its own hosts follow it there."""
    driver = replace(peer(2, join=0.2, step=0.1), memory=WEAK)
    others = (peer(5, stage=0, origin=5, join=5.0, step=0.1), peer(6, stage=2, origin=5, join=5.0, step=0.1))
    restart = Fault(8.0, "restart", (2,), seconds=1.0)
    scenario = world((*FULL, driver, *GROUP[1:], *others), seconds=30.0, faults=(restart,))
    run = simulate(scenario, preset=PACE, stall=STALL)
    assert run.violations == ()
    agreed(run)
    hosts = [event.peer for event in run.journal.events if event.name == "group"]
    assert sorted(hosts) == [3, 4]
    for one in (3, 4):
        assert any(e.name == "round" and e.peer == one and e.at > 25 and e.fields["tokens"] for e in run.journal.events)
