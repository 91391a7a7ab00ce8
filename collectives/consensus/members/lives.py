"""Members of a round and their lives, in the order of seniority: pure functions.

A member is a peer and its life, see `Proposal.lives`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import blake3
from thinwire.swarm.messages.registry import LIFE, Digest, PeerId


def lives_of(members: Sequence[PeerId], lives: bytes) -> dict[PeerId, bytes]:
    """Return the known lives of members. `lives`: LIFE bytes each, in their order; zeros mean unknown."""
    pairs = zip(members, range(0, len(lives), LIFE), strict=False)
    return {peer: life for peer, at in pairs if any(life := lives[at : at + LIFE])}


def lives_in_order(members: Sequence[PeerId], lives: Mapping[PeerId, bytes]) -> bytes:
    """Return LIFE bytes for each of `members`, zeros for an unknown life; the inverse of `lives_of`."""
    return b"".join(lives.get(peer, bytes(LIFE)) for peer in members)


@lru_cache(maxsize=64)
def electorate_digest(members: tuple[PeerId, ...], lives: bytes) -> Digest:
    """Return the blake3 of members, by seniority, and their lives, LIFE bytes each."""
    return blake3.blake3(b"".join(members) + lives).digest()


def next_members(decided: Sequence[PeerId], lives: bytes, before: Sequence[PeerId]) -> tuple[tuple[PeerId, ...], bytes]:
    """Return the members that a commit has `decided`, and their `lives`, by seniority.

    before: the electorate of its round, by seniority.
    """
    members = by_seniority(decided, before)
    return members, lives_in_order(members, lives_of(decided, lives)) if lives else b""


def by_seniority(members: Collection[PeerId], before: Sequence[PeerId]) -> tuple[PeerId, ...]:
    """Return `members` by seniority: those of `before` in its order, then the others by id."""
    stay = tuple(peer for peer in before if peer in members)
    return stay + tuple(sorted(set(members).difference(stay)))
