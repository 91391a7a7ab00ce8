"""Who takes a role, by highest random weight: nobody elects anybody, and a loss moves only the loser's part.

Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM Trans. Networking 6(1), 1998.
"""

from __future__ import annotations

from collections.abc import Iterable

import blake3

from .protocol import PeerId


def rank(seed: bytes, role: str, peers: Iterable[PeerId], *numbers: int) -> tuple[PeerId, ...]:
    """All peers by their weight for a role, the highest first: the first takes it, the next ones are its backups.

    `seed` is what the swarm has agreed on (a view's or state's digest); `numbers` (each 0 .. 2**64 - 1) tell apart
    rounds, fragments, chunks. The order among any peers does not depend on who else is in the list.
    """
    name = role.encode()
    hasher = blake3.blake3(b"thinwire/rendezvous/1\0")
    for part in (seed, name, *(number.to_bytes(8, "big") for number in numbers)):
        hasher.update(len(part).to_bytes(8, "big") + part)

    def weight(peer: PeerId) -> tuple[bytes, PeerId]:
        one = hasher.copy()
        one.update(peer)
        return one.digest(), peer

    return tuple(sorted(set(peers), key=weight, reverse=True))


def leader_order(seed: bytes, peers: Iterable[PeerId], round: int, fragment: int) -> tuple[PeerId, ...]:
    """Who leads a round of a fragment; each next one stands in when those before it are silent."""
    return rank(seed, "leader", peers, round, fragment)


def backups(seed: bytes, peers: Iterable[PeerId], owner: PeerId, chunk: int) -> tuple[PeerId, ...]:
    """Who takes over a chunk when its owner is gone, in order; the owner itself is not among them."""
    return tuple(peer for peer in rank(seed, "backup", peers, chunk) if peer != owner)
