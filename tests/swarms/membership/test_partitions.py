"""A partition of any kind leaves one history: a round has one digest in a lineage, and all meet again afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kit.histories import played, save_each_round, short_rounds, troubles
from thinwire.node.state.checkpoint_store import CheckpointStore, Loaded
from thinwire.sims.scenario.faults import Fault

AT = 9.5
"""Virtual second of the fault: in the midst of a round."""


@pytest.mark.trial
@pytest.mark.parametrize("seconds", [1.0, 10.0])
@pytest.mark.parametrize(("peers", "side"), [(7, (6,)), (2, (0,)), (5, (3, 4)), (4, (2, 3))])
def test_swarm_split_by_a_firewall_that_refuses_has_one_history(peers, side, seconds):
    run = played(short_rounds(peers, Fault(AT, "refuse", side, seconds), seconds=60.0))
    assert troubles(run, AT + seconds) == []


@pytest.mark.trial
@pytest.mark.parametrize("seconds", [1.0, 10.0])
@pytest.mark.parametrize(("peers", "side"), [(7, (6,)), (5, (3, 4)), (4, (2, 3))])
def test_swarm_split_by_a_firewall_that_drops_has_one_history(peers, side, seconds):
    run = played(short_rounds(peers, Fault(AT, "partition", side, seconds), seconds=60.0))
    assert troubles(run, AT + seconds) == []


@pytest.mark.parametrize("refused", ["one", "others"])
def test_swarm_with_one_peer_refused_in_one_direction_has_one_history(refused):
    """The connections of one side are refused at once, those of the other side hang."""
    pairs = [(6, 0, 1, 2, 3, 4, 5)] if refused == "one" else [(other, 6) for other in range(6)]
    faults = (Fault(AT, "refuse-one-way", pair, 1.0) for pair in pairs)
    assert troubles(played(short_rounds(7, *faults, seconds=60.0)), AT + 1.0) == []


@pytest.mark.parametrize("others", [(0,), (0, 1, 2, 3)])
def test_swarm_with_flapping_links_has_one_history(others):
    run = played(short_rounds(5, Fault(AT, "flap", (4, *others), 20.0), seconds=70.0))
    assert troubles(run, AT + 20.0) == []


@pytest.mark.parametrize("end", ["leave", "kill"])
def test_newcomer_of_the_smaller_part_finds_the_others_after_the_peer_that_admitted_it_is_gone(end):
    """Its Welcome names the others as absent."""
    faults = [Fault(4.0, "refuse", (3, 4), 34.0), *[Fault(32.0, "kill", (3,))] * (end == "kill")]
    scenario = short_rounds(5, *faults, seconds=90.0, joins={4: 18.0})
    if end == "leave":
        peers = (replace(peer, leave=32.0) if peer.index == 3 else peer for peer in scenario.peers)
        scenario = replace(scenario, peers=tuple(peers))
    assert troubles(played(scenario), 38.0) == []


@pytest.mark.parametrize("restarted", [(3, 4), (0, 1, 2, 3, 4)])
def test_parts_that_restart_during_a_partition_meet_afterwards(restarted):
    """Each part stores the addresses of the other one, which it cannot reach."""
    restarts = (Fault(22.0 + 0.5 * peer, "restart", (peer,), 2.0) for peer in restarted)
    run = played(short_rounds(5, Fault(4.0, "refuse", (3, 4), 34.0), *restarts, seconds=90.0))
    assert troubles(run, 38.0) == []


@pytest.mark.trial
def test_founder_without_a_readable_checkpoint_begins_no_run_beside_peers_that_it_cannot_reach(monkeypatch):
    """It ends, is started again, and joins the others after the partition."""
    save_each_round(monkeypatch)
    real = CheckpointStore.load

    def load(self, run_id=None):
        found = real(self, run_id)
        return found if found.snapshot is None else Loaded(None, None, ("bit rot",))

    monkeypatch.setattr(CheckpointStore, "load", load)
    faults = Fault(17.0, "partition", (0,), 80.0), Fault(18.0, "restart", (0,), 4.0)
    run = played(short_rounds(3, *faults, seconds=140.0))
    rounds = [event for event in run.journal.of("round") if event.peer == 0 and event.at > 22.0]
    assert rounds and min(event.at for event in rounds) > 97.0 and min(event.fields["round"] for event in rounds) > 40
    assert run.violations == ()
