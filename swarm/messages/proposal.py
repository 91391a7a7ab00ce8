"""Proposals of a leader, and their form on the wire.

A proposal names most of its peers several times. On the wire it has each id once, in one sorted table (`PackedProposal.peers`);
a set of peers is a bitmap over the table. One proposal has exactly one wire form. Votes, seals and names cover the proposal
itself, not its wire form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from thinwire.swarm.messages.base import LIFE, MAX_GROUP, MAX_TOKEN, U16, U32, U53, Digest, Id, PeerId, Reason

MAX_FAREWELLS = 64
"""Maximum number of farewells that one proposal may carry."""

MAX_NAMED = 4 * MAX_GROUP
"""Maximum number of peers that one proposal names.

These are the group, the members, the peers that are left out, and those that hold adopted results.
"""

Bits = Annotated[bytes, Meta(max_length=MAX_NAMED // 8)]
"""Set of positions: bit n, counted from the lowest of the first byte, stands for position n.

Unused bits are 0.
"""

Token = Annotated[bytes, Meta(max_length=MAX_TOKEN)]
"""Encoded admission token of a peer; empty: none."""

Lineage = Annotated[bytes, Meta(max_length=LIFE)]
"""Name of a lineage, LIFE bytes, see swarm/lineage.py; empty without a state."""


class Ballot(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, order=True):
    """Number of a proposal; totally ordered by (term, leader)."""

    term: U32
    leader: Id


ContributionKey = tuple[PeerId, int]
"""A contributor, and the number of one of its announcements."""


class Contribution(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Entry of a proposal for one contributor: which of its announcements counts, and its weight.

    The weight is in tokens and bounded by the manifest. announced: digest of the announcement, see `Ready.digest`; empty,
    in rounds without a lineage only: any announcement with this number.
    """

    peer: Id
    attempt: U32
    weight: U53
    announced: Annotated[bytes, Meta(max_length=32)] = b""

    @property
    def key(self) -> ContributionKey:
        """The contributor, and the number of its announcement."""
        return self.peer, self.attempt


class Exclusion(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A peer that is out of the round, and the reason."""

    peer: Id
    reason: Reason


class Farewell(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Final statement of a member that leaves: it votes and promises nothing more in this round.

    promised: its highest promise. voted, digest: blake3 of the proposal that it voted for last, and the digest of the results;
    None without a vote. signature: of the Leave with an empty signature and without its Proposal, see `farewells.statement`.
    """

    peer: Id
    promised: Ballot
    voted: Digest | None
    digest: Digest | None
    signature: Annotated[bytes, Meta(max_length=64)]


class MemberProof(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Proof of a new member: its signed announcement, see `Announced`, and its admission to the run.

    attempt, announced: number and digest of the announcement. key: public key of the peer. token: its admission token.
    """

    attempt: U32
    announced: Digest
    key: Id
    signature: Annotated[bytes, Meta(max_length=64)]
    token: Token = b""


class Proposal(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, dict=True):
    """Value that a leader proposes in a ballot: contributors, owners and members of the round.

    On the wire it is a PackedProposal.

    Results are a pure function of `contributors` and their announcements. `group` (sorted) fixes the primary owners of
    chunks for the round. `alive` (sorted, a subset) are the peers that still take part; the chunks of the others go to
    their backups. If an earlier ballot has been voted for, its contributors must be used: then `adopted` is the digest
    of their results and `sources` are peers known to hold all of these results. `idle` (sorted, some of `alive` but not
    all) own no chunks, because blame by them or against them cannot be resolved. `kept` (sorted) are the members of the
    next round if these are others than `alive`, see `members`. `shares`: for each peer of `group`, the number of
    chunks of which it is the primary owner; empty means equal numbers. In an all-gather, `shares` is instead the
    relative speed of each uplink, see collectives/topology/relay_plan.py; empty means that nothing is relayed. `sites`,
    in a hierarchy: for each peer of `group` the number of its site, numbered from 0 by first occurrence; otherwise
    empty. `order`: the ring, in which each owner sends to the next, as positions in `alive`; empty if contributions go
    directly to owners. `lives`: LIFE bytes for each of `members`, decided with them. A member is a peer and its life, so a
    peer that has lost its run folder, and with it its votes, is no member any more. In rounds without a lineage zeros are
    any life, and empty means zeros for all. `member_proofs`, in a lineage: of those of `members`, in their order,
    that are not members of this round in the same life, see proposal.new_lives. `left` (sorted by peer), with adopted results:
    farewells of members that were left out when the results were first proposed, see `Electorate.left`.
    `lineage`: see `Fork`. `farewells` (sorted by peer): members that have left, so that the quorum is counted without them.
    `electorate`: digest of the members that vote in this round, see lives.electorate_digest. `seal`: signature of the
    leader under the statement that it proposes this, see proposal.statement; empty in rounds without a lineage.
    """

    round: U32
    fragment: U16
    ballot: Ballot
    group: Annotated[tuple[Id, ...], Meta(max_length=MAX_GROUP)]
    alive: Annotated[tuple[Id, ...], Meta(max_length=MAX_GROUP)]
    contributors: Annotated[tuple[Contribution, ...], Meta(max_length=MAX_GROUP)]
    excluded: Annotated[tuple[Exclusion, ...], Meta(max_length=MAX_GROUP)]
    adopted: Digest | None
    sources: Annotated[tuple[Id, ...], Meta(max_length=MAX_GROUP)]
    idle: Annotated[tuple[Id, ...], Meta(max_length=MAX_GROUP)] = ()
    kept: Annotated[tuple[Id, ...], Meta(max_length=MAX_GROUP)] = ()
    shares: Annotated[tuple[U16, ...], Meta(max_length=MAX_GROUP)] = ()
    sites: Annotated[tuple[U16, ...], Meta(max_length=MAX_GROUP)] = ()
    order: Annotated[tuple[U16, ...], Meta(max_length=MAX_GROUP)] = ()
    lives: Annotated[bytes, Meta(max_length=LIFE * MAX_GROUP)] = b""
    member_proofs: Annotated[tuple[MemberProof, ...], Meta(max_length=MAX_GROUP)] = ()
    lineage: Lineage = b""
    farewells: Annotated[tuple[Farewell, ...], Meta(max_length=MAX_FAREWELLS)] = ()
    left: Annotated[tuple[Farewell, ...], Meta(max_length=MAX_FAREWELLS)] = ()
    electorate: Annotated[bytes, Meta(max_length=32)] = b""
    seal: Annotated[bytes, Meta(max_length=64)] = b""

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Peers with a vote in the next round; decided in this round together with the contributors.

        The first proposal of some results takes the peers that take part at that time, and absent members as in
        `Electorate.retained`. Later ballots with the same results have these members, independently of the peers that take
        part then. Otherwise two peers could commit one round with different members.
        """
        return self.kept or self.alive

    @cached_property
    def packed(self) -> PackedProposal:
        """Wire form. Raises ValueError if it has none.

        Then a list of peers is not sorted, or some announcements have no digest.
        """
        named = (self.group, self.alive, self.sources, self.idle, self.kept)
        ids = {peer for peers in named for peer in peers}
        ids |= {entry.peer for entry in self.contributors} | {entry.peer for entry in self.excluded}
        place = {peer: at for at, peer in enumerate(sorted(ids))}
        return PackedProposal(
            self.round,
            self.fragment,
            self.ballot,
            b"".join(place),
            bits_of(self.group, place),
            bits_of(self.alive, place),
            bits_of([entry.peer for entry in self.contributors], place),
            tuple(entry.attempt for entry in self.contributors),
            tuple(entry.weight for entry in self.contributors),
            _joined([entry.announced for entry in self.contributors]),
            bits_of([entry.peer for entry in self.excluded], place),
            tuple(entry.reason for entry in self.excluded),
            self.adopted,
            bits_of(self.sources, place),
            bits_of(self.idle, place),
            bits_of(self.kept, place),
            *_rest(self),
        )


class PackedProposal(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Wire form of a proposal.

    peers: table of the ids that the sets name, sorted, without duplicates. group, alive, contributors, excluded, sources,
    idle, kept: bitmaps over it. attempts, weights, announced (32 bytes each, or nothing): for each contributor. reasons: for
    each excluded peer. The other fields are those of the proposal.
    """

    round: U32
    fragment: U16
    ballot: Ballot
    peers: Annotated[bytes, Meta(max_length=32 * MAX_NAMED)]
    group: Bits
    alive: Bits
    contributors: Bits
    attempts: Annotated[tuple[U32, ...], Meta(max_length=MAX_GROUP)]
    weights: Annotated[tuple[U53, ...], Meta(max_length=MAX_GROUP)]
    announced: Annotated[bytes, Meta(max_length=32 * MAX_GROUP)]
    excluded: Bits
    reasons: Annotated[tuple[Reason, ...], Meta(max_length=MAX_GROUP)]
    adopted: Digest | None
    sources: Bits
    idle: Bits
    kept: Bits
    shares: Annotated[tuple[U16, ...], Meta(max_length=MAX_GROUP)]
    sites: Annotated[tuple[U16, ...], Meta(max_length=MAX_GROUP)]
    order: Annotated[tuple[U16, ...], Meta(max_length=MAX_GROUP)]
    lives: Annotated[bytes, Meta(max_length=LIFE * MAX_GROUP)]
    member_proofs: Annotated[tuple[MemberProof, ...], Meta(max_length=MAX_GROUP)]
    lineage: Lineage
    farewells: Annotated[tuple[Farewell, ...], Meta(max_length=MAX_FAREWELLS)]
    left: Annotated[tuple[Farewell, ...], Meta(max_length=MAX_FAREWELLS)]
    electorate: Annotated[bytes, Meta(max_length=32)]
    seal: Annotated[bytes, Meta(max_length=64)]

    @property
    def table(self) -> tuple[PeerId, ...]:
        """The ids of `peers`."""
        return tuple(self.peers[at : at + 32] for at in range(0, len(self.peers), 32))

    def open(self) -> Proposal:
        """Return the proposal. Raises ValueError if this is not its wire form."""
        table = self.table
        group, alive, sources, idle, kept = (
            named_by(bits, table) for bits in (self.group, self.alive, self.sources, self.idle, self.kept)
        )
        peers, excluded = named_by(self.contributors, table), named_by(self.excluded, table)
        hashes = [self.announced[at : at + 32] for at in range(0, len(self.announced), 32)] or [b""] * len(peers)
        if len(self.peers) % 32 or max(map(len, (group, alive, sources, idle, kept))) > MAX_GROUP:
            raise ValueError(f"ids of other lengths, or more than {MAX_GROUP} peers")
        proposal = Proposal(
            self.round,
            self.fragment,
            self.ballot,
            group,
            alive,
            tuple(map(Contribution, peers, self.attempts, self.weights, hashes)),
            tuple(map(Exclusion, excluded, self.reasons)),
            self.adopted,
            sources,
            idle,
            kept,
            *_rest(self),
        )
        if proposal.packed != self:
            raise ValueError("not the wire form of a proposal")
        return proposal


def _rest(one: Proposal | PackedProposal) -> tuple[Any, ...]:
    """Return the last fields, which are the same in both forms."""
    links = one.shares, one.sites, one.order
    return *links, one.lives, one.member_proofs, one.lineage, one.farewells, one.left, one.electorate, one.seal


def bits_of(peers: Sequence[PeerId], place: Mapping[PeerId, int]) -> bytes:
    """Return the bitmap of some peers. place: position of each id of the table.

    Raises ValueError unless they are sorted and in the table.
    """
    if any(one >= other for one, other in pairwise(peers)) or not place.keys() >= set(peers):
        raise ValueError("a set of peers that is not sorted, or not in the table")
    return sum(1 << place[peer] for peer in peers).to_bytes((len(place) + 7) // 8, "little")


def named_by(bits: bytes, table: Sequence[PeerId]) -> tuple[PeerId, ...]:
    """Return the peers of a bitmap over `table`, in its order."""
    number = int.from_bytes(bits, "little")
    return tuple(peer for at, peer in enumerate(table) if number >> at & 1)


def _joined(digests: Sequence[bytes]) -> bytes:
    if any(digests) and any(len(digest) != 32 for digest in digests):
        raise ValueError("some announcements have no digest")
    return b"".join(digests)
