"""Messages that carry tensors, or ask for them: contributions and results of rounds, and the state for who comes late."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from .ballots import Ballot
from .message import CHUNK_BYTES, MAX_CHUNKS, MAX_GROUP, U16, U32, U53, Digest, Id, Message

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


class Partial(Message, frozen=True):
    """One encoded chunk of what a ring has added up so far, from a peer to the next one of the ring."""

    limit: ClassVar[int] = 128
    payload: ClassVar[int] = CHUNK_BYTES + CHUNK_BYTES // 16
    signed: ClassVar[bool] = False

    round: U32
    fragment: U16
    ballot: Ballot
    index: U16


class Subtotal(Message, frozen=True):
    """One encoded chunk of the mean of a group's contributions, from the group's relay to the chunk's owner.

    `name`: blake3 of the contributions, so that it is known what it is of, whichever ballot it comes in.
    """

    limit: ClassVar[int] = 128
    payload: ClassVar[int] = CHUNK_BYTES + CHUNK_BYTES // 16
    signed: ClassVar[bool] = False

    round: U32
    fragment: U16
    name: Digest
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
    """Ask for an offer of the state of one fragment after its last committed round; of a `copy` of it, where all are gone who
    held it.
    """

    fragment: U16 = 0
    copy: bool = False


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
    fragment: U16 = 0


class StateFetch(Message, frozen=True):
    """Ask for one chunk of the state after `round`."""

    round: U32
    index: U32
    fragment: U16 = 0


class StateChunk(Message, frozen=True):
    """One chunk of the state after `round`; an empty payload says that it is no longer served."""

    limit: ClassVar[int] = 128
    payload: ClassVar[int] = CHUNK_BYTES
    signed: ClassVar[bool] = False

    round: U32
    index: U32
    fragment: U16 = 0
