"""Messages about lineages: how they begin, and what proves their rounds and members.

The rules are in swarm/lineage.py and collectives/consensus/chain.py.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta
from thinwire.swarm.messages.agreement import Commit, Keys, Vote
from thinwire.swarm.messages.announcement import Announced
from thinwire.swarm.messages.base import LIFE, MAX_GROUP, U16, U32, Digest, Id, Message, Signature
from thinwire.swarm.messages.proposal import Lineage, Token

CHAIN_BYTES = 4 << 20
"""Maximum number of bytes of an encoded chain in a message."""

MAX_CHAIN_ENTRIES = 256
"""Maximum number of lineages in a chain that other peers believe."""


class Fork(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Beginning of a lineage: peers that continue a run without a quorum of its members, or its founder.

    round: last round of the parent lineage that the lineage contains. base: digest of the state after it, which covers the
    parent lineage and `before`, its members (not signed). members (sorted), lives: founders of the lineage, and LIFE bytes
    for each. signatures: of each founder's Found with these values. keys: public keys of the founders. tokens: admission tokens
    of the founders that are not in `before`, in their order.
    The first lineage of a run has round 0, no members before it, and the founder of the run.
    """

    round: U32
    base: Digest
    before: Annotated[tuple[Id, ...], Meta(max_length=MAX_GROUP)]
    members: Annotated[tuple[Id, ...], Meta(min_length=1, max_length=MAX_GROUP)]
    lives: Annotated[bytes, Meta(max_length=LIFE * MAX_GROUP)]
    signatures: Annotated[tuple[Signature, ...], Meta(max_length=MAX_GROUP)]
    keys: Keys = ()
    tokens: Annotated[tuple[Token, ...], Meta(max_length=MAX_GROUP)] = ()


class Found(Message, frozen=True):
    """Statement of one founder of a lineage: it continues after `round` with exactly these `members`.

    From now on it votes in no round of the parent lineage after `round`. base, members: see Fork. life: the sender's.
    """

    limit: ClassVar[int] = 9_000

    round: U32
    fragment: U16
    base: Digest
    members: Annotated[tuple[Id, ...], Meta(min_length=1, max_length=MAX_GROUP)]
    life: Annotated[bytes, Meta(max_length=LIFE)]


class Evidence(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Two signed statements of which an honest peer signs at most one, see swarm/evidence.py.

    key: public key of the peer.
    """

    key: Id
    first: Vote | Announced
    second: Vote | Announced
    signatures: tuple[Signature, Signature]


class Certificate(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Commit, and the members of its round with keys that prove it to a peer that knows none of them.

    members (by seniority), lives: electorate of the round, which `Proposal.electorate` names. keys: of the voters and of the
    members that left with a farewell.
    """

    members: Annotated[tuple[Id, ...], Meta(max_length=MAX_GROUP)]
    lives: Annotated[bytes, Meta(max_length=LIFE * MAX_GROUP)]
    commit: Commit
    keys: Keys


class ChainEntry(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One lineage in a chain: its beginning, and certificates that prove its members.

    The last certificate is that of the lineage's newest round.
    """

    fork: Fork
    certificates: tuple[Certificate, ...] = ()


Chain = tuple[ChainEntry, ...]
"""Proof of the members of a run; the first lineage comes first. See collectives/consensus/chain.py."""


class Head(Message, frozen=True):
    """Lineage and newest committed round of the sender. The payload is its encoded chain, or empty.

    A peer answers with its chain if it has a newer one, or one of a lineage that prevails; to a Head without a chain also
    if it has another lineage.
    """

    payload: ClassVar[int] = CHAIN_BYTES

    round: U32
    fragment: U16
    lineage: Lineage
