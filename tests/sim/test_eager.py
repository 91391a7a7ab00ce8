"""Swarms with eager updates, and with CO2, in virtual time: a round is under way during all of the next one's inner steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from thinwire.node.eager import EagerReplica
from thinwire.sims.faults import Fault
from thinwire.sims.scenario import PeerSpec, Scenario
from thinwire.sims.seeds import PACE, STALL
from thinwire.sims.world import simulate

CHURN = (
    Fault(5.0, "kill", (3,)),
    Fault(8.2, "restart", (2,), seconds=5.0),
    Fault(11.1, "partition", (4, 5), seconds=4.0),
    Fault(16.3, "restart", (0,), seconds=3.0),
    Fault(17.2, "isolate", (6,), seconds=3.0),
)


def world(*, peers=8, faults=(), seed=3, seconds=40.0, up=2.5e6, method="eager"):
    specs = tuple(
        PeerSpec(
            index,
            f"peer-{index}",
            "Oregon",
            step_seconds=0.5 + 0.01 * (index % 4),
            up=up,
            down=37.5e6,
            join=0.0 if not index else 0.05 if index < peers - 2 else 2.0 + index,
        )
        for index in range(peers)
    )
    toml = f'[outer]\nmethod = "{method}"\nlr = 0.2\nsteps = 4\n[exchange]\ngrace = 1.0\nmax_weight = 1000000\n'
    return Scenario(method, seed, seconds, toml, specs, parameters=9_000, faults=faults, interval=seconds)


def rounds(run):
    """Peer -> {round: digest} of what it committed or fetched."""
    found = {}
    for event in run.journal.events:
        if "digest" in event.fields and "round" in event.fields:
            found.setdefault(event.peer, {})[event.fields["round"]] = event.fields["digest"]
    return found


@pytest.mark.parametrize("method", ["eager", "co2"])
def test_peers_die_come_back_and_join(method):
    run = simulate(world(faults=CHURN, method=method), preset=PACE, stall=STALL)
    assert run.violations == ()
    found = rounds(run)
    last = max(max(digests) for digests in found.values())
    assert (
        last > 12 and sum(last - 1 <= max(digests) for digests in found.values()) == 7
    )  # all but the one that was killed
    for number in range(1, last + 1):
        assert len({digests[number] for digests in found.values() if number in digests}) <= 1
    losses = [event.fields["loss"] for event in run.journal.events if event.name == "round"]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("method", ["eager", "co2"])
@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(pytest.param(seed, marks=pytest.mark.trial) for seed in range(1, 10)),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(10, 200)),
    ],
)
def test_everything_that_can_go_wrong(seed, method):
    scenario = replace(world(peers=6, seed=seed, method=method), mix={"kill": 12.0, "loss": 12.0, "reset": 24.0})
    assert simulate(scenario, preset=PACE, stall=STALL).violations == ()


def test_nobody_waits_for_links_that_are_as_slow_as_the_inner_steps():
    scenario = world(peers=4, up=12e3)
    peers = tuple(replace(peer, join=min(peer.join, 0.05)) for peer in scenario.peers)
    run = simulate(replace(scenario, peers=peers), preset=PACE, stall=STALL)
    assert run.violations == ()
    waits = sorted(event.fields["sync_seconds"] for event in run.journal.events if event.name == "round")
    # Four peers of forty seconds each; a round moves for more than a second.
    assert waits[len(waits) // 2] < 0.4 and sum(waits) < 0.1 * 4 * 40, waits


def test_an_outer_state_that_holds_something_of_ones_own_is_seen(monkeypatch):
    apply = EagerReplica.apply

    def leaking(self, results, grid, codec, **told):
        apply(self, results, grid, codec, **told)
        self.theta[:] += self.ahead
        self.seal()

    monkeypatch.setattr(EagerReplica, "apply", leaking)
    run = simulate(world(peers=4, seconds=14.0), preset=PACE, stall=STALL)
    assert "agreement" in {violation.oracle for violation in run.violations}
