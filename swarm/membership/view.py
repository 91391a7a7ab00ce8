"""View of the swarm at one moment: immutable, numbered, equal on peers with equal knowledge."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from thinwire.swarm.messages.registry import PeerId


@dataclass(frozen=True, slots=True)
class View:
    """Peers that are alive or suspected (sorted, this peer included), with a 32-byte digest of the set.

    `number` counts the views of this peer only: equal sets have equal digests, but not equal numbers.
    """

    number: int
    peers: tuple[PeerId, ...]
    digest: bytes

    @classmethod
    def of(cls, number: int, peers: Iterable[PeerId]) -> View:
        members = tuple(sorted(peers))
        return cls(
            number, members, hashlib.blake2b(b"".join(members), digest_size=32, person=b"thinwire view").digest()
        )

    def __contains__(self, peer: object) -> bool:
        return peer in self.peers

    def __len__(self) -> int:
        return len(self.peers)
