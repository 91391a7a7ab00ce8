"""The planner's round times against swarms with the same peers, links, codec and steps, within 10 %."""

from dataclasses import dataclass, replace
from statistics import mean

import pytest
from thinwire.collectives.costs.gossip_time import pair_time
from thinwire.collectives.costs.round_time import PlannedPeer, round_time
from thinwire.collectives.gossip.owner_group import MESH
from thinwire.collectives.gossip.pair_codec import parse_pair_codec
from thinwire.compression import registry
from thinwire.sims.engine import virtual_loop

ROUNDS = 4
GRACE = 20.0
JITTER = 0.1
"""Of the latency, in the fixture's network."""


@dataclass(frozen=True)
class Case:
    """links: bytes/s (down, up) in turn; latency: one way, seconds.

    computing: seconds of the first peer's steps; each further peer takes `slower` more.
    """

    peers: int
    size: int
    codec: str
    links: tuple[tuple[float, float], ...]
    latency: float
    computing: float
    slower: float = 0.0
    topology: str = "butterfly"

    def places(self):
        return [
            PlannedPeer(*self.links[i % len(self.links)], self.computing * (1 + self.slower * i))
            for i in range(self.peers)
        ]


FIBRE, DSL, CABLE = (37.5e6, 37.5e6), (6.25e6, 1.25e6), (25e6, 2.5e6)
CASES = {
    "bandwidth binds": Case(4, 1_000_000, "int8(block=256)", ((1.25e6, 1.25e6),), 0.02, 1.0),
    "two peers, far apart, exact": Case(2, 300_000, "fp32", ((1e6, 1e6),), 0.15, 0.5),
    "latency binds": Case(8, 200_000, "int8(block=256)", ((1.25e6, 1.25e6),), 0.1, 2.0),
    "unequal machines": Case(5, 500_000, "int8(block=64)", ((1e6, 1e6),), 0.02, 3.0, slower=0.1),
    "unequal links": Case(6, 1_000_000, "int8(block=256)", (FIBRE, DSL, CABLE), 0.02, 1.5),
    "ring, bandwidth binds": Case(4, 1_000_000, "int8(block=256)", ((1.25e6, 1.25e6),), 0.02, 1.0, topology="ring"),
    "ring, latency binds": Case(8, 200_000, "int8(block=256)", ((1.25e6, 1.25e6),), 0.1, 2.0, topology="ring"),
}


async def lived(swarm, case):
    """Return mean seconds between commits and from the last announcement to the commits, and bytes sent.

    Bytes are per peer and round.
    """
    world = swarm(
        case.peers, rounds=ROUNDS, size=case.size, codec=case.codec, straggler_timeout=GRACE, patience=5.0,
        latency=case.latency, topology=case.topology,
    )  # fmt: skip
    for node, place in zip(world.nodes.values(), case.places(), strict=True):
        node.pace = place.computing
        node.transport.uplink.rate, node.transport.downlink.rate = place.up, place.down
    world.start()
    await world.finish(limit=600)
    world.check()
    nodes = list(world.nodes.values())
    commits = [mean(node.committed_at[number] for node in nodes) for number in range(1, ROUNDS + 1)]
    announced = [
        max(at for node in nodes for at, name, fields in node.log if (name, fields) == ("phase", phase))
        for phase in ({"round": number, "phase": "announce"} for number in range(1, ROUNDS + 1))
    ]
    period = (commits[-1] - commits[0]) / (ROUNDS - 1)
    exchange = mean(commit - at for commit, at in zip(commits[1:], announced[1:], strict=True))
    return period, exchange, mean(node.transport.totals()[0] for node in nodes) / ROUNDS


@pytest.mark.trial
@pytest.mark.parametrize("name", CASES)
def test_simulated_round_takes_planned_time(swarm, name):
    case = CASES[name]
    period, exchange, sent = virtual_loop.run(lived(swarm, case), seed=5, limit=1000)
    codec = registry.parse(case.codec)
    plan = round_time(case.size, codec, case.places(), case.latency, grace=GRACE, jitter=JITTER, topology=case.topology)
    print(f"{name}: {period:.3f} s, planned {plan.period:.3f} ({plan.period / period - 1:+.1%})")
    assert plan.period == pytest.approx(period, rel=0.1)
    assert plan.exchange == pytest.approx(exchange, rel=0.1)
    assert plan.sent == pytest.approx(sent, rel=0.1)
    assert plan.late == 0


SPARSE = "topk(k=64,chunk=4096)|2bit|rice"
PAIRS = {
    "two vectors, bandwidth binds": (Case(6, 1_000_000, "int8(block=256)", ((1.25e6, 1.25e6),), 0.02, 1.0), 0.7),
    "one vector, far apart": (Case(4, 200_000, "fp32", ((1e6, 1e6),), 0.15, 2.0), 0.7),
    "two vectors, exact": (Case(2, 300_000, "fp32", ((2e6, 1e6),), 0.05, 1.0), 0.4),
    "slow weights longer than steps": (Case(4, 1_000_000, "int4(block=256)", ((1.25e6, 1.25e6),), 0.03, 0.5), 0.7),
    "groups of four": (Case(8, 300_000, "int8(block=256)", ((1.25e6, 1.25e6),), 0.02, 1.0), 0.7),
    "groups with owners": (Case(16, 1_000_000, "int8(block=256)", ((1.25e6, 1.25e6),), 0.02, 2.0), 0.7),
    "groups with owners, exact": (Case(16, 524_288, "fp32", ((1.25e6, 1.25e6),), 0.02, 1.0), 0.7),
    "slow weights in parts": (Case(4, 1_000_000, "int4(block=256)", ((1.25e6, 1.25e6),), 0.03, 0.5), 0.7),
    "sparse": (Case(6, 1_000_000, SPARSE, ((1.25e5, 1.25e5),), 0.02, 1.0), 0.7),
    "sparse groups with owners": (Case(16, 1_000_000, SPARSE, ((1.25e6, 1.25e6),), 0.02, 2.0), 0.7),
    "groups with owners in parts": (Case(16, 1_000_000, "int8(block=256)", ((1.25e6, 1.25e6),), 0.02, 2.0), 0.7),
}
GROUPS = {name: 4 if "four" in name else 16 for name in PAIRS if "groups" in name}
PARTS = {"slow weights in parts": 5, "sparse": 2, "sparse groups with owners": 2, "groups with owners in parts": 4}


async def lived_pairs(swarm, case, gamma, group, parts):
    """Return mean seconds from step to step of one peer, and bytes sent per peer and round."""
    rounds = ROUNDS if group <= MESH else ROUNDS - 1  # Chunks with owners take the most computing.
    world = swarm(
        case.peers, rounds=rounds, size=case.size, codec=case.codec, patience=5.0, latency=case.latency,
        outer=f'method = "noloco"\ngamma = {gamma}\nslow_weight_parts = {parts}\n', gossip_group_size=group,
    )  # fmt: skip
    for node, place in zip(world.nodes.values(), case.places(), strict=True):
        node.pace = place.computing
        node.transport.uplink.rate, node.transport.downlink.rate = place.up, place.down
    world.start()
    await world.finish(limit=600)
    nodes = list(world.nodes.values())
    assert all(len(found) == group for node in nodes for found in node.contributors.values())
    period = mean((node.committed_at[rounds] - node.committed_at[1]) / (rounds - 1) for node in nodes)
    return period, mean(node.transport.totals()[0] for node in nodes) / rounds


@pytest.mark.trial
@pytest.mark.parametrize("name", PAIRS)
def test_simulated_noloco_round_takes_planned_time(swarm, name):
    case, gamma = PAIRS[name]
    group, parts = GROUPS.get(name, 2), PARTS.get(name, 1)
    period, sent = virtual_loop.run(lived_pairs(swarm, case, gamma, group, parts), seed=5, limit=1000)
    how, places = parse_pair_codec(case.codec, lr=0.7, gamma=gamma, parts=parts), [(case.peers, case.places()[0])]
    plan = pair_time(case.size, how, places, case.latency, group, jitter=JITTER)
    print(
        f"{name}: {period:.3f} s, planned {plan.period:.3f} ({plan.period / period - 1:+.1%}); "
        f"exchange {period - case.computing:.3f} s, planned {plan.exchange:.3f}; {sent:.0f} bytes, planned {plan.sent:.0f}"
    )
    assert plan.period == pytest.approx(period, rel=0.1)
    assert plan.exchange == pytest.approx(period - case.computing, rel=0.1)
    assert plan.sent == pytest.approx(sent, rel=0.1)


@pytest.mark.trial
@pytest.mark.parametrize(("codec", "latencies"), [("int8(block=256)", 4), (SPARSE, 3)])
def test_exchange_of_far_group_takes_latencies_of_its_messages(swarm, codec, latencies):
    """Ready, Fetch, Chunk, and the mean of an owner: a sparse Δ has none."""
    case, parts = Case(12, 200_000, codec, ((1.25e7, 1.25e7),), 0.3, 3.0), 4
    period, _ = virtual_loop.run(lived_pairs(swarm, case, 0.7, case.peers, parts), seed=5, limit=1000)
    how, place = parse_pair_codec(codec, lr=0.7, gamma=0.7, parts=parts), case.places()[0]
    plan = pair_time(case.size, how, [(case.peers, place)], case.latency, case.peers, jitter=JITTER)
    free = replace(place, up=1e12, down=1e12)
    bare = pair_time(case.size, how, [(case.peers, free)], case.latency, case.peers)
    idle = pair_time(case.size, how, [(case.peers, replace(free, computing=0.0))], case.latency, case.peers)
    print(f"{codec}, far group: period {period:.3f} s, planned {plan.period:.3f}")
    assert plan.exchange == pytest.approx(period - case.computing, rel=0.1)
    assert bare.exchange == pytest.approx(latencies * case.latency, rel=1e-3)
    assert idle.exchange == pytest.approx(4 * case.latency, rel=1e-3)  # no steps hide the means of slow weights
