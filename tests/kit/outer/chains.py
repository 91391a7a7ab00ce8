"""Certificates and chains of made-up rounds, with signatures that are hashes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import blake3
import msgspec
from thinwire.collectives.consensus.proposal import electorate_digest, vote_for
from thinwire.swarm.messages.registry import (
    Ballot,
    Certificate,
    Commit,
    Contribution,
    Fork,
    Found,
    Message,
    PeerId,
    Proof,
    Proposal,
)

RESULTS = b"o" * 32
"""Digest of the results of all rounds here."""

Lives = Mapping[PeerId, bytes]


def sign(peer: PeerId, message: Message) -> bytes:
    """Return 64 bytes that serve as the peer's signature of the message."""
    return blake3.blake3(peer + type(message).__name__.encode() + msgspec.msgpack.encode(message)).digest(64)


def verify(peer: PeerId, message: Message, signature: bytes) -> bool:
    """Return True for a signature made by `sign`."""
    return signature == sign(peer, message)


def certificate(
    round: int,
    lineage: bytes,
    before: Lives,
    voters: Iterable[PeerId],
    after: Lives,
    *,
    signer: PeerId | None = None,
) -> Certificate:
    """Return the certificate of a round. before, after: members with their lives, by seniority. signer: signs all votes."""
    members, electorate, voters = tuple(before), b"".join(before.values()), tuple(sorted(voters))
    ids = tuple(sorted(after))
    alive = tuple(sorted({*ids, *voters}))
    proposal = Proposal(
        round,
        0,
        Ballot(1, voters[0]),
        alive,
        alive,
        (Contribution(voters[0], 1, 1),),
        (),
        None,
        (),
        kept=ids,
        lives=b"".join(after[peer] for peer in ids),
        lineage=lineage,
        electorate=electorate_digest(members, electorate),
    )
    vote = vote_for(proposal, RESULTS)
    proofs = tuple(Proof(peer, sign(signer or peer, vote)) for peer in voters)
    return Certificate(members, electorate, Commit(proposal, RESULTS, proofs), ())


def fork_of(round: int, base: bytes, before: Sequence[PeerId], founders: Lives) -> Fork:
    """Return the fork of a lineage, signed by all its founders."""
    members = tuple(sorted(founders))
    signatures = tuple(sign(peer, Found(round, 0, base, members, founders[peer])) for peer in members)
    return Fork(round, base, tuple(before), members, b"".join(founders[peer] for peer in members), signatures)
