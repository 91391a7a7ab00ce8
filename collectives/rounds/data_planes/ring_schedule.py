"""Paths of chunks around a ring: a pure function of the ballot, which every peer computes alike.

A chunk starts after its owner, at the first contributor in ring order. Each station adds its own contribution to the
received mean and sends the new mean on, until it reaches the owner, whose result goes round once more. Contributors
outside the ring (joiners and blamed peers) send their contribution to the first station of each chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.collectives.rounds.data_planes.owner_results import ChunkReducer
from thinwire.collectives.topology.shards import shares
from thinwire.compression.core.types import Buffer
from thinwire.swarm.messages.registry import Contribution, PeerId, Proposal


@dataclass(frozen=True, slots=True)
class RingPath:
    """Path of the chunks of one owner.

    `stations`: peers from the first to the owner. `adds`: contributions that each station adds, in this order. `before`: the
    weight of all contributions that earlier stations have added.
    """

    stations: tuple[PeerId, ...]
    adds: tuple[tuple[Contribution, ...], ...]
    before: tuple[float, ...]

    def place(self, peer: PeerId) -> int | None:
        """Return the position of a peer among the stations, None if it is not one."""
        return self.stations.index(peer) if peer in self.stations else None


def ring(proposal: Proposal) -> tuple[PeerId, ...]:
    """Return the peers of a ballot's ring in order; empty without a ring."""
    return tuple(proposal.alive[place] for place in proposal.order)


def paths(proposal: Proposal) -> dict[PeerId, RingPath]:
    """Return the path of each owner's chunks in a ballot with a ring."""
    peers, named = ring(proposal), {entry.peer: entry for entry in proposal.contributors}
    outside = tuple(entry for entry in proposal.contributors if entry.peer not in peers)
    found = {}
    for at, owner in enumerate(peers):
        turned = [*peers[at + 1 :], *peers[: at + 1]]
        first = next((place for place, peer in enumerate(turned) if peer in named), len(turned) - 1)
        stations = tuple(turned[first:])
        own = [(named[peer],) if peer in named else () for peer in stations]
        adds = ((*own[0], *outside), *own[1:])
        weights = [float(sum(entry.weight for entry in added)) for added in adds]
        found[owner] = RingPath(stations, adds, tuple(sum(weights[:place]) for place in range(len(stations))))
    return found


def joined(
    reducer: ChunkReducer,
    passed: Buffer | None,
    before: float,
    own: Sequence[Buffer],
    weights: Sequence[float],
    size: int,
) -> Buffer:
    """Return what a station sends on: the received mean (weight `before`) with its own.

    A single payload stays as it is.
    """
    payloads = [*([] if passed is None else [passed]), *own]
    first, *others = payloads
    if not others:
        return first
    return reducer.result(payloads, [*([] if passed is None else [before]), *weights], size)


def result(path: RingPath, payloads: Mapping[PeerId, Buffer], reducer: ChunkReducer, size: int) -> Buffer:
    """Return the result of the contributions to one chunk, computed locally."""
    passed: Buffer | None = None
    for added, before in zip(path.adds, path.before, strict=True):
        own = [payloads[entry.peer] for entry in added]
        passed = joined(reducer, passed, before, own, [float(entry.weight) for entry in added], size)
    assert passed is not None
    return passed


class RingPosition:
    """One peer's part in the ring of a ballot with `count` chunks: its neighbours and its data in flight.

    - owners: owner of each chunk. collectors: receiver of contributions from outside the ring, by chunk.
    - outside: peers that are not in the ring. left, right: our neighbours; None if we are not in it.
    - passed: partial sums received; made: partial sums sent on, until their result is here.
    - sent: (chunk, whether it was the result) sent to the right neighbour.
    """

    def __init__(self, me: PeerId, proposal: Proposal, count: int) -> None:
        peers = ring(proposal)
        self.paths = paths(proposal)
        self.owners = shares(count, peers, fragment=proposal.fragment)
        self.collectors = tuple(self.paths[owner].stations[0] for owner in self.owners)
        self.outside = tuple(peer for peer in proposal.alive if peer not in peers)
        at = peers.index(me) if me in peers else None
        self.left = peers[at - 1] if at is not None else None
        self.right = peers[(at + 1) % len(peers)] if at is not None else None
        self.passed: dict[int, Buffer] = {}
        self.made: dict[int, Buffer] = {}
        self.sent: set[tuple[int, bool]] = set()
        self._places = {owner: path.place(me) for owner, path in self.paths.items()}

    def path(self, index: int) -> tuple[RingPath, int | None]:
        """Return the path of a chunk and our position on it."""
        owner = self.owners[index]
        return self.paths[owner], self._places[owner]
