"""Who is here, as of one moment: immutable, numbered, equal on all peers that know the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from .protocol import PeerId


@dataclass(frozen=True, slots=True)
class View:
    """`peers` (sorted, us included) are alive or suspected; `digest` (32 bytes) names the set.

    `number` counts the views of this peer alone: equal sets have equal digests, not equal numbers.
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
