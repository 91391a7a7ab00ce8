"""Ten regions with one peer each: peers measure their links, and topologies follow the measurements."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from statistics import mean

import numpy as np
import pytest
from kit.swarm import committed_ballots
from thinwire.collectives.topology.ring_order import best
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network.regions import PATHS, REGIONS
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.membership.presets import WAN
from thinwire.swarm.quantized_links import links

IDS = [Identity.generate(bytes([index]) * 32).peer_id for index in range(40)]
ROUNDS = 6
PACE = 6.0
"""Seconds of inner steps: by the last round all have probed all."""


def rtt(one, other):
    """Return seconds between two nodes by index; a few milliseconds inside a region."""
    return PATHS[REGIONS[one % 10], REGIONS[other % 10]].rtt


def latency(sender, receiver):
    return rtt(IDS.index(sender), IDS.index(receiver)) / 2


@cache
def played(swarm, count, change=lambda s: None, **options):
    async def main():
        s = swarm(
            count, latency=latency, **{"rounds": ROUNDS, "size": 10 * 4096, "preset": WAN, "jitter": 0.0} | options
        )
        ballots = committed_ballots(s)
        for node in s.nodes.values():
            node.pace = PACE
        change(s)
        s.start()
        await s.finish()
        s.check()
        return s, ballots

    return virtual_loop.run(main(), seed=2)


def ring(proposal):
    """The peers of a ballot's ring, by index."""
    return [IDS.index(proposal.alive[place]) for place in proposal.order]


def length(order):
    """Return seconds around a ring of indices, one way."""
    return sum(rtt(a, b) for a, b in pairwise([*order, order[0]])) / 2


def seconds(s, rounds):
    """From the last announcement to the commit."""
    took = []
    for number in rounds:
        announced = max(
            at
            for node in s.nodes.values()
            for at, name, fields in node.log
            if (name, fields) == ("phase", {"round": number, "phase": "announce"})
        )
        took.append(mean(node.committed_at[number] for node in s.nodes.values()) - announced)
    return mean(took)


def test_ring_order_from_measured_links_equals_true_order(swarm):
    s, ballots = played(swarm, 10, topology="ring")
    known = links({node.id: node.presence.spans() for node in s.nodes.values()})
    for one in range(10):
        for other in range(one):
            assert known(IDS[one], IDS[other]).rtt == pytest.approx(rtt(one, other), rel=0.06)
    order = ring(ballots[ROUNDS][0])
    true = np.array([[rtt(a, b) for b in order] for a in order])
    assert length(order) == pytest.approx(length([order[at] for at in best(np.zeros((10, 10)), true)]))
    for number in range(ROUNDS - 1, ROUNDS):
        assert length(ring(ballots[number][0])) == pytest.approx(length(order)), "and it stays so"


def test_ring_order_from_measured_links_makes_rounds_faster(swarm):
    """Compared with rings in another random order in every round."""
    s, _ = played(swarm, 10, topology="ring")

    def blind(s):
        for node in s.nodes.values():
            node.round_factory.links = replace(node.round_factory.links, spans=tuple)

    plain, ballots = played(swarm, 10, topology="ring", change=blind)
    sorted_, unsorted = (seconds(one, (ROUNDS - 1, ROUNDS)) for one in (s, plain))
    print(f"{sorted_:.3f} s by measured links, {unsorted:.3f} s without: {unsorted / sorted_:.2f} times as long")
    assert unsorted > 1.4 * sorted_


def test_nearby_peers_form_sites_without_site_names(swarm):
    """Three regions and a hierarchy without site names: contributions are combined in each region first."""

    def three(sender, receiver):
        return rtt(IDS.index(sender) % 3 * 4, IDS.index(receiver) % 3 * 4) / 2

    async def main():
        s = swarm(7, latency=three, topology="hierarchy", rounds=4, size=30_000, preset=WAN)
        ballots = committed_ballots(s)
        for node in s.nodes.values():
            node.pace = 8.0
        s.start()
        await s.finish()
        s.check()
        return ballots

    ballots = virtual_loop.run(main(), seed=5)
    together = {}
    proposal = ballots[4][0]
    for peer, number in zip(proposal.group, proposal.sites, strict=True):
        together.setdefault(number, set()).add(IDS.index(peer) % 3)
    assert sorted(map(list, together.values())) == [[0], [1], [2]]
