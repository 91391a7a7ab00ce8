"""After an outage of all peers the newest history continues, in whatever order they return."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
from kit.histories import digests_of, played, save_each_round, short_rounds, troubles
from thinwire.node.peer.peer import PATIENCE
from thinwire.sims.scenario.faults import Fault


def _newest(run, until):
    return max(slot.round for slot in digests_of(run, until=until))


@pytest.mark.trial
@pytest.mark.parametrize("first", [0, 2, *(pytest.param(first, marks=pytest.mark.soak) for first in (1, 3, 4))])
def test_swarm_that_returns_after_staggered_deaths_continues_its_newest_round(monkeypatch, first):
    """The peer that returns first died earlier than others, or last."""
    save_each_round(monkeypatch)
    back, deaths = 26.0, (10.0, 13.0, 16.0, 19.0, 22.0)
    returns = {peer: back + 0.05 * ((peer - first) % 5) for peer in range(5)}
    faults = (Fault(at, "restart", (peer,), returns[peer] - at) for peer, at in enumerate(deaths))
    run = played(short_rounds(5, *faults, seconds=100.0, seed=4))
    assert troubles(run, back + 0.2) == []
    again = min(slot.round for slot in digests_of(run, since=back) if not slot.lineage)
    assert again >= _newest(run, back), "no committed round is lost"
    assert not any(slot.lineage for slot in digests_of(run, since=run.ended - 30.0)), "nor is another lineage left"


def test_swarm_continues_after_staggered_deaths_and_one_lost_folder(monkeypatch):
    """Three come back with checkpoints of different rounds, and one without its run folder; the founder is not first."""
    save_each_round(monkeypatch)
    times = {0: (10.9, 27.0), 1: (10.9, 25.0), 2: (14.5, 25.2), 3: (17.0, 25.4)}
    faults = (
        Fault(death, "lost-folder" if peer == 3 else "restart", (peer,), back - death)
        for peer, (death, back) in times.items()
    )
    run = played(short_rounds(4, *sorted(faults, key=lambda fault: fault.at), seconds=110.0, seed=4))
    assert troubles(run, 27.0) == []


@pytest.mark.trial
@pytest.mark.parametrize("saves", ["each round", "seldom"])
@pytest.mark.parametrize("at", [8.0, 9.1, 10.3])
def test_swarm_continues_after_outage_of_all_peers(monkeypatch, at, saves):
    """If checkpoints are seldom, the last rounds are made again: they need a lineage, since they get other digests."""
    if saves == "each round":
        save_each_round(monkeypatch)
    run = played(short_rounds(5, Fault(at, "outage", (0, 1, 2, 3, 4), 4.0), seconds=70.0))
    assert troubles(run, at + 4.0) == []


@pytest.mark.parametrize("end", ["leave", "kill"])
def test_swarm_returns_from_an_outage_without_its_founder(monkeypatch, end):
    save_each_round(monkeypatch)
    faults = [Fault(14.0, "outage", (1, 2, 3, 4), 6.0), *[Fault(8.0, "kill", (0,))] * (end == "kill")]
    scenario = short_rounds(5, *faults, seconds=70.0)
    if end == "leave":
        peers = (replace(peer, leave=8.0) if peer.index == 0 else peer for peer in scenario.peers)
        scenario = replace(scenario, peers=tuple(peers))
    assert troubles(played(scenario), 20.0) == []


@pytest.mark.parametrize(("at", "stall"), [(9.5, 8.0), (10.5, 2.0)])
def test_kill_stall_join_and_leave_in_one_second_delay_the_rounds_by_a_patience_each_at_most(at, stall):
    """The delay is the time beyond usual rounds, of all rounds until the end."""
    faults = Fault(at, "kill", (1,)), Fault(at + 0.3, "pause", (2,), stall)
    scenario = short_rounds(7, *faults, seconds=50.0, joins={6: at + 0.6})
    peers = (replace(peer, leave=at + 0.9) if peer.index == 3 else peer for peer in scenario.peers)
    run = played(replace(scenario, peers=tuple(peers)))
    assert troubles(run, at + stall) == []
    first: dict[int, float] = {}
    for event in run.journal.of("round"):
        first.setdefault(event.fields["round"], event.at)
    spans = [later - earlier for earlier, later in pairwise(first[number] for number in sorted(first))]
    usual = median(spans)
    assert sum(span - usual for span in spans) <= 4 * PATIENCE
