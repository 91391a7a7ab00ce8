"""Offers of states: their check, and the choice of the best one (see `state_sync`).

Many peers send the same chain, with an offer or alone. It is decoded and checked only once.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import blake3
from thinwire.collectives.blocking_work import JobPart, SharedWork, finish
from thinwire.collectives.consensus.chain import Check, Configuration, Proving, Trusted, decoded
from thinwire.collectives.consensus.members.lives import lives_of
from thinwire.compression.core.types import Buffer
from thinwire.swarm.lineage import by_strangers, lineage_of, name_of_fork, prevails
from thinwire.swarm.messages.lineage import CHAIN_BYTES
from thinwire.swarm.messages.registry import CHUNK_BYTES, LIFE, Chain, Digest, PeerId, StateOffer

PROVED, UNPROVED = 4 * CHAIN_BYTES, CHAIN_BYTES
"""Most bytes of encoded chains that a peer remembers: of those that are proved, and of others.

Decoded they take up to seven times as much. A run of many fragments has a chain for each.
"""

OVERHEAD = 1024
"""Bytes that a chain takes besides, so that many small ones are bounded, too."""


def unchecked(chain: Chain, fragment: int, trusted: Trusted) -> Proving:
    """Return None for each chain: the check of runs without chains."""
    yield from ()
    return None


class ReceivedChain:
    """A chain that other peers have sent.

    It is decoded and checked once, in parts, for all peers that have sent the same bytes. `useless` is called if the bytes are
    no chain, or the check has found an error.
    """

    def __init__(self, data: bytes, fragment: int, check: Check, useless: Callable[[], object]) -> None:
        self._fragment, self._check, self._useless = fragment, check, useless
        self._decoding = SharedWork(decoded(data))
        self._proving: SharedWork[Configuration | None] | None = None

    @property
    def proved(self) -> bool:
        """True if the check has ended without an error."""
        return self._proving is not None and self._proving.done and self._proving.result is not None

    def decode(self) -> Generator[JobPart, None, Chain | None]:
        """Return the chain, or None if the bytes have another form."""
        chain = yield from self._decoding.parts()
        if chain is None:
            self._useless()
        return chain

    def prove(self, trusted: Trusted) -> Generator[JobPart, None, Configuration | None]:
        """Return what the chain proves if its beginning is trusted; only after `decode`."""
        chain = self._decoding.result
        if not chain or not trusted(chain[0].fork):
            return None
        if self._proving is None:
            self._proving = SharedWork(self._check(chain, self._fragment, lambda fork: True))
        proves = yield from self._proving.parts()
        if proves is None:
            self._useless()
        return proves


class ChainMemory:
    """Chains that a peer has received, the latest ones, for all its fragments.

    A chain with an error is forgotten: its check may lack a key that this peer learns later.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, bytes], tuple[ReceivedChain, int]] = OrderedDict()

    @property
    def held(self) -> int:
        """Bytes of the encoded chains, and OVERHEAD for each."""
        return sum(size for _, size in self._known.values())

    def find(self, data: bytes, fragment: int, check: Check) -> ReceivedChain:
        """Return the chain with this encoding, a known one if there is one."""
        key = fragment, blake3.blake3(data).digest()
        found = self._known.pop(key, None) or (
            ReceivedChain(data, fragment, check, lambda: self._known.pop(key, None)),
            len(data) + OVERHEAD,
        )
        self._known[key] = found
        for proved, most in ((True, PROVED), (False, UNPROVED)):
            ours = [key for key, (chain, _) in self._known.items() if chain.proved == proved]
            while sum(self._known[key][1] for key in ours) > most:
                del self._known[ours.pop(0)]
        return found[0]


class ReceivedChains:
    """Chains that other peers have sent, checked by `check`. `memory`: that of the peer."""

    def __init__(self, check: Check, memory: ChainMemory | None = None) -> None:
        self._check, self._memory = check, memory or ChainMemory()

    def find(self, data: bytes, fragment: int) -> ReceivedChain:
        """Return the chain with this encoding."""
        return self._memory.find(data, fragment, self._check)


@dataclass(frozen=True, slots=True)
class Offered:
    """Offer of one peer with the content of its payload."""

    offer: StateOffer
    hashes: tuple[Digest, ...]
    chain: Chain
    received: ReceivedChain
    """The same chain, with its check."""


Offers = dict[PeerId, Offered]


@dataclass(frozen=True, slots=True)
class Replay:
    """Last rounds up to `round` whose results lead to its state: `rounds` of them, with about `nbytes`."""

    round: int
    rounds: int
    nbytes: int
    sources: tuple[PeerId, ...]


def state_digest(
    round: int,
    layout: Digest,
    members: Sequence[PeerId],
    hashes: Sequence[Digest],
    lives: bytes = b"",
    lineage: bytes = b"",
) -> Digest:
    """Return blake3 over round, layout, members, their lives, the lineage and the chunk hashes."""
    hasher = blake3.blake3(b"thinwire/state/3\0" + round.to_bytes(8, "big") + layout)
    hasher.update(len(members).to_bytes(8, "big") + b"".join(members))
    hasher.update(len(lives).to_bytes(8, "big") + lives)
    hasher.update(len(lineage).to_bytes(8, "big") + lineage)
    hasher.update(b"".join(hashes))
    return hasher.digest()


def vouched(offer: StateOffer, payload: Buffer, chains: ReceivedChains) -> Offered | None:
    """Return an offer with the content of its payload, or None if that does not match its digest.

    Also None if the offer has no members: then it is not the result of a round, but the state of a peer that looks for
    a state itself. The chain is not checked.
    """
    raw, count = bytes(payload), 32 * ((offer.nbytes + CHUNK_BYTES - 1) // CHUNK_BYTES)
    if len(offer.lives) not in (0, LIFE * len(offer.members)) or not offer.members or len(raw) < count:
        return None
    hashes = tuple(raw[at : at + 32] for at in range(0, count, 32))
    if state_digest(offer.round, offer.layout, offer.members, hashes, offer.lives, offer.lineage) != offer.digest:
        return None
    received = chains.find(raw[count:], offer.fragment)
    chain = finish(received.decode())
    return None if chain is None else Offered(offer, hashes, chain, received)


def matches(offer: StateOffer, proven: Configuration | None) -> bool:
    """Return True if an offer has the state after the last round that its chain proves."""
    return proven is not None and (
        (offer.lineage, offer.round, offer.members, lives_of(offer.members, offer.lives))
        == (proven.lineage, proven.round, proven.members, dict(proven.lives))
    )


@dataclass(frozen=True, slots=True)
class LocalState:
    """State of this peer: digest of its layout, size in bytes, and hashes of its chunks."""

    layout: Digest
    nbytes: int
    hashes: Sequence[Digest]

    def has_model_of(self, offer: StateOffer) -> bool:
        """Return True if a peer offers a state of the same model."""
        return (offer.layout, offer.nbytes) == (self.layout, self.nbytes)


def best(offers: Offers, ours: LocalState, peers: Collection[PeerId]) -> tuple[tuple[PeerId, ...], bool]:
    """Return the peers, sorted, with the best offer, and True if it is sure.

    It is sure if more than half of its members among `peers` make it. Without a majority among different states after one
    round, no offer is the best. An offer of the model of `ours` is better than others. A peer without a chain cannot compare
    two beginnings of the run by different founders; then the founder that most peers name counts.
    """
    same = {peer: one for peer, one in offers.items() if ours.has_model_of(one.offer)}
    found = same or offers
    if not found:
        return (), False
    roots = Counter(one.chain[0].fork.members for one in found.values() if one.chain)
    root = max(roots, key=lambda members: (roots[members], members), default=None)
    chains = [one.chain for one in found.values() if one.chain and one.chain[0].fork.members == root]
    # Strangers can make a lineage of any round. It does not count while members of that round are here.
    held = {lineage_of(one.chain) for peer, one in found.items() if peer in one.offer.members}
    foremost: Chain = ()
    for chain in chains:
        taken = any(by_strangers(*pair) and name_of_fork(pair[0].fork) in held for pair in pairwise(chain))
        foremost = chain if not taken and prevails(chain, foremost) else foremost
    lineage = {peer: one for peer, one in found.items() if lineage_of(one.chain) == lineage_of(foremost)}
    last = max(one.offer.round for one in lineage.values())
    latest = {peer: one.offer for peer, one in lineage.items() if one.offer.round == last}
    count = Counter(offer.digest for offer in latest.values())
    known = Counter(offer.digest for peer, offer in latest.items() if peer in offer.members)
    votes = known or count
    digest = max(votes, key=lambda one: (votes[one], one))
    if 2 * votes[digest] <= votes.total():
        return (), False  # It is unknown which of them is right.
    chosen = tuple(sorted(peer for peer, offer in latest.items() if offer.digest == digest))
    asked = {*latest[chosen[0]].members}.intersection(peers)
    sure = 2 * known[digest] > len(asked) and not any(by_strangers(*pair) for pair in pairwise(foremost))
    return chosen, bool(same) and sure


def newest(offers: Offers, below: int, ours: LocalState) -> tuple[PeerId, ...]:
    """Return the peers, sorted, that have the newest copy of a state of this model before round `below`.

    Of two copies of the same round, the one that more peers have is taken.
    """
    found = {peer: one.offer for peer, one in offers.items()}
    copies = Counter(
        (offer.round, offer.digest) for offer in found.values() if offer.round < below and ours.has_model_of(offer)
    )
    if not copies:
        return ()
    _, digest = max(copies, key=lambda one: (one[0], copies[one], one[1]))
    return tuple(sorted(peer for peer, offer in found.items() if offer.digest == digest))


def replay_of(offers: Offers, offer: StateOffer, reached: int | None, ours: LocalState) -> Replay | None:
    """Return the rounds since `reached`, if peers with this offer serve them in fewer bytes."""
    if reached is None or not 0 < (rounds := offer.round - reached):
        return None
    same = {peer: one for peer, one in sorted(offers.items()) if one.offer.digest == offer.digest}
    theirs = next(iter(same.values())).hashes
    differ = sum(own != other for own, other in zip(ours.hashes, theirs, strict=False))
    costs = {p: one.offer.results * rounds // one.offer.replay for p, one in same.items() if one.offer.replay >= rounds}
    shorter = {peer: cost for peer, cost in costs.items() if cost < differ * CHUNK_BYTES}
    if 2 * len(shorter) < max(1, len(same)):
        return None  # A single claim may be a lie.
    return Replay(offer.round, rounds, max(shorter.values()), tuple(shorter)) if shorter else None
