"""Routes of a ballot's chunks in a hierarchy: collectors of contributions, owners of chunks, relays.

Pure: every peer computes the same routes from the proposal. Chunks are assigned to the clusters in turn, and within each to
its members in turn, so that all uplinks and all members have equal work. Within a cluster, other members replace those
that do not work. If no member can work, its contributions go to the chunk's owner, wherever that is. The subtotal of a
cluster depends only on its contributions, not on the routes, so the result stays the same if another peer owns the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import blake3
import msgspec
from thinwire.swarm.messages.registry import Contribution, Digest, PeerId, Proposal
from thinwire.swarm.rendezvous_hash import backups


@dataclass(frozen=True)
class Cluster:
    """Peers of one site in a ballot.

    primaries: all peers of the site, sorted, present or not. members: the primaries that take part. working: the members
    that own or relay chunks. entries: their contributions, in peer-id order. lineage: that of the ballot.
    """

    primaries: tuple[PeerId, ...]
    members: tuple[PeerId, ...]
    working: frozenset[PeerId]
    entries: tuple[Contribution, ...]
    lineage: bytes

    @cached_property
    def name(self) -> Digest:
        """Hash that identifies the contributions in the cluster's subtotal."""
        return blake3.blake3(msgspec.msgpack.encode((self.lineage, self.entries))).digest()

    @property
    def sums(self) -> bool:
        """True if several contributions become one subtotal; a single one is forwarded as it is."""
        return len(self.entries) > 1

    @property
    def subtotal(self) -> Contribution:
        """Entry that stands for the cluster's contributions in the mean of the subtotals."""
        return Contribution(self.name, 0, sum(entry.weight for entry in self.entries))


class Routes:
    """Routes of one ballot. `clusters` is in the order of their numbers, `owners` in that of the chunks."""

    def __init__(self, proposal: Proposal, count: int, seed: bytes) -> None:
        numbers = proposal.sites or tuple(range(len(proposal.group)))
        self._seed, self._shift = seed, proposal.fragment * count  # see shards: fragments share the work
        self.number = dict(zip(proposal.group, numbers, strict=True))
        """Maps each peer of the group to the number of its cluster."""
        alive, working = set(proposal.alive), set(proposal.alive) - set(proposal.idle)
        grouped: list[list[PeerId]] = [[] for _ in range(1 + max(numbers, default=-1))]
        for peer, number in self.number.items():
            grouped[number].append(peer)
        self.clusters = tuple(
            Cluster(
                tuple(peers),
                tuple(peer for peer in peers if peer in alive),
                frozenset(working.intersection(peers)),
                tuple(entry for entry in proposal.contributors if self.number.get(entry.peer) == number),
                proposal.lineage,
            )
            for number, peers in enumerate(grouped)
        )
        self.whole = all(entry.peer in self.number for entry in proposal.contributors)
        """True if all contributors are in the group.

        If not, results can only be fetched from peers that have them.
        """
        # Sorted by the first contributor, not by the first peer: a peer without contribution must not change the
        # result.
        giving = sorted((cluster for cluster in self.clusters if cluster.entries), key=lambda c: c.entries[0].peer)
        self.inputs = tuple(cluster.subtotal for cluster in giving)
        """Entries whose mean the results are."""
        self.named = {cluster.name: number for number, cluster in enumerate(self.clusters) if cluster.entries}
        able = [number for number, cluster in enumerate(self.clusters) if cluster.working]
        self._relays: dict[tuple[int, int], PeerId | None] = {}
        self._collected: dict[tuple[PeerId, int], tuple[Cluster, ...]] = {}
        self.owners = tuple(self._owner(index, able) for index in range(count))

    def _owner(self, index: int, able: Sequence[int]) -> PeerId:
        at = index + self._shift
        turn = at % len(self.clusters)
        number = turn if self.clusters[turn].working else able[at % len(able)]
        owner = self.relay(number, index)
        assert owner is not None
        return owner

    def relay(self, number: int, index: int) -> PeerId | None:
        """Return the relay of a cluster for a chunk, or None if none of its peers can be it."""
        key = number, index
        if key not in self._relays:
            cluster = self.clusters[number]
            turn = cluster.primaries[(index + self._shift) // len(self.clusters) % len(cluster.primaries)]
            self._relays[key] = turn if turn in cluster.working else self._backup(cluster, turn, index)
        return self._relays[key]

    def _backup(self, cluster: Cluster, owner: PeerId, index: int) -> PeerId | None:
        if not cluster.working:
            return None
        return next(p for p in backups(self._seed, cluster.primaries, owner, index) if p in cluster.working)

    def collector(self, number: int, index: int) -> PeerId:
        """Return the peer that collects a cluster's contributions to a chunk."""
        relay = self.relay(number, index) if self.clusters[number].sums else None
        return relay or self.owners[index]

    def collected(self, peer: PeerId, index: int) -> tuple[Cluster, ...]:
        """Return the clusters whose contributions to a chunk a peer collects."""
        key = peer, index
        if key not in self._collected:
            self._collected[key] = tuple(
                cluster
                for number, cluster in enumerate(self.clusters)
                if cluster.entries and self.collector(number, index) == peer
            )
        return self._collected[key]

    def receivers(self, peer: PeerId, index: int) -> tuple[PeerId, ...]:
        """Return the peers to which a peer forwards the result of a chunk."""
        mine = self.number.get(peer)
        if self.owners[index] != peer:
            stands = mine is not None and self.relay(mine, index) == peer
            return tuple(p for p in self.clusters[mine].members if p != peer) if mine is not None and stands else ()
        found: list[PeerId] = []
        for number, cluster in enumerate(self.clusters):
            relay = self.relay(number, index)
            found += cluster.members if relay in (None, peer) else (relay,)
        return tuple(p for p in found if p != peer)

    def sources(self, peer: PeerId, index: int) -> tuple[PeerId, ...]:
        """Return the senders of a chunk's result to a peer: its cluster's relay, if another, and the owner."""
        mine = self.number.get(peer)
        relay = self.relay(mine, index) if mine is not None else None
        owner = self.owners[index]
        return (owner,) if relay in (None, peer, owner) else (relay, owner)
