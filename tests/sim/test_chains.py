"""Swarms whose fragments have rounds of their own, in virtual time: several under way, peers that hold some, faults."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from thinwire.collectives.exchange import Exchange
from thinwire.collectives.series import STASH_EACH
from thinwire.node import duties
from thinwire.node.chainsession import ChainedSession
from thinwire.node.outer import Replica
from thinwire.node.turns import ChainedRounds
from thinwire.sims import clock, liars
from thinwire.sims.compute import StubLearner
from thinwire.sims.faults import Fault
from thinwire.sims.scenario import PeerSpec, Scenario
from thinwire.sims.seeds import PACE, STALL
from thinwire.sims.world import simulate
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity import Identity
from thinwire.swarm.protocol import Ready

TOPK = "topk(k=64,chunk=4096)|2bit|rice"
CHURN = (
    Fault(5.0, "kill", (3,)),
    Fault(8.2, "restart", (2,), seconds=5.0),
    Fault(11.1, "partition", (4, 5), seconds=4.0),
    Fault(16.3, "restart", (0,), seconds=3.0),
    Fault(17.2, "isolate", (6,), seconds=3.0),
)


def world(
    fragments, overlap, *, steps=12, peers=8, faults=(), seed=3, seconds=40.0, codec="int8(block=256)", held=(), **link
):
    """`held`: of some peers, the fragments that they hold. `link`: another region, step time or uplink for all."""
    specs = tuple(
        PeerSpec(
            index,
            f"peer-{index}",
            link.get("regions", ("Oregon",))[index % len(link.get("regions", ("Oregon",)))],
            step_seconds=link.get("step", 0.5) * (1 + 0.02 * (index % 4)),
            up=2.5e6,
            down=37.5e6,
            join=0.0 if not index else 0.05 if index < peers - 2 or "step" in link else 2.0 + index,
            held=dict(held).get(index),
        )
        for index in range(peers)
    )
    toml = f'[outer]\nmethod = "streaming"\nsteps = {steps}\nfragments = {fragments}\noverlap = {overlap}\n'
    toml += f'[exchange]\ncodec = "{codec}"\ngrace = 1.0\nmax_weight = 1000000\n'
    return Scenario("chains", seed, seconds, toml, specs, parameters=9_000, faults=faults, interval=seconds)


def rounds(run):
    """Peer -> {turn: digest of its fragment} of what it committed."""
    found = {}
    for event in run.journal.events:
        if event.name == "round":
            found.setdefault(event.peer, {})[event.fields["round"]] = event.fields["digest"]
    return found


@pytest.mark.parametrize(
    ("fragments", "overlap", "codec"),
    [
        (3, 6, "int8(block=256)"),
        (2, 9, TOPK),
        pytest.param(3, 12, "fp32", marks=pytest.mark.trial),
        pytest.param(1, 0, TOPK, marks=pytest.mark.trial),
    ],
)
def test_peers_die_come_back_and_join(fragments, overlap, codec):
    run = simulate(world(fragments, overlap, faults=CHURN, codec=codec), preset=PACE, stall=STALL)
    assert run.violations == ()
    found = rounds(run)
    last = max(max(digests) for digests in found.values())
    assert last > 3 * fragments
    assert sum(last - fragments <= max(digests) for digests in found.values()) == 7  # all but the one that was killed
    for turn in range(1, last + 1):
        assert len({digests[turn] for digests in found.values() if turn in digests}) <= 1


@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(pytest.param(seed, marks=pytest.mark.trial) for seed in range(1, 16)),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(16, 200)),
    ],
)
def test_everything_that_can_go_wrong(seed):
    fragments = (2, 3, 4, 6)[seed % 4]
    overlap, codec = min(12, 12 // fragments + 1 + seed % 7), TOPK if seed % 5 == 4 else "int8(block=256)"
    mix = ({"kill": 12.0, "loss": 12.0, "reset": 24.0}, {"kill": 6.0, "pause": 12.0, "half-open": 12.0, "clog": 6.0})
    scenario = replace(world(fragments, overlap, peers=6, seed=seed, codec=codec), mix=mix[seed % 2])
    assert simulate(scenario, preset=PACE, stall=STALL).violations == ()


HELD = ((2, (0,)), (3, (0, 2)), (4, (1,)), (5, (1, 2)), (6, (2,)))


@pytest.mark.parametrize("codec", ["int8(block=256)", pytest.param(TOPK, marks=pytest.mark.trial)])
def test_peers_that_hold_some_fragments_take_part_in_those(codec):
    """Beside two that hold all; who comes late, or back, fetches what it holds and nothing else."""
    run = simulate(world(3, 8, peers=7, faults=CHURN[:4], held=HELD, codec=codec), preset=PACE, stall=STALL)
    assert run.violations == ()
    found, held = rounds(run), dict(HELD)
    for peer, digests in found.items():
        # Every third turn is of one fragment.
        had = {(turn - 1) % 3 for turn in digests}
        assert had == set(held.get(peer, range(3))) or (peer == 3 and had < {0, 2})  # which was killed early
    for turn in range(1, max(map(max, found.values())) + 1):
        assert len({digests[turn] for digests in found.values() if turn in digests}) <= 1
    synced = [event for event in run.journal.events if event.name == "synced"]
    assert all(event.fields["fragment"] in held.get(event.peer, range(3)) for event in synced)
    vectors = 1 if codec == TOPK else 2
    late = Counter()
    for event in synced:
        if event.peer in (5, 6) and event.at < 10.0:
            late[event.peer] += event.fields["bytes"]
    assert late == {5: 2 * vectors * 4 * 3_000, 6: vectors * 4 * 3_000}
    together = {event.fields["contributors"] for event in run.journal.events if event.name == "round"}
    assert max(together) >= 4


def test_several_under_way_hide_what_few_do_not():
    """Peers far from each other, with inner steps that are short against the way: rounds last longer than a turn."""
    busy = {}
    for overlap in (5, 12):
        scenario = world(3, overlap, peers=3, seconds=10.0, step=0.05, regions=("Oregon", "Australia", "London"))
        run = simulate(scenario, preset=PACE, stall=STALL)
        assert run.violations == ()
        late = [event for event in run.journal.events if event.name == "round" and event.at > 5.0]
        waits = [event.fields["sync_seconds"] for event in late]
        busy[overlap] = len({event.fields["round"] for event in late}), sum(waits) / len(waits)
    assert busy[12][0] > 1.15 * busy[5][0] and busy[12][1] < 0.25 * busy[5][1], busy


@pytest.mark.parametrize(
    "overlap", [12, pytest.param(8, marks=pytest.mark.trial), pytest.param(7, marks=pytest.mark.trial)]
)
@pytest.mark.parametrize("lag", [0.5, pytest.param(0.7, marks=pytest.mark.trial)])
def test_who_lags_by_a_part_of_a_turn_is_on_time_again_after_two(monkeypatch, overlap, lag):
    """A round lasts as long as a turn, and nobody is waited for: who ended its steps when it has a verdict would stay late."""
    held, steps = [], StubLearner.steps

    async def held_up(self, n, stop):
        if self._seed == 2 and not held and clock.current().time() > 6.0:
            held.append(clock.current().time())
            await asyncio.sleep(lag)
        return await steps(self, n, stop)

    monkeypatch.setattr(StubLearner, "steps", held_up)
    scenario = world(3, overlap, peers=5, seconds=20.0, step=0.2, regions=("Oregon", "Australia", "London"))
    peers = tuple(replace(peer, step_seconds=0.2, join=min(peer.join, 0.05)) for peer in scenario.peers)
    scenario = replace(scenario, manifest=scenario.manifest.replace("grace = 1.0", "grace = 0.1"), peers=peers)
    run = simulate(scenario, preset=PACE, stall=STALL)
    assert run.violations == () and len(held) == 1
    me = Identity.generate((2).to_bytes(32, "big")).peer_id.hex()[:8]
    events = [event for event in run.journal.events if event.name == "round" and event.peer == 0 and event.at > held[0]]
    late = [event.fields["round"] for event in events if me in dict(event.fields["missing"])]
    first, last = min(late), max(event.fields["round"] for event in events)
    assert max(late) < first + 2 and last > first + 8, (late, last)


@pytest.mark.parametrize(("fragments", "overlap"), [(6, 5), pytest.param(24, 2, marks=pytest.mark.soak)])
def test_a_whole_swarm_comes_back(monkeypatch, fragments, overlap):
    """Nobody has a state to give but what each has kept: that is found out of all fragments side by side. Then nobody remembers
    what it had promised, in any of them.
    """
    monkeypatch.setattr(duties, "SAVE_SECONDS", 2.0)
    faults = tuple(Fault(12.0, "restart", (index,), seconds=1.0) for index in range(4))
    scenario = world(fragments, overlap, steps=24, peers=4, seconds=40.0 + 3 * fragments, faults=faults)
    run = simulate(scenario, preset=PACE)
    assert run.violations == ()
    back = {event.peer: event.at for event in run.journal.events if event.name == "ready" and event.at > 13.0}
    assert len(back) == 4 and max(back.values()) < 22.0
    later = [event for event in run.journal.events if event.name == "round" and event.at > 22.0]
    again = {(event.fields["round"] - 1) % fragments for event in later}
    assert again == set(range(fragments))


@pytest.mark.parametrize(
    "topology", ["butterfly", *(pytest.param(name, marks=pytest.mark.trial) for name in ("ring", "hierarchy"))]
)
def test_small_fragments_have_owners_of_their_own(monkeypatch, topology):
    """Each is one chunk; the peers are as many as the fragments."""
    owned, settle = {}, Exchange.settle

    def booked(self):
        settle(self)
        owned.setdefault((self.fragment, self.round), set()).update(self.owners)

    monkeypatch.setattr(Exchange, "settle", booked)
    scenario = world(4, 6, peers=4, seconds=14.0)
    manifest = scenario.manifest + f'topology = "{topology}"\n'
    assert simulate(replace(scenario, manifest=manifest), preset=PACE, stall=STALL).violations == ()
    late = max(round for _, round in owned) - 1
    found = [owned[number, late] for number in range(4)]
    assert all(len(one) == 1 for one in found) and len(set.union(*found)) >= 3


SAID = {"hash": ("hash",), "nan": ("not finite", "encoding"), "huge": ("norm",)}
"""What the others say of a contribution that is put out."""

LIES = [(kind, codec) for codec in (TOPK, "int8(block=256)") for kind in sorted(liars.KINDS)]
OFTEN = {("flip", TOPK): (), ("huge", TOPK): pytest.mark.trial, ("equivocate", TOPK): pytest.mark.trial}


@pytest.mark.parametrize(
    ("kind", "codec"), [pytest.param(*lie, marks=OFTEN.get(lie, pytest.mark.soak)) for lie in LIES]
)
def test_a_liar_in_all_chains_breaks_no_promise(kind, codec):
    scenario = world(3, 6, peers=6, seconds=32.0, codec=codec, faults=(Fault(4.0, "liar", (3,), 20.0, 0.0, kind),))
    run = simulate(scenario, preset=PACE, stall=STALL)
    # What a liar makes of its own contribution where it owns the only chunk, nobody computes again.
    assert {violation.oracle for violation in run.violations} <= ({"bound"} if kind in SAID else set())
    liar = Identity.generate((3).to_bytes(32, "big")).peer_id.hex()[:8]
    rounds = [event for event in run.journal.events if event.name == "round" and 5.0 < event.at < 24.0]
    said = Counter(dict(event.fields["missing"]).get(liar) for event in rounds if event.peer != 3)
    assert {event.peer for event in rounds} >= {0, 1, 2, 4, 5}
    if codec == TOPK and kind in SAID:
        assert any(said[reason] for reason in SAID[kind])


def _other_momentum(patch):
    """One element is another than that of the formula."""
    apply = Replica.apply

    def sloppy(self, *given, **told):
        apply(self, *given, **told)
        self.momentum[0] = np.nextafter(self.momentum[0], np.float32(9))
        self.seal()

    patch.setattr(Replica, "apply", sloppy)


def _counted_twice(patch):
    """What went into a fragment counts again after it was sent."""
    land = ChainedRounds._land

    def forgetful(self, flight, **told):
        owed = flight.link.owed
        outcome = land(self, flight, **told)
        flight.link.owed = max(owed, flight.link.owed)
        return outcome

    patch.setattr(ChainedRounds, "_land", forgetful)


@pytest.mark.parametrize(("plant", "oracle"), [(_other_momentum, "aggregate"), (_counted_twice, "weight")])
def test_the_oracles_see_mistakes_in_chains(monkeypatch, plant, oracle):
    plant(monkeypatch)
    run = simulate(world(3, 8, peers=4, seconds=14.0), preset=PACE, stall=STALL)
    assert oracle in {violation.oracle for violation in run.violations}


@pytest.mark.trial
def test_a_real_model_by_layers():
    model = "[model]\nlayers = 3\nwidth = 8\nheads = 2\ncontext = 8\n[inner]\nbatch = 1\n"
    scenario = world(3, 8, peers=3, seconds=12.0)
    run = simulate(replace(scenario, compute="torch", manifest=scenario.manifest + model), preset=PACE, stall=STALL)
    assert run.violations == () and max(map(max, rounds(run).values())) >= 4


def test_the_last_round_leaves_all_with_one_state():
    scenario = world(3, 8, peers=4, seconds=32.0)
    run = simulate(replace(scenario, manifest="[run]\nrounds = 10\n" + scenario.manifest), preset=PACE, stall=STALL)
    assert run.violations == ()
    left = [event for event in run.journal.events if event.name == "left" and "digest" in event.fields]
    assert len(left) == 4 and {event.fields["round"] for event in left} == {10}
    assert len({event.fields["digest"] for event in left}) == 1


def test_a_rerun_has_the_same_trace():
    scenario = world(3, 8, faults=CHURN[:2], peers=5, seconds=12.0)
    assert simulate(scenario, preset=PACE).trace == simulate(scenario, preset=PACE).trace


def test_what_one_peer_says_of_rounds_to_come_has_the_same_room_however_many_chains_there_are(monkeypatch):
    """Frames for the next round of each of 12 chains, from one that floods them all."""
    kept, ticked = [], ChainedSession.ticked

    def flood(self):
        ticked(self)
        if not kept and self.live and self.replica.round > 12:
            liar = min(self.live)
            for attempt in range(40):
                for number, link in self.links.items():
                    ready = Ready(link.current.round + 1, number, attempt, bytes(32), bytes(32), 1, b"", True, 0.0, 0.0)
                    self.routed(liar, Frame(ready, b"", bytes(64)))
            stashes = {id(link._series.stash): link._series.stash for link in self.links.values()}
            kept.append(sum(map(len, stashes.values())))

    monkeypatch.setattr(ChainedSession, "ticked", flood)
    simulate(world(12, 4, steps=12, peers=2, seconds=12.0), preset=PACE)
    assert 0 < kept[0] <= STASH_EACH + 2 * 11
