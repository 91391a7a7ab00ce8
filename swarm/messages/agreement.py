"""Messages of a round: agreement on one outer step of one fragment.

The algorithm is in collectives/consensus/paxos.py.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, ClassVar

import blake3
import msgspec
from msgspec import Meta
from thinwire.swarm.messages.base import (
    LIFE,
    MAX_CHUNKS,
    MAX_GROUP,
    U16,
    U32,
    U53,
    Digest,
    Id,
    Message,
    Reason,
    Signature,
    Site,
)
from thinwire.swarm.messages.proposal import MAX_FAREWELLS, Ballot, Bits, Farewell, Lineage, Open

SPAN_PREFIX = 8
"""Bytes of an id that name a peer in a Span; finding two ids with equal prefixes takes 2**64 tries."""

MAX_SPANS = 24

MAX_STEP = 240

MAX_ENDORSED = 64
"""Maximum number of peers on trial at a peer, and that one announcement endorses.

It is a quarter of MAX_GROUP.
"""

MAX_DISTRUSTED = 128
"""Maximum number of contributors that one announcement distrusts: half of MAX_GROUP."""

MAX_PROPOSALS = 16
"""Maximum number of earlier proposals of a round that one justification may contain."""


Keys = Annotated[tuple[Id, ...], Meta(max_length=MAX_GROUP + MAX_FAREWELLS)]
"""Public keys, Ed25519. A peer id is the hash of a key, so they need no other proof."""


class Span(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Measured link from the sender to the peer whose id begins with `peer`.

    rtt, rate: in the steps of quantized_links.py; 0 means unknown.
    """

    peer: Annotated[bytes, Meta(min_length=SPAN_PREFIX, max_length=SPAN_PREFIX)]
    rtt: Annotated[int, Meta(ge=0, le=MAX_STEP)]
    rate: Annotated[int, Meta(ge=0, le=MAX_STEP)]


class Announced(Message, frozen=True, tag=54):
    """Statement of a peer about its announcement number `attempt` in this life, see `Ready.statement`.

    `digest`: see `Ready.digest`. It is what the sender of a Ready signs, and is never sent alone. The number of its message
    type precedes the fields, as in Vote.
    """

    round: U32
    fragment: U16
    attempt: U32
    life: Annotated[bytes, Meta(max_length=LIFE)]
    digest: Digest


class Ready(Message, frozen=True, dict=True):
    """Announcement of a contribution, before its data is sent (commit, then send).

    `attempt` is the number of the announcement: a peer uses each number once in a life, and a later one is higher. `base`
    is its state digest after the previous round; in pairs it is the digest of its slow weights (see `Base`). `plan` is the
    digest of layout, codec, chunk grid and aggregation. `hashes` is the concatenated blake3 of each encoded chunk.
    `norms`: L2 norm of each chunk, as float32 in little-endian order, where peers check results by them; otherwise empty.
    `loss` is for display; so is `speed` (tokens per second), unless inner steps are balanced by it. `weight` 0 means that the
    sender takes part but contributes nothing. `witness` False means that the sender will not vote in this round.
    `up` and `down`: known capacity of its link in bytes per second; 0 means unknown. `site`: name of the fast network
    that the sender shares with all peers of the same site; empty means none. `spans`: its measured links to some peers,
    with preference to the nearest. `life` is the sender's (see `Open.lives`); empty in rounds without votes. `endorses`: peers
    on trial that may become members, in the opinion of the sender; `distrusts`: peers whose contributions should not count.
    See Electorate.uncounted.
    """

    limit: ClassVar[int] = 45_000

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
    life: Annotated[bytes, Meta(max_length=LIFE)] = b""
    endorses: Annotated[tuple[Id, ...], Meta(max_length=MAX_ENDORSED)] = ()
    distrusts: Annotated[tuple[Id, ...], Meta(max_length=MAX_DISTRUSTED)] = ()
    norms: Annotated[bytes, Meta(max_length=4 * MAX_CHUNKS)] = b""

    @cached_property
    def digest(self) -> Digest:
        """Blake3 of the encoded announcement, which a proposal names (`Contribution.announced`)."""
        return blake3.blake3(msgspec.msgpack.encode(self)).digest()

    def statement(self) -> Announced:
        """Return what the sender signs: two of these with one number are evidence, and short."""
        return Announced(self.round, self.fragment, self.attempt, self.life, self.digest)


class Base(Message, frozen=True):
    """Announcement of the slow weights that a partner has at the start of a round, before it trains.

    `attempt` and `plan` are as in Ready, whose `base` names the slow weights. `hashes` is the concatenated blake3 of
    each encoded chunk.
    """

    limit: ClassVar[int] = 34_000

    round: U32
    fragment: U16
    attempt: U32
    plan: Digest
    hashes: Annotated[bytes, Meta(max_length=32 * MAX_CHUNKS)]


class Prepare(Message, frozen=True):
    """Question of a proposer with a higher ballot: what has been voted for so far?"""

    round: U32
    fragment: U16
    ballot: Ballot
    lineage: Lineage = b""


class Promise(Message, frozen=True):
    """Answer to Prepare: the sender will not vote for any lower ballot.

    It carries the sender's last vote, if any, with the Open voted for.
    """

    limit: ClassVar[int] = 83_200

    round: U32
    fragment: U16
    ballot: Ballot
    voted: Open | None
    digest: Digest | None
    lineage: Lineage = b""


class Report(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Signature of one Promise. The Promise itself is rebuilt from the Justified that carries it.

    voted: number of the proposal that the peer voted for last, counted from 1; 0: no vote. digest: of its results.
    """

    peer: Id
    voted: U16
    digest: Digest | None
    signature: Signature


class Justified(Message, frozen=True):
    """Open of a ballot above the first, with the promises that justify its value, see justification.py.

    reports: promises of a quorum, sorted by peer. proposals: those that they, and the farewells, have voted for. keys: of
    the peers that have signed these.
    """

    limit: ClassVar[int] = 1_450_000

    opened: Open
    reports: Annotated[tuple[Report, ...], Meta(max_length=MAX_GROUP)]
    proposals: Annotated[tuple[Open, ...], Meta(max_length=MAX_PROPOSALS)]
    keys: Keys = ()

    @property
    def round(self) -> int:
        """Round of the proposal."""
        return self.opened.round

    @property
    def fragment(self) -> int:
        """Fragment of the proposal."""
        return self.opened.fragment


class Leave(Message, frozen=True):
    """Farewell of a member in one round, with the Open that it voted for, if any. Other peers pass it on.

    round, fragment, lineage: the round in progress.
    """

    limit: ClassVar[int] = 83_400

    round: U32
    fragment: U16
    lineage: Lineage
    farewell: Farewell
    opened: Open | None


class Said(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Announcement that a peer has signed, as another peer shows it."""

    statement: Announced
    signature: Signature


class Blame(Message, frozen=True):
    """Report to the leader that the sender cannot make progress because of `peer`.

    said: what `peer` has announced to the sender, if the proposal names another announcement with this number. Then it goes to
    all peers, because it is evidence for those with the other one.
    """

    round: U32
    fragment: U16
    ballot: Ballot
    peer: Id
    reason: Reason
    said: Said | None = None


class Record(Message, frozen=True):
    """Hashes of an owner's results in a ballot.

    `indices` are the chunks, `hashes` is the concatenated blake3 of each encoded result. `lineage`: see Result. `basis`: name
    of the contributions from which the sender has computed these results itself (blake3 of `Open.contributors`); empty: it
    does not state that it has.
    """

    limit: ClassVar[int] = 40_000

    round: U32
    fragment: U16
    ballot: Ballot
    indices: Annotated[tuple[U16, ...], Meta(max_length=MAX_CHUNKS)]
    hashes: Annotated[bytes, Meta(max_length=32 * MAX_CHUNKS)]
    lineage: Lineage = b""
    basis: Annotated[bytes, Meta(max_length=32)] = b""


class ShownReady(Message, frozen=True):
    """Announcement of a peer, with its signature of `Ready.statement`, as another peer shows it."""

    limit: ClassVar[int] = 45_200

    peer: Id
    ready: Ready
    signature: Signature

    @property
    def round(self) -> int:
        """Round of the announcement."""
        return self.ready.round

    @property
    def fragment(self) -> int:
        """Fragment of the announcement."""
        return self.ready.fragment


class Claim(Message, frozen=True):
    """Record in which an owner states that it has computed results, as another peer shows it.

    A peer votes for results that a later ballot adopts if it has one for each of them: then an audit can name a liar.
    """

    limit: ClassVar[int] = 40_200

    owner: Id
    record: Record
    signature: Signature

    @property
    def round(self) -> int:
        """Round of the record."""
        return self.record.round

    @property
    def fragment(self) -> int:
        """Fragment of the record."""
        return self.record.fragment

    @property
    def lineage(self) -> Lineage:
        """Lineage of the record."""
        return self.record.lineage


class Verdict(Message, frozen=True):
    """Statement that `owner` has signed a false result of chunk `index`, by the sender's own computation.

    Or the sender has excluded the owner, because a quorum of the members has sent this verdict. See node/outer/owner_audits.py.
    """

    round: U32
    fragment: U16
    index: U16
    owner: Id
    lineage: Lineage = b""


class Vote(Message, frozen=True, tag=16):
    """Statement that the sender holds every result of `ballot`.

    `digest` is blake3 over the hashes of all results in chunk order. `opened` is blake3 of the Open voted for, so that
    a certificate covers the participants and not only the results. Without a digest it is no vote, but the statement of
    the leader that it proposes this (`Open.seal`). `lineage`: see `Fork`. Its number precedes the fields, because evidence
    has either.
    """

    round: U32
    fragment: U16
    ballot: Ballot
    opened: Digest
    digest: Digest | None
    lineage: Lineage = b""


class Proof(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Signature of one Vote. The Vote itself is rebuilt from the Commit that carries it."""

    peer: Id
    signature: Signature


class Commit(Message, frozen=True):
    """Certificate: `opened` is committed with results `digest`, as the votes of a quorum prove.

    On the wire it is a PackedCommit.
    """

    limit: ClassVar[int] = 99_500

    opened: Open
    digest: Digest
    votes: Annotated[tuple[Proof, ...], Meta(max_length=MAX_GROUP)]


class Decided(Message, frozen=True):
    """Commit without its proposal, for a peer that has the proposal; another one asks with Ask.

    opened: see Vote. voters: bitmap over `Open.alive`. signatures: of their votes, 64 bytes each.
    """

    limit: ClassVar[int] = 16_700

    round: U32
    fragment: U16
    ballot: Ballot
    opened: Digest
    digest: Digest
    voters: Bits
    signatures: Annotated[bytes, Meta(max_length=64 * MAX_GROUP)]


class Ask(Message, frozen=True):
    """Question about the outcome of a round.

    The answer is its Commit, or Behind, or, while the round is in progress, the receiver's Ready.
    """

    round: U32
    fragment: U16


class Behind(Message, frozen=True):
    """Answer to a message of an old round: the sender has committed `round`; fetch the state."""

    round: U32
    fragment: U16 = 0


class Decline(Message, frozen=True):
    """Statement that the sender takes no part in this round, with the reason.

    In rounds of pairs: not with the receiver, or not any more. Otherwise it answers a Prepare: the sender has no state
    yet, and therefore knows of no commit.
    """

    round: U32
    fragment: U16
    reason: Reason
