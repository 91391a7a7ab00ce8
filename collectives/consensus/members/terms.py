"""Terms of a round."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from thinwire.collectives.consensus.members.lives import electorate_digest, lives_in_order
from thinwire.collectives.consensus.members.quorum import enough
from thinwire.collectives.topology.placement import Order
from thinwire.swarm.messages.registry import MAX_GROUP, Digest, PeerId


@dataclass(frozen=True, slots=True)
class RoundTerms:
    """Terms of a round of one fragment; equal on all peers that can agree.

    members: peers with a vote, decided by the last committed round, in leader order (rendezvous ranking).
    seniors: the same by seniority, see quorum.py; empty: leader order. lineage: see `Fork`.
    base: state digest after that round. plan: digest of layout, codec, grid and aggregation.
    fraction: share of the members that must be exceeded. min_peers: fewest contributors.
    max_weight: most tokens that one contribution may claim. max_contributors: most contributors.
    grace: seconds to wait for stragglers once a quorum is ready. graces: other values for these members, and for applicants,
    see RoundStarter. limit: least wait of a peer that opens the round in place of the first leader. patience: seconds without
    progress before a peer acts; the caller derives it from the duration of earlier rounds. weights: the peers that may
    contribute, with fixed weights; None: all peers, with their announced weights. spare: peers that contribute only if there
    are too few others.
    chunks: number of chunks of the fragment if owners are chosen by bandwidth; 0: all peers own equally many. relays: True if
    a ballot may state uplink capacities, so that peers relay payloads. sited: True if it states which peers share a site.
    buffered: True if members announce their presence before they contribute. Then a round waits for one contribution, or
    `min_peers`, then `grace` for those of other members, and a patience for members that have not announced themselves.
    lives: known lives of members; other members may have any life.
    ring: makes the order in which the data of a ring passes the owners of chunks (empty: no ring in this ballot); None: the
    run has no rings.
    """

    round: int
    fragment: int
    members: tuple[PeerId, ...]
    base: Digest
    plan: Digest
    fraction: float = 0.5
    min_peers: int = 1
    max_weight: int = 2**53 - 1
    max_contributors: int = MAX_GROUP
    grace: float = 10.0
    limit: float = 0.0
    graces: Mapping[PeerId, float] = field(default_factory=dict)
    patience: float = 2.0
    weights: Mapping[PeerId, int] | None = None
    spare: frozenset[PeerId] = frozenset()
    chunks: int = 0
    relays: bool = False
    sited: bool = False
    buffered: bool = False
    ring: Order | None = None
    lives: Mapping[PeerId, bytes] = field(default_factory=dict)
    seniors: tuple[PeerId, ...] = ()
    lineage: bytes = b""

    @property
    def electorate(self) -> Digest:
        """Digest of the members that vote, see `electorate_digest`."""
        return electorate_digest(self.by_seniority, lives_in_order(self.by_seniority, self.lives))

    @property
    def by_seniority(self) -> tuple[PeerId, ...]:
        """The members by seniority."""
        return self.seniors or self.members

    def enough(self, agreeing: Collection[PeerId], left: Collection[PeerId] = ()) -> bool:
        """Return True if a quorum of the members without `left` agrees."""
        return enough(agreeing, self.by_seniority, left, fraction=self.fraction)

    def other_life(self, peer: PeerId, life: bytes) -> bool:
        """Return True if `life` is not the member's life: it has lost its run folder since it became a member."""
        return self.lives.get(peer, life) != life
