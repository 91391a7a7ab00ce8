"""Swarms in which some or most peers are behind address translators violate no invariant."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from kit.scenarios import EARLY, manifest_of, peer
from thinwire.sims.network.translator import Nat
from thinwire.sims.peers.machine import Machine
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.scenario.scenario import Scenario
from thinwire.sims.simulation.world import Run, SimWorld, simulate
from thinwire.sims.trials.trial import PACE, STALL

OPEN, HIDDEN = "none", "symmetric"

REGIONS = ("Oregon", "London", "Japan")
"""Regions so far apart that a round takes half a second."""


def played(
    nats: Sequence[Nat], *, joins: Sequence[float] = (), faults: tuple[Fault, ...] = (), seconds: float = 16.0
) -> Run:
    """Play a swarm with one peer for each translator. `joins`: arrivals of the last peers; the others come at the start."""
    starts = [0.0] + [EARLY] * (len(nats) - 1 - len(joins)) + list(joins)
    peers = tuple(
        peer(i, nat=nat, join=join, region=REGIONS[i % 3])
        for i, (nat, join) in enumerate(zip(nats, starts, strict=True))
    )
    scenario = Scenario("nat", 3, seconds, manifest_of("sync_every = 4"), peers, parameters=2000, faults=faults)
    return simulate(scenario, preset=PACE, stall=STALL, still=True)


def contributors(run: Run) -> dict[int, int]:
    """Return the number of contributors of each round."""
    return {event.fields["round"]: event.fields["contributors"] for event in run.journal.of("round")}


@pytest.mark.parametrize("hidden", [2, 5])
def test_peers_that_cannot_reach_each_other_all_contribute(hidden: int) -> None:
    """Two of six, and all but one."""
    run = played([OPEN] * (6 - hidden) + [HIDDEN] * hidden)
    assert run.violations == ()
    counts = contributors(run)
    assert max(counts) >= 4 and all(counts[number] == 6 for number in counts if number >= 2)


def test_newcomers_behind_translators_get_in_and_contribute() -> None:
    run = played([OPEN, OPEN, HIDDEN, HIDDEN, "restricted"], joins=(4.0, 5.0, 6.0))
    assert run.violations == ()
    counts = contributors(run)
    assert counts[1] < 3 and counts[max(counts)] == 5


def test_relay_that_dies_in_the_middle_of_a_round_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay of two peers is killed when all have just trained for round 3."""
    killed: list[Fault] = []
    heard = SimWorld.event

    def event(self: SimWorld, machine: Machine, kind: str, fields: dict[str, object]) -> None:
        heard(self, machine, kind, fields)
        process, other = machine.process, self.machines[3]
        if killed or kind != "round" or fields["round"] != 2 or machine.index != 4:
            return
        assert process is not None and process.transport is not None
        relay = process.transport.relay_of(other.identity.peer_id)
        victim = next(one for one in self.machines if one.identity.peer_id == relay)
        killed.append(Fault(self.loop.time() + 2.25, "kill", (victim.index,)))
        self.net.at(killed[0].at, self._begin, killed[0])

    monkeypatch.setattr(SimWorld, "event", event)
    run = played([OPEN, OPEN, OPEN, HIDDEN, HIDDEN])
    assert run.violations == ()
    commits = [event.at for event in run.journal.of("round") if event.fields["round"] == 3]
    assert killed[0].at < min(commits)
    counts = contributors(run)
    assert max(counts) >= 4 and counts[max(counts)] == 4


def test_founder_that_restarts_joins_peers_that_cannot_be_dialled() -> None:
    """It is the only one that can be dialled, so its knocks fail, and the others come to its gate."""
    run = played([OPEN] + [HIDDEN] * 3, faults=(Fault(5.0, "restart", (0,), 2.0),), seconds=32.0)
    assert run.violations == ()
    ready = [event.at for event in run.journal.of("ready") if event.peer == 0]
    assert len(ready) == 2 and ready[1] < 15.0
    counts = contributors(run)
    assert counts[max(counts)] == 4
