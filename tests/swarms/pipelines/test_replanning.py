"""Groups whose origin plans the paths of micro-batches, or moves hosts to the slowest stage."""

from __future__ import annotations

from collections import defaultdict

import pytest
from kit.groups import PLANNED, agreed, contributors, host, peer, scenario, weak
from kit.scenarios import events_of, last_round, play
from thinwire.node.pipeline.groups.origin_learner import OriginLearner
from thinwire.node.pipeline.step.origin import Origin
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.simulation.world import SimWorld

TOKENS = 8
"""Of a micro-batch."""


@pytest.fixture
def seen(monkeypatch):
    """Return outcomes of steps, plans, and weights of rounds: (fragment, round) -> {peer: tokens}."""
    steps, said, weights = [], [], defaultdict(dict)
    make, learn, committed = Origin.step, OriginLearner.steps, SimWorld.committed

    async def step(self, batches):
        steps.append(await make(self, batches))
        return steps[-1]

    async def learned(self, n, stop):
        report = await learn(self, n, stop)
        said.append(self.summary)
        return report

    def commit(self, machine, outcome):
        proposal = outcome.commit.proposal
        weights[proposal.fragment, proposal.round] = {one.peer: one.weight for one in proposal.contributors}
        committed(self, machine, outcome)

    monkeypatch.setattr(Origin, "step", step)
    monkeypatch.setattr(OriginLearner, "steps", learned)
    monkeypatch.setattr(SimWorld, "committed", commit)
    return steps, said, weights


def test_planned_group_skips_stages_and_replans_after_a_kill(seen):
    """Five hosts in two stages, each micro-batch visits one; one is killed, and the plan is mended."""
    steps, said, weights = seen
    hosts = [host(index, 1 + index % 2, origin=1) for index in range(2, 7)]
    peers = (peer(0), host(1, 0, origin=1), *hosts)
    run = play(scenario(peers, faults=(Fault(7.5, "kill", (3,)),), pipeline=PLANNED, seconds=13.0))
    found = agreed(run)
    last = last_round(found)
    assert last >= 9 and all(max(found[index]) > last - 3 for index in (1, 2, 4, 5, 6)) and max(found[3]) < last - 3
    whys = [event.fields["why"] for event in events_of(run, "plan", 1)]
    assert whys[0] == "first" and set(whys[2:]) & {"mended", "peers"}, whys
    assert f"planned {len(whys)} times (first 1" in said[-1] and "by plan" in said[-1]
    for outcome in steps:
        assert outcome.finished == set(range(4)) and not outcome.lost and not outcome.skipped
        visits = [micro for peers in outcome.counted.values() for micros in peers.values() for micro in micros]
        assert sorted(visits) == [0, 1, 2, 3]  # each visits one of the two stages
        if outcome.planned < 1:  # something is known
            assert outcome.measured == pytest.approx(outcome.planned, rel=0.1)
    checked = 0
    for (fragment, number), said_weights in weights.items():
        turn = 3 * (number - 1) + fragment  # its fragment was sent three turns before, two steps are between two turns
        since = {outcome.step: outcome for outcome in steps if 2 * (turn - 2) <= outcome.step < 2 * (turn + 1)}
        if fragment and len(since) == 6:
            members = {member for outcome in since.values() for member in outcome.counted.get(fragment, {})}
            for member in members:
                count = sum(len(one.counted.get(fragment, {}).get(member, ())) for one in since.values())
                assert said_weights.get(member, TOKENS * count) == TOKENS * count
                checked += member in said_weights
    assert checked >= 3


@pytest.mark.trial
def test_planned_group_continues_without_a_lost_stage(seen):
    """Stage 1 loses its only holder: all micro-batches visit stage 2, and rounds do not wait for the group."""
    steps, _, _ = seen
    hosts = [host(index, index - 1, origin=1) for index in (2, 3)]
    peers = (peer(0, step=0.2), host(1, 0, origin=1), *hosts)
    run = play(scenario(peers, faults=(Fault(8.0, "kill", (2,)),), pipeline=PLANNED, seconds=20.0))
    agreed(run)
    last = max(event.fields["round"] for event in events_of(run, "round"))
    assert steps[6].counted.keys() == {1, 2} and steps[-1].counted.keys() == {2} and not steps[-1].lost
    by_fragment = {(turn - 1) % 3: contributors(run, turn) for turn in range(last - 3, last)}
    assert by_fragment == {0: {2}, 1: {1}, 2: {2}}
    assert [event.fields["stage"] for event in events_of(run, "stage_lost")][-1] == 1


@pytest.mark.trial
def test_host_moves_to_the_slowest_stage(seen):
    """Peer 2 is slow, and alone in its stage; the less busy host of the other stage moves there."""
    steps, _, _ = seen
    peers = (peer(0), weak(1, join=9.0), weak(2, step=1.0), weak(3), weak(4))
    run = play(scenario(peers, pipeline="rebalance = 8.0\nbackup_every = 0\n", seconds=40.0))
    found = agreed(run)
    (moved,) = events_of(run, "host_moved")
    assert moved.peer == 4 and moved.fields["detail"] == "from stage 2 to 1"
    (left,) = [event.peer for event in events_of(run, "down") if event.fields["reason"] == "left"]
    assert left in (1, 3)
    held = [(turn - 1) % 3 for turn in sorted(found[left])]
    assert held == [2] * held.count(2) + [1] * held.count(1) and held.count(2) and held.count(1) >= 2
    stayed = 4 - left
    assert {(turn - 1) % 3 for turn in found[stayed]} == {2} and max(found[stayed]) > max(found[left]) - 3
    # The slow host computes one of two micro-batches instead of both; links take the same time as before.
    assert steps[-1].measured < 2 / 3 * steps[0].measured
    assert not events_of(run, "stage_lost")[1:]  # but for the first moment


@pytest.mark.trial
def test_spare_host_moves_to_empty_stage():
    """Stage 1 has one host, stage 2 has two: the first is killed, and one of the others takes its place."""
    peers = (peer(0), weak(1, join=9.0), weak(2), weak(3), weak(4))
    faults = (Fault(19.0, "kill", (2,)),)
    run = play(scenario(peers, pipeline="rebalance = 20.0\n", seconds=36.0, faults=faults))
    found = agreed(run)
    (moved,) = events_of(run, "host_moved")
    assert moved.fields["detail"] == "from stage 2 to 1" and moved.at > 19
    mover = next(index for index in (1, 3) if len(events_of(run, "up", index)) == 2)
    last = last_round(found)
    assert (max(found[mover]) - 1) % 3 == 1 and max(found[mover]) > last - 3
    assert all(contributors(run, turn) == {2} for turn in range(last - 2, last + 1))


@pytest.mark.trial
def test_host_with_assigned_stage_does_not_move():
    """Its origin asks it once, and no other peer does."""
    hosts = (host(1, 0, origin=1), host(2, 1, origin=1, step=1.0), host(3, 2, origin=1), host(4, 2, origin=1))
    run = play(scenario((peer(0), *hosts), pipeline="rebalance = 4.0\n", seconds=24.0))
    asked = [event.fields["peer"] for event in events_of(run, "host_moved")]
    assert len(asked) == len(set(asked)) == 2
    assert {(turn - 1) % 3 for index in (3, 4) for turn in agreed(run)[index]} == {2}
