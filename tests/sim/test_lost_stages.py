"""A stage whose last holder is lost, in virtual time: where it comes from, who says so, and that it has one history."""

from __future__ import annotations

import pytest
from thinwire.node import duties
from thinwire.sims.faults import Fault
from thinwire.sims.scenario import PeerSpec, Scenario
from thinwire.sims.seeds import PACE, STALL
from thinwire.sims.world import simulate

LOST = 13.0
"""When the last holder is killed, in virtual seconds. The peer that held the whole model has left by then."""


def peer(index, stage, *, join=0.2, origin=1):
    return PeerSpec(
        index, f"peer-{index}", "Oregon", step_seconds=0.1, up=2.5e6, down=37.5e6, stage=stage, origin=origin, join=join
    )


def play(*, killed=(), comes=(), stages=3, buddy=2, seconds=25.0, faults=(), recent=50):
    """A founder who leaves; peers 1, 2, … of stages 0, 1, …, of which some are killed; then others of the stages in `comes`."""
    founder = PeerSpec(0, "peer-0", "Oregon", step_seconds=0.2, up=2.5e6, down=37.5e6, leave=3.0)
    group = tuple(peer(1 + stage, stage) for stage in range(stages))
    late = tuple(
        peer(1 + stages + number, stage, join=LOST + 4.0, origin=1 if stage else 1 + stages + number)
        for number, stage in enumerate(comes)
    )
    toml = f"""
[model]
layers = {stages}
width = 8
heads = 2
context = 8
[inner]
batch = 1
accumulate = 2
warmup = 0
[outer]
method = "streaming"
steps = {2 * stages}
[pipeline]
stages = {stages}
codec = "fp32"
buddy = {buddy}
recent = {recent}
[exchange]
grace = 1.0
"""
    kills = tuple(Fault(LOST, "kill", (one,)) for one in killed)
    peers = (founder, *group, *late)
    scenario = Scenario("lost", 3, seconds, toml, peers, compute="torch", faults=(*kills, *faults), interval=seconds)
    run = simulate(scenario, preset=PACE, stall=STALL)
    assert run.violations == ()
    return run


def named(run, name):
    return [event for event in run.journal.events if event.name == name]


def brought(run):
    """Who brought which stage back, from where."""
    return [(event.peer, event.fields["stage"], event.fields["source"]) for event in named(run, "brought back")]


def one_history(run, stages=3):
    """After each round of a fragment all who had it have one state, also those who come back; numbers only grow. By peer."""
    digests, last = {}, {}
    for event in named(run, "round"):
        turn = event.fields["round"]
        assert digests.setdefault(turn, event.fields["digest"]) == event.fields["digest"]
        assert turn > last.get((event.peer, event.at < LOST), 0)
        last[event.peer, event.at < LOST] = turn
    found = {}
    for event in named(run, "round"):
        found.setdefault(event.peer, []).append(event)
    return found


def goes_on(run, who, since=LOST + 5.0, rounds=2):
    """These have had rounds since, in which somebody trained."""
    found = one_history(run)
    for one in who:
        assert sum(event.at > since and event.fields["tokens"] > 0 for event in found[one]) >= rounds, one
    return found


def losses(run, peer=1):
    return [event.fields["loss"] for event in named(run, "round") if event.peer == peer]


def test_a_copy_that_the_peer_before_kept():
    """The host of a middle stage is killed. Nobody trains until another comes, who has it of the origin, as the origin says."""
    run = play(killed=(2,), comes=(1,))
    assert brought(run) == [(4, 1, "copy")]
    found = goes_on(run, (1, 3, 4))
    before, after = [event.fields["round"] for event in found[2]], [event.fields["round"] for event in found[4]]
    assert min(after) > max(before) + 3 and {(turn - 1) % 3 for turn in after} == {1}
    assert [event.fields["source"] for event in named(run, "stage without holder")][-1] == "copy"
    told = [event.fields["detail"] for event in named(run, "host") if event.peer == 1]
    assert told[-1].startswith("stage 1, from: a copy of round ")
    between = [event for event in named(run, "round") if LOST + 0.5 < event.at < LOST + 4.0]
    assert between == []  # time stands still without it, so that no turn is lost
    assert losses(run)[-1] < losses(run)[1]


@pytest.mark.trial
def test_the_mean_of_its_neighbours():
    """Nobody kept a copy: the stage between two others is made of them."""
    run = play(killed=(2,), comes=(1,), buddy=0)
    assert brought(run) == [(4, 1, "average")]
    goes_on(run, (1, 3, 4))
    assert named(run, "host")[-1].fields["detail"] == "stage 1, from: the mean of stages 0 and 2"


@pytest.mark.trial
def test_the_last_stage_without_a_copy_begins_anew():
    run = play(killed=(3,), comes=(2,), buddy=0)
    assert brought(run) == [(4, 2, "nothing")]
    goes_on(run, (1, 2, 4))


@pytest.mark.trial
def test_the_origin_is_lost():
    """The host of the last stage has a copy of the first one; the others go over to the newcomer."""
    run = play(killed=(1,), comes=(0,))
    assert brought(run) == [(4, 0, "copy")]
    goes_on(run, (2, 3, 4))
    assert {event.peer for event in named(run, "group")} == {2, 3}


@pytest.mark.trial
def test_two_neighbours_are_lost_at_once():
    """The copy of one of them is lost with the other: it is made of its neighbours, one of which has just come back itself."""
    run = play(killed=(2, 3), comes=(2, 1), stages=4, seconds=32.0)
    assert sorted(brought(run)) == [(5, 2, "average"), (6, 1, "copy")]
    goes_on(run, (1, 4, 5, 6), since=LOST + 7.0)


def test_two_newcomers_bring_back_one_state():
    """Both find nobody who has it. One is told to bring it back, the other waits for that."""
    run = play(killed=(2,), comes=(1, 1), buddy=0, seconds=26.0)
    assert len(brought(run)) == 1
    goes_on(run, (1, 3, 4, 5))


def test_a_holder_that_was_out_of_reach_gives_way():
    """It was taken for dead, and another has its stage by now: it takes that one's state, its own goes nowhere."""
    run = play(comes=(1,), faults=(Fault(LOST, "pause", (2,), 8.0),), seconds=28.0)
    assert brought(run) == [(4, 1, "copy")]
    assert [event.peer for event in named(run, "outdated")] == [2]
    found = goes_on(run, (1, 2, 3, 4), since=LOST + 8.0)
    newest = {one: found[one][-1].fields for one in (2, 4)}
    assert newest[2]["round"] == newest[4]["round"] and newest[2]["contributors"] == 2


@pytest.mark.trial
def test_its_own_checkpoint(monkeypatch):
    """The holder is killed and comes back with what it has on its disk, which no other has."""
    monkeypatch.setattr(duties, "SAVE_SECONDS", 2.0)
    run = play(faults=(Fault(LOST, "restart", (2,), 5.0),), buddy=0, seconds=28.0)
    assert brought(run) == [(2, 1, "checkpoint")]
    goes_on(run, (1, 2, 3), since=LOST + 7.0)


@pytest.mark.trial
def test_a_holder_that_comes_back_with_a_checkpoint_follows_the_new_history(monkeypatch):
    """Another has brought the stage back meanwhile: what the old holder has on its disk is of an earlier round."""
    monkeypatch.setattr(duties, "SAVE_SECONDS", 2.0)
    run = play(comes=(1,), faults=(Fault(LOST, "restart", (2,), 7.0),), seconds=34.0)
    assert brought(run) == [(4, 1, "copy")]
    assert [event.peer for event in named(run, "restored")] == [2]
    found = goes_on(run, (1, 2, 3, 4), since=LOST + 8.0)
    assert found[2][-1].fields["digest"] == found[4][-1].fields["digest"]
