"""Every message that can travel, its schema and its limits.

A message is a frozen struct, encoded as a fixed-order msgpack array, so that one message has one encoding and a signature
can be checked by encoding again. Numbers, lengths and counts are bounded in the schema; `frame.decode` checks the limits of
the type before it allocates anything. Layers: gate (strangers), membership, rounds, state.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeAlias

import msgspec
from msgspec import Meta

VERSION = 1
"""Version of the wire protocol; peers of another version are refused with both numbers named."""

PeerId: TypeAlias = bytes
"""blake2b-256 of a peer's Ed25519 public key, 32 bytes."""

MAX_GROUP = 256
"""Most peers in one round's group."""

MAX_CHUNKS = 1024
"""Most chunks in one fragment's grid (with 1 MiB chunks: 1 GiB of encoded payload a fragment)."""

CHUNK_BYTES = 1 << 20
"""Largest raw payload of a frame: 1 MiB and a little for a codec's scales (see `Limits.payload`)."""

Id = Annotated[bytes, Meta(min_length=32, max_length=32)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
U16 = Annotated[int, Meta(ge=0, le=2**16 - 1)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U53 = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Reason = Annotated[str, Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=512)]
Blob = Annotated[bytes, Meta(max_length=2048)]
"""A signed record or a signed gossip item, opaque until its own signature is checked."""


class Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of all messages.

    Class variables: `limit`, the largest encoded body in bytes; `payload`, the largest raw payload that may follow it;
    `signed`, whether the frame carries an Ed25519 signature (all control messages do; bulk is sealed by its stream).
    """

    limit: ClassVar[int] = 1024
    payload: ClassVar[int] = 0
    signed: ClassVar[bool] = True


# --- gate: the only messages a stranger may send or receive


class Hello(Message, frozen=True):
    """A stranger asks to be admitted. `record` is its signed PeerRecord, `token` an admission token or empty."""

    limit: ClassVar[int] = 4096
    signed: ClassVar[bool] = False

    version: U16
    run_id: Digest
    record: Blob
    token: Blob = b""


class Welcome(Message, frozen=True):
    """Admission: the manifest (TOML bytes, author's public key, signature), some records, and where to connect next.

    `endpoint` is a member socket opened for this peer alone; `secret` keys the bulk streams between the two.
    """

    limit: ClassVar[int] = 60_000
    signed: ClassVar[bool] = False

    record: Blob
    manifest: Annotated[bytes, Meta(max_length=32_768)]
    author: Digest
    manifest_signature: Signature
    records: Annotated[tuple[Blob, ...], Meta(max_length=10)]
    endpoint: Reason
    bulk: Reason
    secret: Digest


class Refuse(Message, frozen=True):
    """Refusal at the gate. `code` is one of: version, run, signature, token, banned, full, busy."""

    signed: ClassVar[bool] = False

    code: Reason
    detail: Text


# --- membership (SWIM + Lifeguard): `items` are signed gossip items, each checked by its own signature

Items = Annotated[tuple[Blob, ...], Meta(max_length=8)]


class Ping(Message, frozen=True):
    """Probe. `sequence` comes back in the Ack; `progress` is the sender's round, so that liveness means work done."""

    limit: ClassVar[int] = 1500

    sequence: U32
    progress: U32
    items: Items


class PingRequest(Message, frozen=True):
    """Ask the receiver to probe `target` for the sender and to answer with Ack or, at 0.8 of the time-out, Nack."""

    limit: ClassVar[int] = 1500

    sequence: U32
    target: Id
    items: Items


class Ack(Message, frozen=True):
    """Answer to the Ping or PingRequest `sequence`."""

    limit: ClassVar[int] = 1500

    sequence: U32
    progress: U32
    items: Items


class Nack(Message, frozen=True):
    """The indirect probe `sequence` has no answer so far; the prober itself is alive."""

    sequence: U32


class Gossip(Message, frozen=True):
    """Items that are spread without a probe."""

    limit: ClassVar[int] = 1500

    items: Items


class PushPull(Message, frozen=True):
    """Anti-entropy: signed items of the whole table, in pages; the receiver answers once with `reply` set."""

    limit: ClassVar[int] = 60_000

    reply: bool
    items: Annotated[tuple[Blob, ...], Meta(max_length=32)]


# --- rounds: agreement on one outer step of one fragment (see collectives/agreement.py)


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


class Ready(Message, frozen=True):
    """A contributor announces its pseudo-gradient before it sends it (commit, then send).

    `attempt` counts its announcements for this round; `base` is its state digest after the round before; `plan` is the
    digest of layout, codec, chunk grid and aggregation; `hashes` is the concatenated blake3 of each encoded chunk.
    `loss` and `speed` (tokens per second) are for display only. `weight` 0 means: takes part, contributes nothing.
    `witness` False means: this process restarted and will not vote in this round, count it as gone.
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


class Open(Message, frozen=True):
    """The leader fixes who takes part. Results are a pure function of `contributors` and what they announced.

    `group` (sorted) fixes the primary owners of chunks for the round; `alive` (sorted, a subset) are those that still take
    part; chunks of the others fall to their backups. When an earlier ballot has been voted for, its contributors must be
    kept: `adopted` is then the digest of their results and `sources` are peers known to hold every one of them. `idle`
    (sorted, some of `alive` but not all) own no chunks: what they say of others, or others of them, cannot be settled.
    """

    limit: ClassVar[int] = 48_000

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


class Prepare(Message, frozen=True):
    """A candidate with a higher ballot asks what has been voted so far."""

    round: U32
    fragment: U16
    ballot: Ballot


class Promise(Message, frozen=True):
    """Answer to Prepare: no lower ballot will get this peer's vote. Carries its last vote with the Open voted for, if any."""

    limit: ClassVar[int] = 50_000

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

    limit: ClassVar[int] = 62_000

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


# --- bulk: sealed by the stream they travel on, not signed


class Chunk(Message, frozen=True):
    """One encoded chunk of a contribution, from its contributor to the chunk's owner."""

    limit: ClassVar[int] = 128
    payload: ClassVar[int] = CHUNK_BYTES + CHUNK_BYTES // 16
    signed: ClassVar[bool] = False

    round: U32
    fragment: U16
    attempt: U32
    index: U16


class Result(Message, frozen=True):
    """One encoded chunk of the aggregate, from its owner (or, in a repair, from anyone who has it)."""

    limit: ClassVar[int] = 128
    payload: ClassVar[int] = CHUNK_BYTES + CHUNK_BYTES // 16
    signed: ClassVar[bool] = False

    round: U32
    fragment: U16
    ballot: Ballot
    index: U16


class Fetch(Message, frozen=True):
    """Ask a peer for results of a round that it has voted for or committed."""

    limit: ClassVar[int] = 4096

    round: U32
    fragment: U16
    digest: Digest
    indices: Annotated[tuple[U16, ...], Meta(max_length=MAX_CHUNKS)]


# --- state: how a joiner or a straggler gets the state of the last committed round


class StateAsk(Message, frozen=True):
    """Ask for an offer of the state after the last committed round."""


class StateOffer(Message, frozen=True):
    """What the sender can serve. The payload is the concatenated blake3 of every chunk of CHUNK_BYTES.

    `members` are the participants of that round (the next quorum's base). `digest`, the state digest, is blake3 over
    round, layout, members and the chunk hashes, so that one agreed digest vouches for all of it.
    """

    limit: ClassVar[int] = 10_000
    payload: ClassVar[int] = CHUNK_BYTES
    signed: ClassVar[bool] = True

    round: U32
    digest: Digest
    layout: Digest
    nbytes: U53
    members: Annotated[tuple[Id, ...], Meta(max_length=MAX_GROUP)]


class StateFetch(Message, frozen=True):
    """Ask for one chunk of the state after `round`."""

    round: U32
    index: U32


class StateChunk(Message, frozen=True):
    """One chunk of the state after `round`; an empty payload says that it is no longer served."""

    limit: ClassVar[int] = 128
    payload: ClassVar[int] = CHUNK_BYTES
    signed: ClassVar[bool] = False

    round: U32
    index: U32


TYPES: dict[int, type[Message]] = dict(
    enumerate(
        [
            Hello,
            Welcome,
            Refuse,
            Ping,
            PingRequest,
            Ack,
            Nack,
            Gossip,
            PushPull,
            Ready,
            Open,
            Prepare,
            Promise,
            Blame,
            Record,
            Vote,
            Commit,
            Behind,
            Chunk,
            Result,
            Fetch,
            StateAsk,
            StateOffer,
            StateFetch,
            StateChunk,
            Ask,
        ],
        start=1,
    )
)
"""Type number on the wire -> message type. Numbers are never reused."""

NUMBERS: dict[type[Message], int] = {kind: number for number, kind in TYPES.items()}
