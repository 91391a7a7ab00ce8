"""Checkpoints of a simulated swarm on slow and full disks: training does not wait for them."""

from __future__ import annotations

import weakref
from itertools import pairwise

import pytest
from kit.scenarios import events_of, manifest_of, one_state, play, rounds_of, swarm_of
from thinwire.node.outer.round_loop import ReplicaLoop
from thinwire.node.outer.state_transfer import round_history
from thinwire.node.peer import checkpoint_schedule
from thinwire.node.state.checkpoint_store import CheckpointStore, Loaded
from thinwire.sims.peers.learners import StubLearner
from thinwire.sims.scenario.faults import Fault

METHODS = {
    "diloco": "sync_every = 4\n",
    "streaming": 'method = "streaming"\nsync_every = 4\nfragments = 2\noverlap = 3\n',
    "buffered-async": 'method = "buffered-async"\nsync_every = 4\n',
}


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """A checkpoint is due after every round."""
    monkeypatch.setattr(checkpoint_schedule, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint_schedule, "SAVE_ROUNDS", 1)


def run_of(*faults, outer=METHODS["diloco"], peers=2, seconds=40.0):
    """Play a swarm that makes four inner steps a second."""
    return play(swarm_of(peers, manifest_of(outer, codec="fp32"), step=0.25, seconds=seconds, faults=faults))


@pytest.mark.parametrize("method", METHODS)
def test_slow_disk_does_not_delay_rounds(method):
    """With 2 s per operation a checkpoint takes more than half a minute."""
    slow = [Fault(3.0, "slow-disk", (index,), 100.0, 2.0) for index in range(2)]
    runs = run_of(outer=METHODS[method]), run_of(*slow, outer=METHODS[method])
    usual, delayed = ([one.at for one in events_of(run, "round", 0)] for run in runs)
    assert len(usual) > 20 and len(delayed) == len(usual)
    longest, most = (max(after - before for before, after in pairwise(times)) for times in (usual, delayed))
    assert most < longest + 0.1
    for index, count in ((0, 0), (1, 2)):
        said = [one for one in events_of(runs[index], "checkpoint") if "skipped" in one.fields["detail"]]
        assert len(said) == count


def test_full_disk_is_reported_until_a_checkpoint_is_written_and_training_continues():
    run = run_of(Fault(10.0, "no-space", (1,), 10.0), Fault(25.0, "restart", (1,), 2.0))
    (alarm,), (over,) = events_of(run, "alarm", 1), events_of(run, "alarm_over", 1)
    assert alarm.fields["detail"].startswith("no checkpoint: No space") and 10.0 <= alarm.at <= 20.0
    assert over.fields["alarm"] == alarm.fields["detail"] and 20.0 <= over.at <= 25.0
    during = [one for one in events_of(run, "round", 1) if 10.0 < one.at < 20.0]
    assert len(during) > 5
    (restored,) = events_of(run, "restored", 1)
    assert restored.fields["round"] >= during[-1].fields["round"] + 2


def test_killed_peer_restores_its_checkpoint_and_fetches_the_newer_state(monkeypatch):
    """The last checkpoint is up to ten rounds older than the kill."""
    monkeypatch.setattr(checkpoint_schedule, "SAVE_SECONDS", 5.0)
    monkeypatch.setattr(checkpoint_schedule, "SAVE_ROUNDS", 10)
    run = run_of(Fault(25.0, "restart", (2,), 4.0), peers=3)
    (restored,) = events_of(run, "restored", 2)
    before = [one for one in events_of(run, "round", 2) if one.at < 25.0][-1]
    ready = events_of(run, "ready", 2)[-1]
    assert 0 < restored.fields["round"] < before.fields["round"] < ready.fields["round"]
    found = one_state(rounds_of(run))
    assert max(found[2]) == max(found[0])


def _returner(monkeypatch, seconds, spare):
    """Play a sparse swarm with small results, in which peer 2 is away for that time; return the run."""
    monkeypatch.setattr(round_history, "SPARE", spare)
    outer = 'method = "sparseloco"\nsync_every = 4\n'
    manifest = manifest_of(outer, codec="topk(k=16,chunk=4096)|2bit|rice")
    return play(swarm_of(3, manifest, step=0.25, seconds=40.0, faults=[Fault(20.0, "restart", (2,), seconds)]))


def test_returning_peer_replays_the_rounds_that_it_missed(monkeypatch):
    """The results of a few sparse rounds are smaller than a state, all chunks of which have changed."""
    run = _returner(monkeypatch, 4.0, 1)
    (restored,), (replay,) = events_of(run, "restored", 2), events_of(run, "replay", 2)
    assert replay.fields["round"] == restored.fields["round"] and replay.fields["rounds"] >= 2
    assert not [one for one in events_of(run, "synced", 2) if one.at > 20.0], "no state was fetched"
    applied = [one.fields["round"] for one in events_of(run, "round", 2) if one.at > 24.0]
    assert applied[: replay.fields["rounds"]] == [
        replay.fields["round"] + 1 + n for n in range(replay.fields["rounds"])
    ]
    caught_up = next(
        one.at
        for one in events_of(run, "round", 2)
        if one.fields["round"] == max(applied[:1]) + replay.fields["rounds"]
    )
    assert caught_up < 30.0
    found = one_state(rounds_of(run))
    assert max(found[2]) == max(found[0])


def test_returning_peer_fetches_the_state_if_the_results_are_gone(monkeypatch):
    run = _returner(monkeypatch, 4.0, 10**9)
    assert not events_of(run, "replay", 2) and [one for one in events_of(run, "synced", 2) if one.at > 20.0]
    found = one_state(rounds_of(run))
    assert max(found[2]) == max(found[0])


@pytest.mark.parametrize("peers", [1, 2])
def test_founder_does_not_begin_the_run_again_if_its_checkpoints_cannot_be_read(monkeypatch, peers):
    """With rounds from the first weights the user would lose what can be repaired."""
    real = CheckpointStore.load

    def load(self, run_id=None):
        found = real(self, run_id)
        return found if found.snapshot is None else Loaded(None, None, ("bit rot",))

    monkeypatch.setattr(CheckpointStore, "load", load)
    others = [Fault(10.0, "kill", tuple(range(1, peers)))] if peers > 1 else []
    run = run_of(*others, Fault(10.0, "restart", (0,), 3.0), peers=peers, seconds=20.0)
    ends = [one.fields["reason"] for one in events_of(run, "down", 0)]
    assert any("no checkpoint of the run can be read: bit rot" in reason for reason in ends), ends
    assert any("no other peer of the run can be reached" in reason for reason in ends) == (peers > 1)
    assert not [one for one in events_of(run, "round", 0) if one.at > 13.0]


def test_first_parameters_are_not_in_memory_while_a_peer_joins(monkeypatch):
    """The replica has a copy. With them, a joiner would have three vectors of the model's size besides its model."""
    made, left = [], []
    parameters, enter = StubLearner.parameters, ReplicaLoop.enter

    def noted(self):
        found = parameters(self)
        made.append(weakref.ref(found))
        return found

    async def entering(self, **options):
        left.append([one() is not None for one in made])
        return await enter(self, **options)

    monkeypatch.setattr(StubLearner, "parameters", noted)
    monkeypatch.setattr(ReplicaLoop, "enter", entering)
    play(swarm_of(2, manifest_of("sync_every = 4\n"), seconds=8.0))
    assert left == [[False, False]]
