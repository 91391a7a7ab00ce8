"""A lost state is excused only if a fault may have damaged the disk."""

from dataclasses import replace

import pytest
from thinwire.node.state.checkpoint_store import CheckpointStore, Loaded
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.simulation.world import simulate
from thinwire.sims.trials import families, trial


@pytest.mark.parametrize("planted", [False, True])
def test_invariants_notice_that_intact_checkpoints_are_not_read(planted, monkeypatch):
    load = CheckpointStore.load

    def refuse(self, run_id=None):
        found = load(self, run_id)
        return found if found.snapshot is None else Loaded(None, None, ("damaged",))

    if planted:
        monkeypatch.setattr(CheckpointStore, "load", refuse)
    scenario = families.scenario("diloco", 0)
    peers = tuple(replace(peer, join=0.05 * bool(peer.index)) for peer in scenario.peers)
    faults = tuple(Fault(20.0 + 0.01 * index, "restart", (index,), 3.0) for index in range(len(peers)))
    scenario = replace(scenario, peers=peers, faults=faults, duration=80.0)
    found = simulate(scenario, preset=trial.PACE, stall=families.FAMILIES["diloco"].stall, first=True).violations
    assert bool(found) == planted
