"""Swarms in which groups of weak peers share one model, beside peers that hold all of it."""

from __future__ import annotations

import pytest
from kit.groups import FULL, GROUP, agreed, contributors, host, scenario, weak
from kit.scenarios import events_of, play
from thinwire.sims.scenario.faults import Fault
from thinwire.swarm.membership.presets import WAN

KILL = Fault(9.0, "kill", (4,))


def test_group_contributes_like_one_more_replica():
    """Three hosts of a stage each: every round has two full replicas and the group's stage."""
    run = play(scenario(seconds=14.0))
    found = agreed(run)
    assert min(map(max, found.values())) >= 10
    for one, stage in ((2, 0), (3, 1), (4, 2)):
        assert {(turn - 1) % 3 for turn in found[one]} == {stage}
        assert len(found[one]) >= 3
    assert all(contributors(run, turn) == {3} for turn in range(8, 12))
    tokens = {event.fields["tokens"] for event in events_of(run, "round") if event.fields["round"] > 8}
    assert tokens == {2 * 2 * 8}  # a turn's steps, of two micro-batches of eight tokens, at each of them


@pytest.mark.trial
def test_newcomer_takes_stage_of_killed_host():
    """Full replicas continue, and the group resumes when a peer joins."""
    late = host(5, 2, join=14.0)
    run = play(scenario((*FULL, *GROUP, late), faults=(KILL,)))
    found = agreed(run)
    assert [event.fields["stage"] for event in events_of(run, "host_lost")] == [2]
    assert max(found[4]) == 6 and {(turn - 1) % 3 for turn in found[5]} == {2} and len(found[5]) >= 2
    assert all(contributors(run, turn) == {3} for turn in range(17, 20))
    waits = [event.fields["sync_seconds"] for event in events_of(run, "round", 0, 1)]
    assert all(wait < 0.5 for wait in waits), "none waits for the dead one, nor for a group that lacks a stage"


@pytest.mark.trial
@pytest.mark.parametrize("killed", [2, pytest.param(4, marks=pytest.mark.trial)])
def test_weak_peers_choose_missing_stages(killed):
    """Three peers are too small; a fourth takes the missing place after a kill, also that of the origin."""
    several = [weak(index) for index in (2, 3, 4)]
    late = weak(5, join=18.0)
    faults = (Fault(14.0, "kill", (killed,)),)
    run = play(scenario((*FULL, *several, late), faults=faults, seconds=38.0))
    found = agreed(run)
    held = {one: {(turn - 1) % 3 for turn in found[one]} for one in range(2, 6)}
    assert held == {4: {0}, 2: {1}, 3: {2}, 5: held[killed]}
    last = max(map(max, found.values()))
    assert last > 18 and all(contributors(run, turn) == {3} for turn in range(last - 4, last))
    assert len(events_of(run, "group")) == (2 if killed == 4 else 0)  # hosts change to the newcomer's group


@pytest.mark.trial
def test_newcomer_just_after_a_kill_takes_the_stage():
    """The dead peer is still a member, and the newcomer cannot reach it."""
    several = [weak(index) for index in (2, 3, 4)]
    late = weak(5, join=15.0)
    faults = (Fault(14.0, "kill", (2,)),)
    run = play(scenario((*FULL, *several, late), faults=faults, seconds=30.0), preset=WAN)
    held = {one: {(turn - 1) % 3 for turn in digests} for one, digests in agreed(run).items()}
    assert held[2] == held[5] == {1}


@pytest.mark.trial
def test_incomplete_group_with_overlap_delays_nobody_and_resumes():
    """Training during a round ends at once if the group cannot continue."""
    late, kill = host(5, 2, join=8.0), Fault(5.0, "kill", (4,))
    run = play(scenario((*FULL, *GROUP, late), outer="overlap = 1\n", seconds=18.0, faults=(kill,)))
    agreed(run)
    for one in (2, 3, 5):
        assert any(event.at > 10 and event.fields["tokens"] for event in events_of(run, "round", one))


@pytest.mark.trial
def test_hosts_follow_origin_that_restarts_in_another_group():
    """The origin takes a missing place of another group; after a while its own hosts follow it."""
    driver = weak(2)
    others = (host(5, 0, origin=5, join=5.0), host(6, 2, origin=5, join=5.0))
    restart = Fault(8.0, "restart", (2,), seconds=1.0)
    run = play(scenario((*FULL, driver, *GROUP[1:], *others), seconds=30.0, faults=(restart,)))
    agreed(run)
    hosts = [event.peer for event in events_of(run, "group")]
    assert sorted(hosts) == [3, 4]
    for one in (3, 4):
        assert any(event.at > 25 and event.fields["tokens"] for event in events_of(run, "round", one))
