"""Effects of faults on the machines and links of a simulated world."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from kit.scenarios import events_of, identity_of, manifest_of, swarm_of
from thinwire.sims.engine import virtual_loop
from thinwire.sims.engine.disk import SimDisk
from thinwire.sims.network.network import SimNet
from thinwire.sims.scenario.faults import Fault, flaps
from thinwire.sims.simulation.fault_injector import FaultInjector
from thinwire.sims.simulation.world import simulate
from thinwire.sims.trials.trial import PACE


def _play(*faults, seconds=12.0, **more):
    """Play a swarm; return its events "down" and "up" as (second, peer), without those of the start and the end."""
    run = simulate(
        swarm_of(more.pop("peers", 4), manifest_of("sync_every = 4\n"), seconds=seconds, faults=faults, **more),
        preset=PACE,
    )
    down, up = (events_of(run, name) for name in ("down", "up"))
    return [(one.at, one.peer) for one in down if one.fields["reason"] != "the end"], [
        (one.at, one.peer) for one in up if one.at > 1.0
    ]


def test_outage_kills_all_machines_and_boots_them_in_another_order():
    down, up = _play(Fault(5.0, "outage", (0, 1, 2, 3), 4.0))
    assert [at for at, _ in down] == [5.0, 5.5, 6.0, 6.5] and [at for at, _ in up[:4]] == [7.0, 7.5, 8.0, 8.5]
    deaths, returns = [peer for _, peer in down], [peer for _, peer in up[:4]]
    assert sorted(deaths) == sorted(returns) == [0, 1, 2, 3] and deaths != returns


def test_outage_does_not_boot_a_machine_that_was_down_before():
    _, up = _play(Fault(4.0, "kill", (3,)), Fault(5.0, "outage", (0, 1, 2, 3), 4.0))
    assert {peer for _, peer in up} == {0, 1, 2}


def test_lost_majority_stays_away_even_if_it_was_to_return_or_to_arrive():
    faults = (Fault(4.0, "restart", (2,), 4.0), Fault(5.0, "majority-lost", (2, 3, 4)))
    down, up = _play(*faults, peers=5, joins={4: 9.0}, seconds=14.0)
    assert down == [(4.0, 2), (5.0, 3)] and up == []


def test_lying_sync_ends_with_a_loss_of_power_of_a_disk_that_forgot():
    disk, done = SimDisk(random.Random(1)), []
    disk.make_directory(Path("/run"))

    def write(name):
        file = disk.create(Path("/run", name))
        file.write(bytes(100))
        file.sync()
        disk.sync_directory(Path("/run"))

    machine = SimpleNamespace(
        disk=disk, up=True, kill=lambda reason, *, crash: done.append((reason, crash)), boot=lambda: done.append("boot")
    )
    injector, fault = FaultInjector(None, [machine]), Fault(1.0, "lying-sync", (0,), 5.0)
    write("before")
    assert injector.begin(fault)
    write("during")
    injector.end(fault)
    assert done == [("killed", True), "boot"]
    disk.crash()
    assert "before" in disk.names(Path("/run"))
    machine.up = False
    injector.begin(fault)
    injector.end(fault)
    write("after")
    disk.crash()
    assert len(done) == 2 and disk.read(Path("/run/after"), 100) == bytes(100)


def test_process_that_is_killed_in_the_moment_of_its_start_opens_no_port():
    """The first fault boots a process. The second kills it before the tasks that it has begun have run (seed 4)."""
    faults = (Fault(3.0, "lying-sync", (1,), 2.0), Fault(3.5, "lying-sync", (1,), 1.5))
    scenario = swarm_of(3, manifest_of("sync_every = 4\n"), seconds=12.0, faults=faults)
    run = simulate(scenario, seed=4, preset=PACE)
    assert [event.at for event in events_of(run, "up") if event.peer == 1][1:] == [5.0, 5.0]
    assert run.violations == ()


def _held(net, ids):
    """Return pair of indices -> effect on an attempt of the first to connect to the second."""
    pairs = [(i, j) for i in range(len(ids)) for j in range(len(ids)) if i != j]
    refused = {(i, j): "refused" for i, j in pairs if net.holds.refused(ids[i], ids[j])}
    return refused | {(i, j): "cut" for i, j in pairs if net.holds.cut(ids[i], ids[j])}


INSIDE_OUT = [pair for i in (1, 2) for j in (0, 3) for pair in ((i, j), (j, i))]


@pytest.mark.parametrize(
    ("kind", "peers", "expected"),
    [
        ("refuse", (1, 2), dict.fromkeys(INSIDE_OUT, "refused")),
        ("refuse-one-way", (1, 2, 3), {(1, 2): "refused", (2, 1): "cut", (1, 3): "refused", (3, 1): "cut"}),
        ("flap", (1, 2, 3), dict.fromkeys(((1, 2), (2, 1), (1, 3), (3, 1)), "cut")),
    ],
)
def test_link_fault_affects_the_named_peers_until_its_end(kind, peers, expected):
    async def main():
        net = SimNet(1)
        machines = [SimpleNamespace(index=index, identity=identity_of(index)) for index in range(4)]
        ids = [machine.identity.peer_id for machine in machines]
        injector, fault = FaultInjector(net, machines), Fault(0.0, kind, peers, 12.0)
        net.at(fault.until, injector.end, fault)
        assert injector.begin(fault)
        await asyncio.sleep(0.1)
        assert _held(net, ids) == expected
        if kind == "flap":
            for turn, moment in enumerate(flaps(fault)):
                await asyncio.sleep(moment + 0.01 - net.loop.time())
                assert _held(net, ids) == ({} if turn % 2 else expected)
        await asyncio.sleep(12.1 - net.loop.time())
        assert _held(net, ids) == {}

    virtual_loop.run(main(), seed=1)
