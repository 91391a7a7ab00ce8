"""What tests of the planes of a round share: an outbox that keeps what was sent, and hashes and signatures of it."""

from __future__ import annotations

from collections.abc import Iterable

import blake3


class Tray:
    """Stands where the outbox stands; `waiting` is what it says of any peer's queue."""

    def __init__(self):
        self.sent, self.waiting, self.recalled = [], 0, 0
        self.stirring = {}

    def came(self, peer):
        return self.stirring.get(peer, 0)

    def later(self, to):
        return self.waiting

    def control(self, to, message):
        self.sent.append((to, message, b""))

    def bulk(self, to, frame, *, later=False):
        self.sent.append((to, frame.message, bytes(frame.payload)))

    def recall(self, round, fragment):
        self.recalled += 1

    def of(self, kind):
        """The messages of one kind that were sent since, which are forgotten then."""
        found = [entry for entry in self.sent if isinstance(entry[1], kind)]
        self.sent = [entry for entry in self.sent if not isinstance(entry[1], kind)]
        return found


def hashes_of(chunks: Iterable[bytes]) -> bytes:
    """What a Ready says of the chunks to come."""
    return b"".join(blake3.blake3(chunk).digest() for chunk in chunks)


def signature(peer: bytes, message: object) -> bytes:
    """Stands for a peer's signature of a message: 64 bytes that nobody else's or another's equals."""
    return blake3.blake3(peer + repr(message).encode()).digest(64)
