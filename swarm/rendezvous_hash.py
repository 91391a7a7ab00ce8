"""Assignment of roles by highest random weight: without an election, and stable under departures.

If a peer departs, only its roles move. Thaler and Ravishankar, "Using name-based mappings to increase hit rates",
IEEE/ACM Trans. Networking 6(1), 1998.
"""

from __future__ import annotations

from collections.abc import Iterable

import blake3
from thinwire.swarm.messages.registry import PeerId


def rank(seed: bytes, role: str, peers: Iterable[PeerId], *numbers: int) -> tuple[PeerId, ...]:
    """Return all peers by their weight for a role, highest first.

    The first peer takes the role, the next ones are its backups. seed: bytes that the swarm has agreed on (digest of a
    view or state). numbers: each 0 .. 2**64 - 1; they distinguish rounds, fragments and chunks. The relative order of
    two peers does not depend on the other peers in the list.
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
    """Return the peers in the order in which they lead a round of a fragment.

    Each peer takes over if those before it are silent.
    """
    return rank(seed, "leader", peers, round, fragment)


def backups(seed: bytes, peers: Iterable[PeerId], owner: PeerId, chunk: int) -> tuple[PeerId, ...]:
    """Return the peers that take over a chunk if its owner dies, in order, without the owner itself."""
    return tuple(peer for peer in rank(seed, "backup", peers, chunk) if peer != owner)
