"""Lineages: histories of one run that peers continue without a quorum of its members.

The founder of a run founds its first lineage. If no quorum can be reached for a while, the peers that see each other found
another one: each signs the same statement (`Found`), and gives up its vote in the parent lineage. When two lineages meet,
one prevails, and the peers of the other take over its state. The order of two forks follows from their content, so it does
not change while lineages continue. Chains prove how far a lineage has continued (collectives/consensus/chain.py):

- A lineage that has continued with a quorum prevails over those that were founded from its earlier rounds.
- A lineage that has not continued gives way to those that were founded from it: they contain it.
- Of two lineages with the same parent, the one that contains more of it prevails, then the one with more of its members
  among the founders, then the one with the most senior of these. No peer can forge that by making more keys. If they are
  alike in all of this, the one with more founders prevails, then one that other peers have joined, then the one with the
  older lives. So a lineage prevails over the one that a peer founds again alone because it has lost its folder or its last
  rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise, takewhile

import blake3
import msgspec
from thinwire.swarm.messages.registry import LIFE, Chain, ChainEntry, Fork, Found, Message, PeerId

Verify = Callable[[PeerId, Message, bytes], bool]
"""Checks the signature of a peer under a message."""


Admits = Callable[[PeerId, bytes], bool]
"""Returns True if the run admits a peer with this admission token, see `PeerStanding.is_admitted`."""


@lru_cache(maxsize=1024)
def name_of_fork(fork: Fork) -> bytes:
    """Return the name of the lineage that begins with this fork, LIFE bytes."""
    return blake3.blake3(msgspec.msgpack.encode((fork.round, fork.base, fork.members, fork.lives))).digest(LIFE)


def lineage_of(chain: Chain) -> bytes:
    """Return the name of the lineage that a chain ends with; empty for a peer without a state."""
    return name_of_fork(chain[-1].fork) if chain else b""


def founders_of(fork: Fork) -> list[tuple[PeerId, bytes]]:
    """Return the founders of a lineage and their lives."""
    return [(peer, fork.lives[LIFE * at : LIFE * (at + 1)]) for at, peer in enumerate(fork.members)]


def new_founders(fork: Fork) -> list[PeerId]:
    """Return the founders of a lineage that are not members of its parent."""
    return [peer for peer in fork.members if peer not in fork.before]


def newest_round(entry: ChainEntry) -> int:
    """Return the newest round of a lineage that a chain proves."""
    return entry.certificates[-1].commit.proposal.round if entry.certificates else entry.fork.round


def later(chain: Chain, other: Chain) -> bool:
    """Return True if two chains prove rounds of one lineage, and `chain` proves a later one."""
    same = bool(chain) and lineage_of(chain) == lineage_of(other)
    return same and newest_round(chain[-1]) > newest_round(other[-1])


def descends(chain: Chain, lineage: bytes) -> bool:
    """Return True if the lineage of `chain` was founded in `lineage`, directly or not."""
    return lineage in {name_of_fork(entry.fork) for entry in chain[:-1]}


def contains(chain: Chain, lineage: bytes, round: int) -> bool:
    """Return True if `round` of `lineage` is in the history that `chain` proves, or will be.

    Rounds of a parent lineage after the fork are not.
    """
    forks = [entry.fork for entry in chain]
    ends = {name_of_fork(one): next.round for one, next in pairwise(forks)}
    return lineage == lineage_of(chain) or (lineage in ends and round <= ends[lineage])


def founded_by(chain: Chain, parent: bytes, peer: PeerId, life: bytes) -> bool:
    """Return True if this life of a peer has founded a lineage in `parent` that is part of `chain`.

    It then has no vote in `parent` any more.
    """
    pairs = pairwise(chain)
    return any(name_of_fork(one.fork) == parent and (peer, life) in founders_of(next.fork) for one, next in pairs)


def shared(one: Chain, other: Chain) -> int:
    """Return the number of first lineages that two chains have in common."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: name_of_fork(pair[0].fork) == name_of_fork(pair[1].fork), pairs))


def prevails(chain: Chain, over: Chain) -> bool:
    """Return True if the lineage of `chain` differs from that of `over` and prevails over it."""
    common = shared(chain, over)
    if not chain or len(chain) == len(over) == common:
        return False
    if len(chain) == common:  # `over` was founded in it
        return newest_round(chain[-1]) > over[common].fork.round
    if len(over) == common:
        return not common or newest_round(over[-1]) <= chain[common].fork.round
    return _rank(chain[common]) > _rank(over[common])


def _rank(entry: ChainEntry) -> tuple[int, int, int, int, bool, int, bytes]:
    fork, joined = entry.fork, set[PeerId]()
    for one in entry.certificates:
        joined.update(one.members, one.commit.proposal.members)
    known = [place for place, peer in enumerate(fork.before) if peer in fork.members]  # by seniority
    senior, others = -min(known, default=0), not joined.issubset(fork.members)
    # Lives begin with the time at which they were drawn, see members/vote_store.py.
    return (
        fork.round,
        len(known),
        senior,
        len(fork.members),
        others,
        -int.from_bytes(fork.lives, "big"),
        name_of_fork(fork),
    )


def by_strangers(parent: ChainEntry, child: ChainEntry) -> bool:
    """Return True if no founder of `child` is a member of its parent, which has committed a round.

    Such founders can only have the state that the parent lineage published, so they must not take over its members or its
    newcomers. Strangers also recover a lost pipeline stage, but with a later round than the last one of its lineage.
    """
    fork = child.fork
    return 0 < fork.round == newest_round(parent) and set(fork.members).isdisjoint(fork.before)


def proved(fork: Fork, fragment: int, verify: Verify, admits: Admits) -> bool:
    """Return True if all founders of a lineage have signed its fork, and the run admits each of them.

    The members of the parent lineage were admitted before.
    """
    count, new = len(fork.members), new_founders(fork)
    return (
        list(fork.members) == sorted(set(fork.members))
        and len(fork.lives) == LIFE * count
        and len(fork.signatures) == count
        and len(fork.tokens) == len(new)
        and all(map(admits, new, fork.tokens))
        and all(
            verify(peer, Found(fork.round, fragment, fork.base, fork.members, life), signature)
            for (peer, life), signature in zip(founders_of(fork), fork.signatures, strict=True)
        )
    )
