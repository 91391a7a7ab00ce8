"""Messages by which peers agree on one outer step of one fragment.

Announcements are in announcement.py. The algorithm is in collectives/consensus/paxos.py.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta
from thinwire.swarm.messages.announcement import SignedAnnouncement
from thinwire.swarm.messages.base import MAX_CHUNKS, MAX_GROUP, U16, U32, Digest, Id, Message, Reason, Signature
from thinwire.swarm.messages.proposal import MAX_FAREWELLS, Ballot, Bits, Farewell, Lineage, Proposal

MAX_PROPOSALS = 16
"""Maximum number of earlier proposals of a round that one justification may contain."""

Keys = Annotated[tuple[Id, ...], Meta(max_length=MAX_GROUP + MAX_FAREWELLS)]
"""Public keys, Ed25519. A peer id is the hash of a key, so they need no other proof."""


class Prepare(Message, frozen=True):
    """Question of a proposer with a higher ballot: which proposal has the receiver voted for so far?"""

    round: U32
    fragment: U16
    ballot: Ballot
    lineage: Lineage = b""


class ViewChange(Message, frozen=True):
    """Demand of a member for the next leader view, and its answer to a ballot below its promise.

    `view`: highest view that the sender has asked for. `ballot`: the highest one that it has promised or followed.
    """

    round: U32
    fragment: U16
    view: U32
    ballot: Ballot
    lineage: Lineage = b""


class Promise(Message, frozen=True):
    """Answer to Prepare: the sender will not vote for any lower ballot.

    It carries the sender's last vote, if any, with the proposal voted for.
    """

    limit: ClassVar[int] = 286_500

    round: U32
    fragment: U16
    ballot: Ballot
    voted: Proposal | None
    digest: Digest | None
    lineage: Lineage = b""


class Report(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Signature of one Promise. The Promise itself is rebuilt from the Propose that carries it.

    voted: number of the proposal that the peer voted for last, counted from 1; 0: no vote. digest: of its results.
    """

    peer: Id
    voted: U16
    digest: Digest | None
    signature: Signature


class Propose(Message, frozen=True):
    """Proposal of a leader; in later ballots with the promises that justify it, see justification.py.

    reports: promises of a quorum, sorted by peer; none in the first ballot. earlier: the proposals that they, and the
    farewells, have voted for. keys: of the peers that have signed these.
    """

    limit: ClassVar[int] = 4_910_000

    proposal: Proposal
    reports: Annotated[tuple[Report, ...], Meta(max_length=MAX_GROUP)] = ()
    earlier: Annotated[tuple[Proposal, ...], Meta(max_length=MAX_PROPOSALS)] = ()
    keys: Keys = ()

    @property
    def round(self) -> int:
        """Round of the proposal."""
        return self.proposal.round

    @property
    def fragment(self) -> int:
        """Fragment of the proposal."""
        return self.proposal.fragment


class Leave(Message, frozen=True):
    """Farewell of a member in one round, with the proposal that it voted for, if any.

    Other peers relay it. round, fragment, lineage: the round in progress.
    """

    limit: ClassVar[int] = 286_600

    round: U32
    fragment: U16
    lineage: Lineage
    farewell: Farewell
    voted: Proposal | None


class Blame(Message, frozen=True):
    """Report to the leader that the sender cannot make progress because of `peer`.

    said: the announcement that `peer` has sent to the sender, if the proposal names another one with the same number. Then the
    message goes to all peers, because it is evidence for those that have the other announcement.
    """

    round: U32
    fragment: U16
    ballot: Ballot
    peer: Id
    reason: Reason
    said: SignedAnnouncement | None = None


class ResultRecord(Message, frozen=True):
    """Hashes of an owner's results in a ballot.

    `indices` are the chunks, `hashes` is the concatenated blake3 of each encoded result. `lineage`: see Result. `basis`: name
    of the contributions from which the sender has computed these results itself (blake3 of `Proposal.contributors`); empty: it
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


class ResultClaim(Message, frozen=True):
    """Record in which an owner states that it has computed results, as another peer shows it.

    A peer votes for results that a later ballot adopts if it has one for each of them: then an audit can name a liar.
    """

    limit: ClassVar[int] = 40_200

    owner: Id
    record: ResultRecord
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
    """Statement that `owner` has signed a false result of chunk `index`.

    The sender has computed the result itself, or has excluded the owner because a quorum of the members has sent this verdict.
    See node/outer/verification/owner_audits.py.
    """

    round: U32
    fragment: U16
    index: U16
    owner: Id
    lineage: Lineage = b""


class Vote(Message, frozen=True, tag=16):
    """Statement that the sender holds every result of `ballot`.

    `digest` is blake3 over the hashes of all results in chunk order. `proposal_digest` is blake3 of the proposal voted
    for, so that a certificate covers the participants and not only the results. Without a digest it is no vote, but the
    statement of the leader that it proposes this (`Proposal.seal`). `lineage`: see `Fork`. The number of its message type
    precedes the fields, because evidence contains a Vote or an Announced.
    """

    round: U32
    fragment: U16
    ballot: Ballot
    proposal_digest: Digest
    digest: Digest | None
    lineage: Lineage = b""


class Proof(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Signature of one Vote. The Vote itself is rebuilt from the Commit that carries it."""

    peer: Id
    signature: Signature


class Commit(Message, frozen=True):
    """Proof that `proposal` is committed with results `digest`: the votes of a quorum.

    A CompactCommit is the same without the proposal, for peers that have it. A Certificate is the same with the members of the
    round and their keys, for peers that do not know them. On the wire a Commit is a PackedCommit.
    """

    limit: ClassVar[int] = 303_000

    proposal: Proposal
    digest: Digest
    votes: Annotated[tuple[Proof, ...], Meta(max_length=MAX_GROUP)]

    @property
    def round(self) -> int:
        """Round of the proposal."""
        return self.proposal.round

    @property
    def fragment(self) -> int:
        """Fragment of the proposal."""
        return self.proposal.fragment


class CompactCommit(Message, frozen=True):
    """Commit without its proposal, for a peer that has the proposal; another one asks with Ask.

    proposal_digest: see Vote. voters: bitmap over `Proposal.alive`. signatures: of their votes, 64 bytes each.
    """

    limit: ClassVar[int] = 16_700

    round: U32
    fragment: U16
    ballot: Ballot
    proposal_digest: Digest
    digest: Digest
    voters: Bits
    signatures: Annotated[bytes, Meta(max_length=64 * MAX_GROUP)]


class Ask(Message, frozen=True):
    """Question about the outcome of a round.

    The answer is its Commit, or Behind, or, while the round is in progress, the receiver's Ready. `again`: the sender has
    begun the round again without the data that it had received; it gets this data again, at most once in a patience.
    """

    round: U32
    fragment: U16
    again: bool = False


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
