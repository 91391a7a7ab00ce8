"""Stages that lost their last holder: sources of their state, and their single history."""

from __future__ import annotations

import pytest
from kit.groups import host, peer, scenario
from kit.scenarios import events_of, play
from thinwire.node.peer import checkpoint_schedule
from thinwire.sims.scenario.faults import Fault

LOST = 9.0
"""Virtual second at which the last holder is killed. The peer with the whole model has left before."""


def lose(*, killed=(), comes=(), stages=3, buddy=2, seconds=21.0, faults=(), recent=50):
    """Return a scenario: a founder that leaves; peers 1, 2, … of stages 0, 1, …, some of them killed.

    Then peers of the stages in `comes` join.
    """
    founder = peer(0, step=0.2, origin=0, leave=3.0)
    group = (host(1 + stage, stage, origin=1) for stage in range(stages))
    late = (
        host(1 + stages + number, stage, join=LOST + 4.0, origin=1 if stage else 1 + stages + number)
        for number, stage in enumerate(comes)
    )
    kills = tuple(Fault(LOST, "kill", (one,)) for one in killed)
    pipeline = f"backup_every = {buddy}\nbackup_max_age = {recent}\n"
    peers = (founder, *group, *late)
    return play(scenario(peers, pipeline=pipeline, stages=stages, seconds=seconds, faults=(*kills, *faults)))


def brought(run):
    """Return the peers that recovered a stage, with stage and source."""
    return [(event.peer, event.fields["stage"], event.fields["source"]) for event in events_of(run, "stage_restored")]


def one_history(run, stages=3):
    """Check that each round of a fragment has one state on all its peers, and numbers grow. Returns it by peer."""
    digests, last = {}, {}
    for event in events_of(run, "round"):
        turn = event.fields["round"]
        assert digests.setdefault(turn, event.fields["digest"]) == event.fields["digest"]
        assert turn > last.get((event.peer, event.at < LOST), 0)
        last[event.peer, event.at < LOST] = turn
    found = {}
    for event in events_of(run, "round"):
        found.setdefault(event.peer, []).append(event)
    return found


def goes_on(run, who, since=LOST + 5.0, rounds=2):
    """Check that these peers have had later rounds with training."""
    found = one_history(run)
    for one in who:
        assert sum(event.at > since and event.fields["tokens"] > 0 for event in found[one]) >= rounds, one
    return found


def losses(run, peer=1):
    return [event.fields["loss"] for event in events_of(run, "round", peer)]


@pytest.mark.trial
def test_lost_stage_is_restored_from_copy_of_previous_peer():
    """The host of a middle stage is killed. Training stops until a newcomer gets its copy from the origin."""
    run = lose(killed=(2,), comes=(1,))
    assert brought(run) == [(4, 1, "copy")]
    found = goes_on(run, (1, 3, 4))
    before, after = [event.fields["round"] for event in found[2]], [event.fields["round"] for event in found[4]]
    assert min(after) > max(before) + 3 and {(turn - 1) % 3 for turn in after} == {1}
    assert [event.fields["source"] for event in events_of(run, "stage_lost")][-1] == "copy"
    told = [event.fields["detail"] for event in events_of(run, "host_joined") if event.peer == 1]
    assert told[-1].startswith("stage 1, from: a copy of round ")
    between = [event for event in events_of(run, "round") if LOST + 0.5 < event.at < LOST + 4.0]
    assert between == []  # turns do not pass without it
    assert losses(run)[-1] < losses(run)[1]


@pytest.mark.trial
def test_lost_stage_without_copy_is_averaged_from_neighbours():
    """There is no copy: the stage is made from its two neighbours."""
    run = lose(killed=(2,), comes=(1,), buddy=0)
    assert brought(run) == [(4, 1, "average")]
    goes_on(run, (1, 3, 4))
    assert events_of(run, "host_joined")[-1].fields["detail"] == "stage 1, from: the mean of stages 0 and 2"


@pytest.mark.trial
def test_lost_last_stage_without_copy_restarts_from_scratch():
    run = lose(killed=(3,), comes=(2,), buddy=0)
    assert brought(run) == [(4, 2, "nothing")]
    goes_on(run, (1, 2, 4))


@pytest.mark.trial
def test_lost_origin_is_restored_from_copy_of_last_stage():
    """The host of the last stage has a copy of the first one; the others change to the newcomer's group."""
    run = lose(killed=(1,), comes=(0,))
    assert brought(run) == [(4, 0, "copy")]
    goes_on(run, (2, 3, 4))
    assert {event.peer for event in events_of(run, "group")} == {2, 3}


@pytest.mark.trial
def test_two_lost_neighbours_are_restored_in_turn():
    """The copy of one was lost with the other: it is made from its neighbours, one of them just recovered."""
    run = lose(killed=(2, 3), comes=(2, 1), stages=4, seconds=28.0)
    assert sorted(brought(run)) == [(5, 2, "average"), (6, 1, "copy")]
    goes_on(run, (1, 4, 5, 6), since=LOST + 7.0)


@pytest.mark.trial
def test_two_newcomers_restore_one_state():
    """Both find no holder. One gets permission to recover the stage, the other waits for it."""
    run = lose(killed=(2,), comes=(1, 1), buddy=0, seconds=26.0)
    assert len(brought(run)) == 1
    goes_on(run, (1, 3, 4, 5))


@pytest.mark.trial
def test_unreachable_holder_adopts_state_of_its_successor():
    """It was taken for dead, and a newcomer has its stage: it takes over that state."""
    run = lose(comes=(1,), faults=(Fault(LOST, "pause", (2,), 8.0),), seconds=24.0)
    assert brought(run) == [(4, 1, "copy")]
    assert [event.peer for event in events_of(run, "host_outdated")] == [2]
    found = goes_on(run, (1, 2, 3, 4), since=LOST + 8.0)
    newest = {one: found[one][-1].fields for one in (2, 4)}
    assert newest[2]["round"] == newest[4]["round"] and newest[2]["contributors"] == 2


@pytest.mark.trial
def test_restarted_holder_restores_stage_from_its_checkpoint(monkeypatch):
    """The holder is killed and restarts with its checkpoint, which only it has."""
    monkeypatch.setattr(checkpoint_schedule, "SAVE_SECONDS", 2.0)
    monkeypatch.setattr(checkpoint_schedule, "SAVE_ROUNDS", 1)
    run = lose(faults=(Fault(LOST, "restart", (2,), 5.0),), buddy=0, seconds=24.0)
    assert brought(run) == [(2, 1, "checkpoint")]
    goes_on(run, (1, 2, 3), since=LOST + 7.0)


@pytest.mark.trial
def test_restarted_holder_with_old_checkpoint_follows_new_state(monkeypatch):
    """A newcomer has recovered the stage meanwhile, and the old holder's checkpoint is older."""
    monkeypatch.setattr(checkpoint_schedule, "SAVE_SECONDS", 2.0)
    monkeypatch.setattr(checkpoint_schedule, "SAVE_ROUNDS", 1)
    run = lose(comes=(1,), faults=(Fault(LOST, "restart", (2,), 7.0),), seconds=30.0)
    assert brought(run) == [(4, 1, "copy")]
    assert [event.peer for event in events_of(run, "restored")] == [2]
    found = goes_on(run, (1, 2, 3, 4), since=LOST + 8.0)
    assert found[2][-1].fields["digest"] == found[4][-1].fields["digest"]
