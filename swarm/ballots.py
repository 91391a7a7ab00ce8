"""Messages of a round: agreement on one outer step of one fragment (see collectives/agreement.py)."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from .message import MAX_CHUNKS, MAX_GROUP, U16, U32, U53, Digest, Id, Message, PeerId, Reason, Signature, Site

SPAN_PREFIX = 8
"""Bytes of an id that name a peer in a Span: to find two that begin alike costs 2**64 tries."""

MAX_SPANS = 24

MAX_STEP = 240


class Ballot(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, order=True):
    """Number of a proposal; totally ordered by (term, leader)."""

    term: U32
    leader: Id


class Contribution(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One contributor of a round: which of its announcements counts, and its weight (tokens, bounded by the manifest)."""

    peer: Id
    attempt: U32
    weight: U53


class Exclusion(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A peer that is out of the round, and why."""

    peer: Id
    reason: Reason


class Span(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a peer has measured of its link to one whose id begins with `peer`, in the steps of measures.py; 0: not known."""

    peer: Annotated[bytes, Meta(min_length=SPAN_PREFIX, max_length=SPAN_PREFIX)]
    rtt: Annotated[int, Meta(ge=0, le=MAX_STEP)]
    rate: Annotated[int, Meta(ge=0, le=MAX_STEP)]


class Ready(Message, frozen=True):
    """A contributor announces its pseudo-gradient before it sends it (commit, then send).

    `attempt` counts its announcements for this round; `base` is its state digest after the round before, in pairs the name of
    its slow weights there (see `Base`); `plan` is the digest of layout, codec, chunk grid and aggregation; `hashes` is the
    concatenated blake3 of each encoded chunk.
    `loss` is for display; so is `speed` (tokens per second), but where others choose their inner steps by it. `weight` 0
    means: takes part, contributes nothing. `witness` False means: this process restarted and will not vote in this round,
    count it as gone. `up` and `down`: what its link carries, bytes per second, as far as it knows; 0 = unknown. `site`: the
    fast network that the peer shares with all that say the same; empty: none. `spans`: what it has measured of its links to
    some others, the nearest above all.
    """

    limit: ClassVar[int] = 34_000

    round: U32
    fragment: U16
    attempt: U32
    base: Digest
    plan: Digest
    weight: U53
    hashes: Annotated[bytes, Meta(max_length=32 * MAX_CHUNKS)]
    witness: bool
    loss: float
    speed: float
    up: U53 = 0
    down: U53 = 0
    site: Site = ""
    spans: Annotated[tuple[Span, ...], Meta(max_length=MAX_SPANS)] = ()


class Base(Message, frozen=True):
    """One of a pair announces the slow weights that it has at the beginning of a round, before it trains.

    `attempt` and `plan` as in Ready, whose `base` names them; `hashes` is the concatenated blake3 of each encoded chunk.
    """

    limit: ClassVar[int] = 34_000

    round: U32
    fragment: U16
    attempt: U32
    plan: Digest
    hashes: Annotated[bytes, Meta(max_length=32 * MAX_CHUNKS)]


class Open(Message, frozen=True):
    """The leader fixes who takes part. Results are a pure function of `contributors` and what they announced.

    `group` (sorted) fixes the primary owners of chunks for the round; `alive` (sorted, a subset) are those that still take
    part; chunks of the others fall to their backups. When an earlier ballot has been voted for, its contributors must be
    kept: `adopted` is then the digest of their results and `sources` are peers known to hold every one of them. `idle`
    (sorted, some of `alive` but not all) own no chunks: what they say of others, or others of them, cannot be settled.
    `kept` (sorted) are the members that were settled with what is adopted, see `members`. `shares`: of how many chunks each of
    `group` is the primary owner; empty: of equally many. In a gather: how fast the uplink of each
    is, see collectives/handing.py; empty: nothing is handed on.
    `sites`, in a hierarchy: for each of `group` the number of its site, counted from 0 as they first come; else empty.
    `order`: those that own chunks, each by its place in `alive`, as a ring in which data goes from each to the next; empty
    where contributions go straight to owners.
    """

    limit: ClassVar[int] = 85_000

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

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Who has a say in the next round: part of what is decided, as the contributors are.

        Who first proposes them takes those that take part then; later ballots on the same carry them on, whoever takes part by
        then. Else two peers could commit one round with different members.
        """
        return self.kept or self.alive


class Prepare(Message, frozen=True):
    """A candidate with a higher ballot asks what has been voted so far."""

    round: U32
    fragment: U16
    ballot: Ballot


class Promise(Message, frozen=True):
    """Answer to Prepare: no lower ballot will get this peer's vote. Carries its last vote with the Open voted for, if any."""

    limit: ClassVar[int] = 85_500

    round: U32
    fragment: U16
    ballot: Ballot
    voted: Open | None
    digest: Digest | None


class Blame(Message, frozen=True):
    """A participant tells the leader that it cannot get on because of `peer`."""

    round: U32
    fragment: U16
    ballot: Ballot
    peer: Id
    reason: Reason


class Record(Message, frozen=True):
    """An owner's word on its chunks of a ballot: `indices` and the blake3 of each encoded result, concatenated."""

    limit: ClassVar[int] = 40_000

    round: U32
    fragment: U16
    ballot: Ballot
    indices: Annotated[tuple[U16, ...], Meta(max_length=MAX_CHUNKS)]
    hashes: Annotated[bytes, Meta(max_length=32 * MAX_CHUNKS)]


class Vote(Message, frozen=True):
    """The sender holds every result of `ballot`; `digest` is blake3 over the hashes of all results in chunk order.

    `opened` is blake3 of the Open it voted for, so that a verdict binds who took part, not only the results.
    """

    round: U32
    fragment: U16
    ballot: Ballot
    opened: Digest
    digest: Digest


class Proof(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The signature of one Vote; the Vote itself is rebuilt from the Commit that carries it."""

    peer: Id
    signature: Signature


class Commit(Message, frozen=True):
    """The verdict: `opened` is committed with results `digest`, proved by the votes of more than the quorum."""

    limit: ClassVar[int] = 111_500

    opened: Open
    digest: Digest
    votes: Annotated[tuple[Proof, ...], Meta(max_length=MAX_GROUP)]


class Ask(Message, frozen=True):
    """What became of this round? Answered with its Commit, with Behind, or while it goes on with the receiver's Ready."""

    round: U32
    fragment: U16


class Behind(Message, frozen=True):
    """Answer to a message of an old round: the sender has committed `round`; fetch the state."""

    round: U32
    fragment: U16 = 0


class Decline(Message, frozen=True):
    """The sender has no part in this round, and why. In rounds of pairs: not with the receiver, or not any more; else an answer
    to a Prepare, by who has no state yet, so that it knows of no verdict.
    """

    round: U32
    fragment: U16
    reason: Reason
