"""Certificates and chains of made-up rounds, with signatures that are hashes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import blake3
import msgspec
from thinwire.collectives.blocking_work import JobPart
from thinwire.collectives.consensus.chain import Check, Configuration, Trusted, checked, encode
from thinwire.collectives.consensus.members.lives import electorate_digest
from thinwire.collectives.consensus.proposal import vote_for
from thinwire.collectives.state_sync.offer_search import Accept
from thinwire.collectives.state_sync.state_offers import Offered, ReceivedChain, ReceivedChains, unchecked, vouched
from thinwire.swarm.frame import Frame
from thinwire.swarm.lineage import new_founders
from thinwire.swarm.messages.registry import (
    Ballot,
    Certificate,
    Chain,
    Commit,
    Contribution,
    Fork,
    Found,
    Message,
    PeerId,
    Proof,
    Proposal,
    StateOffer,
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
    lives = b"".join(founders[peer] for peer in members)
    return with_tokens(Fork(round, base, tuple(before), members, lives, signatures))


def with_tokens(fork: Fork) -> Fork:
    """Return a fork with the admission tokens of its new founders, see `admits`."""
    return msgspec.structs.replace(fork, tokens=tuple(new_founders(fork)))


def admits(peer: PeerId, token: bytes) -> bool:
    """Admit a peer whose token is its id."""
    return token == peer


Result = TypeVar("Result")


def result_of(parts: Generator[object, None, Result]) -> Result:
    """Run a check in parts to its end; return its result."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return cast(Result, end.value)


def proven(chain: Chain, fragment: int, trusted: Trusted, **terms: Any) -> Configuration | None:
    """Return what a chain proves, see `checked`."""
    return result_of(checked(chain, fragment, trusted, admits=admits, **terms))


def proved_by(chains: ReceivedChains, chain: Chain, trusted: Trusted = lambda fork: True) -> Configuration | None:
    """Return what a chain proves that has come from another peer."""
    received = chains.find(encode(chain), 0)
    result_of(received.decode())
    return result_of(received.prove(trusted))


def accepting(accepts: Callable[[StateOffer, Chain], bool]) -> Accept:
    """Return a check of offers that has one part."""

    def parts(offered: Offered) -> Generator[JobPart, None, bool]:
        yield SimpleNamespace(cost=1.0)
        return accepts(offered.offer, offered.chain)

    return parts


def opened(frame: Frame) -> Offered | Frame:
    """Return an offer as StateFetcher passes it on; other frames, and invalid offers, as they are."""
    if not isinstance(frame.message, StateOffer):
        return frame
    return vouched(frame.message, frame.payload, ReceivedChains(unchecked)) or frame


def offered(offer: StateOffer, chain: Chain, fragment: int = 0, *, check: Check = unchecked) -> Offered:
    """Return an offer with this chain, which `check` checks."""
    received = ReceivedChain(encode(chain), fragment, check, lambda: None)
    result_of(received.decode())
    return Offered(offer, (), chain, received)
