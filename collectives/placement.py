"""Which places peers get in a ballot, by what is known of their links: pure functions of announcements and measures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import TypeAlias

from thinwire.collectives.allotment import Load
from thinwire.collectives.bandwidth import CEILING
from thinwire.collectives.clusters import clusters, near
from thinwire.swarm.measures import links
from thinwire.swarm.protocol import PeerId, Ready

Rate: TypeAlias = Callable[[PeerId, PeerId], float]
"""Bytes/s of the link from a peer to another; 0: not known."""

Trip: TypeAlias = Callable[[PeerId, PeerId], float]
"""Seconds from a peer to another and back; 0: not known."""

Order: TypeAlias = Callable[[Sequence[PeerId], Rate, Trip], Sequence[PeerId]]
"""In which order data goes round these peers; empty: not at all."""

HINDERS = 0.7
"""A way counts as slow when it carries less than this part of what the links at both its ends do."""

NEAR, NEXT = 1e12, 1e-6
"""Bytes/s, and seconds there and back, between two peers of one site: more, and less, than any others have."""


def order(
    ring: Order, alive: Sequence[PeerId], idle: Collection[PeerId], ready: Mapping[PeerId, Ready]
) -> tuple[int, ...]:
    """Places of a ring; none of one peer, which has nobody to send to. Peers of one site stand side by side.

    What a peer says of its own link does not tell one order from another: each sends once and receives once in all of them.
    What tells them apart is which ways carry less than their ends, and how far it is.
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
        ends, way = min(ready[sender].up, ready[receiver].down), between(sender, receiver).rate
        return way if 0 < way < HINDERS * (ends or inf) else float(ends or sited)

    def trip(sender: PeerId, receiver: PeerId) -> float:
        return NEXT if together(sender, receiver) else between(sender, receiver).rtt

    return tuple(place[peer] for peer in ring(working, rate, trip))


def sites(group: Sequence[PeerId], ready: Mapping[PeerId, Ready]) -> tuple[int, ...]:
    """Who is together (see `clusters`): who says the same site, and of those that say none who is near whom."""
    said = {peer: ready[peer].site for peer in group if peer in ready and ready[peer].site}
    others = [peer for peer in group if peer in ready and peer not in said]
    between = links({peer: ready[peer].spans for peer in others})
    found = near(others, lambda one, other: between(one, other).rtt)
    named = {peer: ("site", name) for peer, name in said.items()}
    return clusters(group, named | {peer: ("near", name.hex()) for peer, name in found.items()})


def loads(
    group: Sequence[PeerId], willing: Collection[PeerId], resting: Collection[PeerId], ready: Mapping[PeerId, Ready]
) -> list[Load]:
    """What peers say of their links, and what they are there for in a round."""
    said = [(peer, ready[peer].up if peer in ready else 0, ready[peer].down if peer in ready else 0) for peer in group]
    return [
        Load(min(CEILING, up), min(CEILING, down), contributes=peer in willing, owns=peer not in resting)
        for peer, up, down in said
    ]
