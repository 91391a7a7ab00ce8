"""Swarms that wait for nobody, in virtual time: peers as unequal as machines are, who die, come back and join."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from thinwire.node.buffered import BufferedReplica
from thinwire.sims.faults import Fault
from thinwire.sims.scenario import PeerSpec, Scenario
from thinwire.sims.seeds import PACE, STALL
from thinwire.sims.world import simulate

METHODS = ("delayed-nesterov", pytest.param("buffered-async", marks=pytest.mark.trial))
CHURN = (
    Fault(6.0, "kill", (3,)),
    Fault(8.2, "restart", (2,), seconds=3.0),
    Fault(11.1, "partition", (4, 5), seconds=3.0),
    Fault(15.3, "restart", (0,), seconds=3.0),
    Fault(18.2, "isolate", (1,), seconds=3.0),
)
SPEEDS = (0.25, 0.3, 0.5, 0.25, 1.0, 0.3, 0.6, 0.3)
"""Seconds that an inner step takes each peer."""


def world(method, *, peers=6, faults=(), seed=3, seconds=36.0, outer="", speeds=SPEEDS):
    specs = tuple(
        PeerSpec(
            index,
            f"peer-{index}",
            "Oregon",
            step_seconds=speeds[index % len(speeds)],
            up=2.5e6,
            down=37.5e6,
            join=0.0 if not index else 0.05 if index < peers - 2 else 2.0 + index,
        )
        for index in range(peers)
    )
    toml = (
        f'[outer]\nmethod = "{method}"\nlr = 0.4\nsteps = 4\n{outer}\n[exchange]\ngrace = 0.3\nmax_weight = 1000000\n'
    )
    return Scenario("buffered", seed, seconds, toml, specs, parameters=9_000, faults=faults, interval=seconds)


def of(run, kind):
    return [event for event in run.journal.events if event.name == kind]


def rounds(run):
    """Peer -> {round: digest} of what it committed or fetched."""
    found = {}
    for event in run.journal.events:
        if "digest" in event.fields and "round" in event.fields:
            found.setdefault(event.peer, {})[event.fields["round"]] = event.fields["digest"]
    return found


@pytest.mark.parametrize("method", METHODS)
def test_peers_die_come_back_and_join(method):
    run = simulate(world(method, faults=CHURN), preset=PACE, stall=STALL)
    assert run.violations == ()
    found = rounds(run)
    last = max(max(digests) for digests in found.values())
    # All but the one that was killed follow to the end, the slowest too.
    assert last > 20 and sum(last - 2 <= max(digests) for digests in found.values()) == 5
    for number in range(1, last + 1):
        assert len({digests[number] for digests in found.values() if number in digests}) <= 1
    losses = [event.fields["loss"] for event in of(run, "round") if event.fields["tokens"]]
    assert losses[-1] < 0.5 * losses[0]
    # Rounds are of some, most often; everybody's work is in some of them, and that of the slow is older.
    contributors = [event.fields["contributors"] for event in of(run, "round") if not event.peer]
    assert min(contributors) < 4
    given = {
        peer: sum(event.peer == peer and event.fields["tokens"] > 0 for event in of(run, "round")) for peer in found
    }
    assert all(given[peer] >= 3 for peer in found if peer != 3) and given[1] > 1.5 * given[4]


def marks(seed):
    return [pytest.mark.trial] if 0 < seed < 6 else [pytest.mark.soak] if seed else []


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=marks(seed)) for seed in range(400)])
def test_everything_that_can_go_wrong(seed):
    method = "buffered-async" if seed % 2 else "delayed-nesterov"
    scenario = world(method, peers=5, seed=seed, seconds=40.0, speeds=[2 * seconds for seconds in SPEEDS])
    run = simulate(replace(scenario, mix={"kill": 12.0, "loss": 12.0, "reset": 24.0}), preset=PACE, stall=STALL)
    assert run.violations == ()


def test_who_is_too_slow_gives_up_and_starts_from_what_all_have():
    """The last one makes a round of four steps while the others make twenty rounds: nothing of it is as young as it must be."""
    run = simulate(
        world("buffered-async", peers=4, outer="staleness = 2", speeds=(0.25, 0.25, 0.25, 1.5), seconds=24.0),
        preset=PACE,
        stall=STALL,
    )
    assert run.violations == ()
    assert len([event for event in of(run, "unsent") if event.peer == 3]) > 1
    assert not [event for event in of(run, "unsent") if event.peer != 3]
    assert not any(
        event.fields["tokens"] for event in of(run, "round") if event.peer == 3 and event.fields["round"] > 8
    )


def test_unequal_peers_arrive_together_when_they_work_by_power():
    """Peers eight times apart: with H steps each the slow are in few rounds, with steps by power in most."""

    def share(outer):
        speeds = (0.1, 0.2, 0.4, 0.8)
        scenario = world("delayed-nesterov", peers=4, outer=outer, speeds=speeds, seconds=24.0)
        run = simulate(scenario, preset=PACE, stall=STALL)
        assert run.violations == ()
        found = [event for event in of(run, "round") if not event.peer and event.fields["round"] > 8]
        return np.mean([event.fields["contributors"] for event in found]) / 4

    equal, by_power = share(""), share('work = "by-power"\nspread = 8')
    assert by_power > equal + 0.2


def test_a_joiners_first_pseudo_gradient_is_no_longer_than_the_others(monkeypatch):
    sent = []
    encode = BufferedReplica.encode

    def spy(self, read, grid, codec):
        theta = np.empty(self.size, np.float32)
        read(0, self.size, theta)
        sent.append((self, self.round, float(np.linalg.norm(self.start - theta))))
        return encode(self, read, grid, codec)

    monkeypatch.setattr(BufferedReplica, "encode", spy)
    run = simulate(world("delayed-nesterov", peers=4, seconds=16.0, speeds=(0.3, 0.35)), preset=PACE, stall=STALL)
    assert run.violations == ()
    firsts = {}
    for replica, number, norm in sent:
        firsts.setdefault(id(replica), (number, norm))
    late = [one for one in firsts.values() if one[0] > 3]
    assert late
    for number, norm in late:
        others = [length for _, at, length in sent if abs(at - number) <= 2]
        assert 0.5 * np.median(others) <= norm <= 2 * np.median(others)


def test_a_step_that_counts_something_of_ones_own_is_seen(monkeypatch):
    arrive = BufferedReplica.arrive

    def leaking(self, results, grid, codec, **told):
        arrive(self, results, grid, codec, **told)
        self.theta[:] += np.float32(1e-3) * self.age
        self.seal()

    monkeypatch.setattr(BufferedReplica, "arrive", leaking)
    run = simulate(world("buffered-async", peers=4, seconds=14.0), preset=PACE, stall=STALL)
    assert "agreement" in {violation.oracle for violation in run.violations}
