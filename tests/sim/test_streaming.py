"""Swarms that train on while parts of the model are under way, in virtual time: lives, faults, and what the oracles say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from thinwire.node.streaming import StreamingReplica, StreamingRounds
from thinwire.sims import clock
from thinwire.sims.faults import Fault
from thinwire.sims.scenario import PeerSpec, Scenario
from thinwire.sims.seeds import PACE, STALL
from thinwire.sims.world import simulate

OUTER = 'method = "streaming"\nsteps = 12\nfragments = 3\noverlap = {overlap}\nalpha = {alpha}\n'
CHURN = (
    Fault(5.0, "kill", (3,)),
    Fault(8.2, "restart", (2,), seconds=5.0),
    Fault(11.1, "partition", (4, 5), seconds=4.0),
    Fault(16.3, "restart", (0,), seconds=3.0),
    Fault(17.2, "isolate", (6,), seconds=3.0),
)


def world(outer, *, peers=8, faults=(), seed=3, seconds=40.0, codec="int8(block=256)", region="Oregon"):
    specs = tuple(
        PeerSpec(
            index,
            f"peer-{index}",
            region,
            step_seconds=0.5 + 0.01 * (index % 4),
            up=2.5e6,
            down=37.5e6,
            join=0.0 if not index else 0.05 if index < peers - 2 else 2.0 + index,
        )
        for index in range(peers)
    )
    toml = f'[outer]\n{outer}[exchange]\ncodec = "{codec}"\ngrace = 1.0\nmax_weight = 1000000\n'
    return Scenario("streaming", seed, seconds, toml, specs, parameters=9_000, faults=faults, interval=seconds)


def rounds(run):
    """Peer -> {round: digest} of what it committed or fetched."""
    found = {}
    for event in run.journal.events:
        if "digest" in event.fields and "round" in event.fields:
            found.setdefault(event.peer, {})[event.fields["round"]] = event.fields["digest"]
    return found


@pytest.mark.parametrize(
    ("overlap", "alpha"), [(2, 0.5), *(pytest.param(*case, marks=pytest.mark.trial) for case in ((0, 0.0), (4, 0.0)))]
)
def test_peers_die_come_back_and_join(overlap, alpha):
    run = simulate(world(OUTER.format(overlap=overlap, alpha=alpha), faults=CHURN), preset=PACE, stall=STALL)
    assert run.violations == ()
    found = rounds(run)
    last = max(max(digests) for digests in found.values())
    assert (
        last > 12 and sum(last - 1 <= max(digests) for digests in found.values()) == 7
    )  # all but the one that was killed
    for number in range(1, last + 1):
        assert len({digests[number] for digests in found.values() if number in digests}) <= 1


@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(pytest.param(seed, marks=pytest.mark.trial) for seed in range(1, 16)),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(16, 200)),
    ],
)
def test_everything_that_can_go_wrong(seed):
    scenario = replace(
        world(OUTER.format(overlap=1 + seed % 4, alpha=0.5), peers=6, seed=seed),
        mix={"kill": 12.0, "loss": 12.0, "reset": 24.0},
    )
    assert simulate(scenario, preset=PACE, stall=STALL).violations == ()


def test_a_real_model_by_layers():
    """Layers in turn, trained for real."""
    model = "[model]\nlayers = 3\nwidth = 8\nheads = 2\ncontext = 8\n[inner]\nbatch = 1\n"
    scenario = world(OUTER.format(overlap=2, alpha=0.5) + model, peers=3, seconds=12.0)
    run = simulate(replace(scenario, compute="torch"), preset=PACE, stall=STALL)
    assert run.violations == () and max(map(max, rounds(run).values())) >= 5


def _wrong_part(patch):
    """Every round is about the first part."""
    patch.setattr(StreamingReplica, "spans", lambda self, start, stop: self.parts[0].within(start, stop))


def _counted_twice(patch):
    """What went into a part counts again after it was sent."""
    sync = StreamingRounds.sync

    async def forgetful(self, **told):
        before = list(self._owed)
        outcome = await sync(self, **told)
        self._owed = [max(pair) for pair in zip(before, self._owed, strict=True)]
        return outcome

    patch.setattr(StreamingRounds, "sync", forgetful)


def _mixed_by_halves(patch):
    """The momentum of one element is another than that of the formula."""
    apply = StreamingReplica.apply

    def sloppy(self, results, grid, codec, **told):
        apply(self, results, grid, codec, **told)
        self.momentum[0] = np.nextafter(self.momentum[0], np.float32(9))
        self.seal()

    patch.setattr(StreamingReplica, "apply", sloppy)


@pytest.mark.parametrize(
    ("plant", "oracle"), [(_wrong_part, "aggregate"), (_counted_twice, "weight"), (_mixed_by_halves, "aggregate")]
)
def test_the_oracles_see_mistakes_in_parts(monkeypatch, plant, oracle):
    plant(monkeypatch)
    scenario = world(OUTER.format(overlap=2, alpha=0.5), peers=4, seconds=14.0)
    assert oracle in {violation.oracle for violation in simulate(scenario, preset=PACE, stall=STALL).violations}


def test_overlap_hides_the_exchange():
    """Peers that would wait for their links have computed all the time."""
    made, waits = {}, {}
    for overlap in (0, 3):
        scenario = world(OUTER.format(overlap=overlap, alpha=0.0), peers=4, seconds=40.0)
        peers = tuple(replace(peer, up=12e3, step_seconds=0.5, join=min(peer.join, 0.05)) for peer in scenario.peers)
        run = simulate(replace(scenario, peers=peers), preset=PACE, stall=STALL)
        assert run.violations == ()
        made[overlap] = max(map(max, rounds(run).values()))
        waits[overlap] = [event.fields["sync_seconds"] for event in run.journal.events if event.name == "round"][8:]
    assert min(waits[0]) > 0.5 > max(waits[3]) and sum(waits[3]) < 0.1 * sum(waits[0]), waits
    assert made[3] >= 1.15 * made[0], made


def test_one_part_without_overlap_has_the_states_of_diloco(swarm):
    digests = []
    for outer in ("lr = 0.4\n", 'method = "streaming"\nfragments = 1\noverlap = 0\nalpha = 0.0\nsteps = 20\n'):

        async def main(outer=outer):
            s = swarm(3, outer=outer, rounds=4, size=30_000)
            s.start()
            s.fail_at(2, 3, "announce")
            await s.finish([0, 1])
            s.check([0, 1])
            return [node.digests for node in s.nodes.values()]

        digests.append(clock.run(main(), seed=1))
    assert digests[0] == digests[1] and len(digests[0][0]) == 4


def test_a_rerun_has_the_same_trace():
    scenario = world(OUTER.format(overlap=3, alpha=0.5), faults=CHURN[:2], peers=5, seconds=12.0)
    assert simulate(scenario, preset=PACE).trace == simulate(scenario, preset=PACE).trace
