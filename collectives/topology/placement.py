"""Positions of peers in a ballot, from what is known about their links.

Pure functions of announcements and measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import TypeAlias

from thinwire.collectives.topology.bandwidth_shares import PeerLoad
from thinwire.collectives.topology.clusters import clusters, near
from thinwire.swarm.messages.registry import PeerId, Ready
from thinwire.swarm.quantized_links import CEILING, links

Rate: TypeAlias = Callable[[PeerId, PeerId], float]
"""Function that returns the bytes/s of the link from one peer to another; 0: unknown."""

Trip: TypeAlias = Callable[[PeerId, PeerId], float]
"""Function that returns the round-trip time between two peers in seconds; 0: unknown."""

Order: TypeAlias = Callable[[Sequence[PeerId], Rate, Trip], Sequence[PeerId]]
"""Function that returns the order of peers in a ring; empty: no ring."""

HINDERS = 0.7
"""A link counts as slow if its rate is below this share of the lower capacity of its two ends."""

NEAR, NEXT = 1e12, 1e-6
"""Rate in bytes/s and round-trip time in seconds assumed between two peers of one site.

The rate is higher, and the time shorter, than any other.
"""


def order(
    ring: Order, alive: Sequence[PeerId], idle: Collection[PeerId], ready: Mapping[PeerId, Ready]
) -> tuple[int, ...]:
    """Return the positions of a ring, in which peers of one site are adjacent; empty for a single peer.

    The announced capacity of a peer does not distinguish orders: in all of them each peer sends once and
    receives once. The differences are links that carry less than their ends can, and distances.
    """
    working = [peer for peer in alive if peer not in idle]
    if len(working) < 2:
        return ()
    place = {peer: at for at, peer in enumerate(alive)}
    sited, between = any(ready[peer].site for peer in working), links({peer: ready[peer].spans for peer in working})

    def together(sender: PeerId, receiver: PeerId) -> bool:
        return bool(ready[sender].site) and ready[sender].site == ready[receiver].site

    def rate(sender: PeerId, receiver: PeerId) -> float:
        if together(sender, receiver):
            return NEAR
        ends, measured = min(ready[sender].up, ready[receiver].down), between(sender, receiver).rate
        return measured if 0 < measured < HINDERS * (ends or inf) else float(ends or sited)

    def trip(sender: PeerId, receiver: PeerId) -> float:
        return NEXT if together(sender, receiver) else between(sender, receiver).rtt

    return tuple(place[peer] for peer in ring(working, rate, trip))


def sites(group: Sequence[PeerId], ready: Mapping[PeerId, Ready]) -> tuple[int, ...]:
    """Return the clusters of a group (see `clusters`).

    Peers that announce the same site are together; of the others, those that are near each other.
    """
    named_sites = {peer: ready[peer].site for peer in group if peer in ready and ready[peer].site}
    others = [peer for peer in group if peer in ready and peer not in named_sites]
    between = links({peer: ready[peer].spans for peer in others})
    found = near(others, lambda one, other: between(one, other).rtt)
    named = {peer: ("site", name) for peer, name in named_sites.items()}
    return clusters(group, named | {peer: ("near", name.hex()) for peer, name in found.items()})


def loads(
    group: Sequence[PeerId], willing: Collection[PeerId], resting: Collection[PeerId], ready: Mapping[PeerId, Ready]
) -> list[PeerLoad]:
    """Return the announced capacities and the roles of the peers in a round."""
    announced = [
        (peer, ready[peer].up if peer in ready else 0, ready[peer].down if peer in ready else 0) for peer in group
    ]
    return [
        PeerLoad(min(CEILING, up), min(CEILING, down), contributes=peer in willing, owns=peer not in resting)
        for peer, up, down in announced
    ]
