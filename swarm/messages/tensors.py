"""Messages that carry or request tensors: contributions and results of rounds, and state."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta
from thinwire.swarm.messages.base import CHUNK_BYTES, LIFE, MAX_CHUNKS, MAX_GROUP, U16, U32, U53, Digest, Id, Message
from thinwire.swarm.messages.lineage import CHAIN_BYTES
from thinwire.swarm.messages.proposal import Ballot, Lineage

# --- bulk data: authenticated by its stream, not signed


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
    """One encoded chunk of the aggregate, from its owner (or, in a repair, from any peer that has it).

    `lineage`: that of the round, see Fork. One ballot may exist in several lineages.
    """

    limit: ClassVar[int] = 128
    payload: ClassVar[int] = CHUNK_BYTES + CHUNK_BYTES // 16
    signed: ClassVar[bool] = False

    round: U32
    fragment: U16
    ballot: Ballot
    index: U16
    lineage: Lineage = b""


class Partial(Message, frozen=True):
    """One encoded chunk of the partial sum of a ring, from a peer to its successor in the ring.

    `lineage`: see Result.
    """

    limit: ClassVar[int] = 128
    payload: ClassVar[int] = CHUNK_BYTES + CHUNK_BYTES // 16
    signed: ClassVar[bool] = False

    round: U32
    fragment: U16
    ballot: Ballot
    index: U16
    lineage: Lineage = b""


class Subtotal(Message, frozen=True):
    """One encoded chunk of the mean of a group's contributions, from the group's relay to the owner.

    `name`: blake3 of the contributions; it identifies the mean independently of the ballot.
    """

    limit: ClassVar[int] = 128
    payload: ClassVar[int] = CHUNK_BYTES + CHUNK_BYTES // 16
    signed: ClassVar[bool] = False

    round: U32
    fragment: U16
    name: Digest
    index: U16


class Fetch(Message, frozen=True):
    """Request for results of a round that the receiver has voted for, or for contributions.

    Without `indices`, it is a request for what a vote for the results needs: the claims of their owners (`ResultClaim`) and
    the announcements of the contributors (`ShownReady`).

    `digest` states what is requested:

    - the results of the round, committed or not: their digest;
    - the receiver's contribution, for a score: its name;
    - the contributions that prove the receiver's verdict, for an audit: their name (`name_of` in
      node/outer/verification/own_contributions.py).
    """

    limit: ClassVar[int] = 4096

    round: U32
    fragment: U16
    digest: Digest
    indices: Annotated[tuple[U16, ...], Meta(max_length=MAX_CHUNKS)]


# --- state: a joiner or a straggler fetches the state of the last committed round


class StateAsk(Message, frozen=True):
    """Request for an offer of the state of one fragment after its last committed round.

    `copy`: ask for a backup copy of the state, because all of its holders have departed.
    """

    fragment: U16 = 0
    copy: bool = False


class StateOffer(Message, frozen=True):
    """Offer of a state. The payload has the hashes of its chunks, then the encoded chain.

    A hash is the blake3 of a chunk of CHUNK_BYTES. `members` are the participants of that round, on which the next quorum
    is based, and `lives` theirs, as in Proposal. `digest`, the state digest, is blake3 over round, layout, members, lives,
    lineage and the chunk hashes, so that one agreed digest covers all of it. The chain proves round, members, lives and
    lineage. It is absent in methods without agreement, and in the offer of a peer that has no state. The sender also serves
    the results of `replay` rounds up to that round, which have `results` bytes.
    """

    limit: ClassVar[int] = 14_000
    payload: ClassVar[int] = CHUNK_BYTES + CHAIN_BYTES
    signed: ClassVar[bool] = True

    round: U32
    digest: Digest
    layout: Digest
    nbytes: U53
    members: Annotated[tuple[Id, ...], Meta(max_length=MAX_GROUP)]
    fragment: U16 = 0
    lives: Annotated[bytes, Meta(max_length=LIFE * MAX_GROUP)] = b""
    lineage: Lineage = b""
    replay: U32 = 0
    results: U53 = 0


class StateFetch(Message, frozen=True):
    """Request for one chunk of the state after `round`."""

    round: U32
    index: U32
    fragment: U16 = 0


class StateChunk(Message, frozen=True):
    """One chunk of the state after `round`. An empty payload means that it is no longer served."""

    limit: ClassVar[int] = 128
    payload: ClassVar[int] = CHUNK_BYTES
    signed: ClassVar[bool] = False

    round: U32
    index: U32
    fragment: U16 = 0
