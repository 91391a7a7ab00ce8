"""Splitting of a payload into pieces that fit a frame, and their assembly.

The receiver knows the exact size in advance.
"""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.compression.core.types import Buffer
from thinwire.swarm.messages.registry import CHUNK_BYTES


def pieces(payload: Buffer) -> Iterator[memoryview]:
    """Yield the payload in pieces of CHUNK_BYTES, the last one shorter.

    An empty payload yields one empty piece.
    """
    view = memoryview(payload)
    for start in range(0, max(1, len(view)), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


class PayloadAssembly:
    """Payload of `nbytes` bytes whose pieces arrive in any order."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._pieces: list[Buffer | None] = [None] * max(1, -(-nbytes // CHUNK_BYTES))
        self._missing = len(self._pieces)

    @property
    def complete(self) -> bool:
        """True if no piece is missing."""
        return not self._missing

    def add(self, piece: int, payload: Buffer) -> bool:
        """Add a piece; return False if its number is out of range, its length is wrong, or it is a duplicate."""
        if piece >= len(self._pieces) or self._pieces[piece] is not None:
            return False
        if len(payload) != min(CHUNK_BYTES, self._nbytes - piece * CHUNK_BYTES):
            return False
        self._pieces[piece] = payload
        self._missing -= 1
        return True

    def payload(self) -> bytes:
        """Return the whole payload; only once `complete`."""
        assert self.complete
        return b"".join(piece for piece in self._pieces if piece is not None)
