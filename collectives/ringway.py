"""How the chunks of a round go round a ring: a pure function of the ballot, that every peer computes alike.

A chunk begins behind its owner, with the first contributor in the order of the ring; each one adds its own contribution to what
has come to it and sends the mean of both on, until it is at the owner, whose result goes round once more. Contributors that are
no part of the ring (newcomers, and who has been complained of) send theirs to the first one of each chunk's way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.collectives.reducer import Reduces
from thinwire.collectives.shards import shares
from thinwire.compression.codec import Buffer
from thinwire.swarm.protocol import Contribution, Open, PeerId


@dataclass(frozen=True, slots=True)
class Way:
    """Of the chunks of one owner: `stations` from the first to the owner, and what each adds, in this order.

    `before`: the weight of all that the stations before have added.
    """

    stations: tuple[PeerId, ...]
    adds: tuple[tuple[Contribution, ...], ...]
    before: tuple[float, ...]

    def place(self, peer: PeerId) -> int | None:
        """Which station a peer is."""
        return self.stations.index(peer) if peer in self.stations else None


def ring(opened: Open) -> tuple[PeerId, ...]:
    """The peers of a ballot's ring in its order; empty without one."""
    return tuple(opened.alive[place] for place in opened.order)


def ways(opened: Open) -> dict[PeerId, Way]:
    """The way of each owner's chunks in a ballot with a ring."""
    peers, named = ring(opened), {entry.peer: entry for entry in opened.contributors}
    leaves = tuple(entry for entry in opened.contributors if entry.peer not in peers)
    found = {}
    for at, owner in enumerate(peers):
        turned = [*peers[at + 1 :], *peers[: at + 1]]
        first = next((place for place, peer in enumerate(turned) if peer in named), len(turned) - 1)
        stations = tuple(turned[first:])
        own = [(named[peer],) if peer in named else () for peer in stations]
        adds = ((*own[0], *leaves), *own[1:])
        weights = [float(sum(entry.weight for entry in added)) for added in adds]
        found[owner] = Way(stations, adds, tuple(sum(weights[:place]) for place in range(len(stations))))
    return found


def joined(
    reducer: Reduces, passed: Buffer | None, before: float, own: Sequence[Buffer], weights: Sequence[float], size: int
) -> Buffer:
    """What a station sends on: what has come to it, of the weight `before`, and what it adds. One alone stays as it is."""
    payloads = [*([] if passed is None else [passed]), *own]
    if len(payloads) == 1:
        return payloads[0]
    return reducer.result(payloads, [*([] if passed is None else [before]), *weights], size)


def result(way: Way, payloads: Mapping[PeerId, Buffer], reducer: Reduces, size: int) -> Buffer:
    """What comes of the contributions to one chunk, all of it computed here."""
    passed: Buffer | None = None
    for added, before in zip(way.adds, way.before, strict=True):
        own = [payloads[entry.peer] for entry in added]
        passed = joined(reducer, passed, before, own, [float(entry.weight) for entry in added], size)
    assert passed is not None
    return passed


class Lap:
    """One peer's part in the ring of a ballot, of `count` chunks: where they come from and go to, and what is on its way here.

    takers: to whom contributions from outside the ring go, by chunk. left, right: our neighbours; None, outside the ring.
    passed: what has come to us; made: what we have sent on, until its result is here. sent: (chunk, whether it was the result)
    of what the right neighbour has been sent.
    """

    def __init__(self, me: PeerId, opened: Open, count: int) -> None:
        peers = ring(opened)
        self.ways = ways(opened)
        self.owners = shares(count, peers, fragment=opened.fragment)
        self.takers = tuple(self.ways[owner].stations[0] for owner in self.owners)
        self.outside = tuple(peer for peer in opened.alive if peer not in peers)
        at = peers.index(me) if me in peers else None
        self.left = peers[at - 1] if at is not None else None
        self.right = peers[(at + 1) % len(peers)] if at is not None else None
        self.passed: dict[int, Buffer] = {}
        self.made: dict[int, Buffer] = {}
        self.sent: set[tuple[int, bool]] = set()
        self._places = {owner: way.place(me) for owner, way in self.ways.items()}

    def way(self, index: int) -> tuple[Way, int | None]:
        """The way of a chunk, and our place on it."""
        owner = self.owners[index]
        return self.ways[owner], self._places[owner]
