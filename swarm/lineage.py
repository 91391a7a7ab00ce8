"""Lineages: histories of one run that peers continue without a quorum of its members.

A run begins with one lineage, whose name is empty. If no quorum can be reached for a while, the peers that see each other
found another one: each signs the same statement (`Found`), and gives up its vote in the parent lineage. When two lineages
meet, one prevails, and the peers of the other take over its state. The order of two forks follows from their content, so it
does not change while lineages continue. The signatures prove the founders. They do not prove the round, the base, and
`before`, which a liar can invent:

- A lineage that has continued with a quorum prevails over those that were founded from its earlier rounds.
- A lineage that has not continued gives way to those that were founded from it: they contain it.
- Of two lineages with the same parent, the one that contains more of it prevails, then the one with more of its members,
  then the one with more founders, then the one with the lower name.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

import blake3
import msgspec
from thinwire.swarm.messages.registry import LIFE, MAX_FORKS, Fork, Found, Message, PeerId

Verify = Callable[[PeerId, Message, bytes], bool]
"""Checks the signature of a peer under a message."""

MOST_NAMED = 2500
"""Maximum number of founders and members that the forks of a lineage name, so that they fit a message."""

Forks = tuple[Fork, ...]
"""Forks of a lineage, oldest first; empty for the first lineage of a run."""


def name_of_fork(fork: Fork) -> bytes:
    """Return the name of the lineage that begins with this fork, LIFE bytes."""
    return blake3.blake3(msgspec.msgpack.encode((fork.round, fork.base, fork.members, fork.lives))).digest(LIFE)


def lineage_of(forks: Forks) -> bytes:
    """Return the name of a lineage."""
    return name_of_fork(forks[-1]) if forks else b""


def forked(forks: Forks, fork: Fork) -> Forks:
    """Return the forks of a lineage that was founded in the lineage of `forks`."""
    kept = (*forks, fork)[-MAX_FORKS:]
    while sum(len(one.members) + len(one.before) for one in kept) > MOST_NAMED:
        kept = kept[1:]
    return kept


def descends(forks: Forks, lineage: bytes) -> bool:
    """Return True if the lineage of `forks` was founded in `lineage`, directly or not."""
    return lineage != lineage_of(forks) and (not lineage or lineage in map(name_of_fork, forks))


def founded_by(forks: Forks, parent: bytes, peer: PeerId, life: bytes) -> bool:
    """Return True if this life has founded a lineage in `parent` that the lineage of `forks` continues.

    It then has no vote in `parent` any more, and has not voted in the lineage yet.
    """
    names = [b"", *map(name_of_fork, forks)]
    return any(
        names[at] == parent and (peer, life) in _founders(fork) for at, fork in enumerate(forks)
    )  # fork number `at` was founded in the lineage names[at]


def _founders(fork: Fork) -> list[tuple[PeerId, bytes]]:
    return [(peer, fork.lives[LIFE * at : LIFE * (at + 1)]) for at, peer in enumerate(fork.members)]


def shared(one: Forks, other: Forks) -> int:
    """Return the number of first forks that two lineages have in common."""
    pairs = zip(map(name_of_fork, one), map(name_of_fork, other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def prevails(forks: Forks, round: int, over: Forks, other: int) -> bool:
    """Return True if the lineage of `forks`, at `round`, prevails over that of `over`, at `other`."""
    common = shared(forks, over)
    if len(forks) == len(over) == common:
        return False
    if len(forks) == common:
        return round > over[common].round
    if len(over) == common:
        return other <= forks[common].round
    return _rank(forks[common]) > _rank(over[common])


def _rank(fork: Fork) -> tuple[int, int, int, int]:
    known = len(set(fork.members).intersection(fork.before))
    return fork.round, known, len(fork.members), -int.from_bytes(name_of_fork(fork), "big")


def proved(forks: Forks, fragment: int, verify: Callable[[PeerId, Message, bytes], bool]) -> bool:
    """Return True if all founders have signed their forks, and the forks follow each other."""
    rounds = [fork.round for fork in forks]
    return rounds == sorted(rounds) and all(_proved(fork, fragment, verify) for fork in forks)


def _proved(fork: Fork, fragment: int, verify: Callable[[PeerId, Message, bytes], bool]) -> bool:
    count = len(fork.members)
    return (
        list(fork.members) == sorted(set(fork.members))
        and len(fork.lives) == LIFE * count
        and len(fork.signatures) == count
        and all(
            verify(peer, Found(fork.round, fragment, fork.base, fork.members, life), signature)
            for (peer, life), signature in zip(_founders(fork), fork.signatures, strict=True)
        )
    )
