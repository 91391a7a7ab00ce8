"""Chain: proof of the members of a run, for a peer that knows no more than the run's founder.

A chain has the lineages of a run, each founded in the one before, and for each the certificates of the rounds that
changed its members. The last certificate of a lineage is its newest round. A certificate names its electorate, which the
votes cover (`Proposal.electorate`). It proves its round, and the members that its round decided, if

- a quorum of this electorate has voted for it, and
- the electorate is known from the chain so far, or more than half of the members known so far, in the same lives, have
  voted, too: none of them votes in a round whose electorate it does not know.

The second rule is the skipping verification of Tendermint's light client (Braithwaite and others, arXiv 2010.07031) for
peers that crash but do not lie. It keeps chains short: a certificate that follows from an earlier point of the chain
replaces all between (`extended`). So the chain of a run whose founder stays is one fork and one certificate, however often
other peers join and leave.

Peer ids are hashes of public keys, so the keys that signatures need are part of the chain and prove themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass

import msgspec
from thinwire.collectives.consensus.certificates import voters
from thinwire.collectives.consensus.members.lives import electorate_digest, lives_of, next_members
from thinwire.swarm.lineage import Admits, Verify, founders_of, name_of_fork, proved
from thinwire.swarm.messages import wire_form
from thinwire.swarm.messages.registry import (
    LIFE,
    MAX_CHAIN_ENTRIES,
    Certificate,
    Chain,
    ChainEntry,
    Fork,
    PeerId,
)

SCANNED, OPENED = 1 << 16, 64
"""Bytes of a chain that are scanned, and ids that are opened, in the time of one check of a signature."""

GRANTS = 2
"""Signatures of a usual admission token."""

WithKeys = Callable[[tuple[bytes, ...]], Verify]
"""Returns a function that checks signatures, also of the owners of these public keys."""

Trusted = Callable[[Fork], bool]
"""Returns True for the first fork of a run that this peer may take part in."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """Members after a committed round, as a chain proves them.

    lineage: its name. members: by seniority; they vote in the next round. lives: by member.
    """

    lineage: bytes
    round: int
    members: tuple[PeerId, ...]
    lives: Mapping[PeerId, bytes]


Proving = Generator[int, None, Configuration | None]
"""Check of a chain in parts.

It yields the number of signatures of each part before it checks them, and returns what the chain proves.
"""

Check = Callable[[Chain, int, Trusted], Proving]
"""`checked` for one run."""


def founded(chain: Chain, fork: Fork) -> Chain:
    """Return the chain of a lineage that was founded in the lineage of `chain`."""
    return (*chain, ChainEntry(fork))


def extended(chain: Chain, certificate: Certificate) -> Chain:
    """Return the chain with a newer round of its lineage, without the certificates that it replaces.

    The new certificate is not checked: this peer checked its votes when the round committed.
    """
    entry = chain[-1]
    agreed = {proof.peer for proof in certificate.commit.votes}
    at, here = 0, _start(entry.fork)
    while at < len(entry.certificates) and not _follows(certificate, here, agreed):
        here = _after(entry.certificates[at], here.lineage)
        at += 1
    if not _follows(certificate, here, agreed):
        return chain  # A certificate before it is missing here; a later one may follow again.
    return (*chain[:-1], ChainEntry(entry.fork, (*entry.certificates[:at], certificate)))


def encode(chain: Chain) -> bytes:
    """Return the encoded chain; empty for an empty one."""
    return wire_form.encode(chain) if chain else b""


def decode(data: bytes | bytearray | memoryview) -> Chain:
    """Return an encoded chain, which is not checked. Raises ValueError if it has another form."""
    parts = decoded(bytes(data))
    while True:
        try:
            next(parts)
        except StopIteration as end:
            chain: Chain | None = end.value
            break
    if chain is None:
        raise ValueError("not a chain")
    return chain


def decoded(data: bytes) -> Generator[float, None, Chain | None]:
    """Decode a chain in parts; yields their costs. Returns None if the data has another form."""
    if not data:
        return ()
    yield len(data) / SCANNED
    entries = []
    try:
        for entry in wire_form.decode_packed(Chain, data):
            certificates = []
            for certificate in entry.certificates:
                yield 1 + len(certificate.members) / OPENED
                certificates.append(wire_form.unpack(certificate))
            entries.append(ChainEntry(entry.fork, tuple(certificates)))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return tuple(entries)


def checked(
    chain: Chain,
    fragment: int,
    trusted: Trusted,
    *,
    fraction: float,
    verifier: WithKeys,
    admits: Admits,
    gaps: bool = False,
) -> Proving:
    """Check a chain part by part; return what it proves. The whole takes seconds if the chain is long.

    fraction: see RoundTerms. gaps: a lineage may begin at a later round than the newest one before it, and without its members,
    as that of a recovered pipeline stage does.
    """
    here: Configuration | None = None
    for entry in chain if len(chain) <= MAX_CHAIN_ENTRIES else ():
        fork = entry.fork
        if here is None:
            if fork.before or not trusted(fork):
                return None
        elif fork.before != here.members or fork.round < here.round:
            return None
        if not gaps and fork.round != (0 if here is None else here.round):
            return None
        yield len(fork.signatures) + GRANTS * len(fork.tokens)
        if not proved(fork, fragment, verifier(fork.keys), admits):
            return None
        here = _start(fork)
        for certificate in entry.certificates:
            yield len(certificate.commit.votes)
            if not _proves(certificate, here, fragment, fraction, verifier(certificate.keys)):
                return None
            here = _after(certificate, here.lineage)
    return here


def end_of(chain: Chain) -> Configuration:
    """Return the members after the last round of a chain that is known to be valid, and not empty."""
    entry = chain[-1]
    start = _start(entry.fork)
    return _after(entry.certificates[-1], start.lineage) if entry.certificates else start


def _start(fork: Fork) -> Configuration:
    lives = {peer: life for peer, life in founders_of(fork) if life}
    return Configuration(name_of_fork(fork), fork.round, fork.members, lives)


def _after(certificate: Certificate, lineage: bytes) -> Configuration:
    proposal = certificate.commit.proposal
    members, lives = next_members(proposal.members, proposal.lives, certificate.members)
    return Configuration(lineage, proposal.round, members, lives_of(members, lives))


def _follows(certificate: Certificate, here: Configuration, agreed: Collection[PeerId]) -> bool:
    """Return True if the members known so far confirm the electorate of a later round. agreed: its voters."""
    lives = lives_of(certificate.members, certificate.lives)
    if (certificate.members, lives) == (here.members, dict(here.lives)):
        return True
    same = [peer for peer in here.members if peer in agreed and lives.get(peer) == here.lives.get(peer)]
    return 2 * len(same) > len(here.members)


def _proves(certificate: Certificate, here: Configuration, fragment: int, fraction: float, verify: Verify) -> bool:
    proposal, members = certificate.commit.proposal, certificate.members
    if (proposal.lineage, proposal.fragment) != (here.lineage, fragment) or proposal.round <= here.round:
        return False
    if len(set(members)) != len(members) or len(certificate.lives) != LIFE * len(members):
        return False
    if proposal.electorate != electorate_digest(members, certificate.lives):
        return False
    if list(proposal.members) != sorted(set(proposal.members)) or len(proposal.lives) not in (
        0,
        LIFE * len(proposal.members),
    ):
        return False
    agreed = voters(certificate.commit, members, fraction, verify)
    return bool(agreed) and _follows(certificate, here, agreed)
