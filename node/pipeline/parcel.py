"""A payload in pieces that fit a frame: cut at the sender, put together at the receiver, who knows its exact size before."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.compression.codec import Buffer
from thinwire.swarm.protocol import CHUNK_BYTES


def pieces(payload: Buffer) -> Iterator[memoryview]:
    """The payload in pieces of CHUNK_BYTES, the last one shorter; one empty piece of an empty payload."""
    view = memoryview(payload)
    for start in range(0, max(1, len(view)), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


class Parcel:
    """A payload of `nbytes` bytes of which pieces come in any order."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._pieces: list[Buffer | None] = [None] * max(1, -(-nbytes // CHUNK_BYTES))
        self._missing = len(self._pieces)

    @property
    def whole(self) -> bool:
        """Whether nothing is missing."""
        return not self._missing

    def add(self, piece: int, payload: Buffer) -> bool:
        """Take a piece; False for one that there is not, that has another length, or that came before."""
        if piece >= len(self._pieces) or self._pieces[piece] is not None:
            return False
        if len(payload) != min(CHUNK_BYTES, self._nbytes - piece * CHUNK_BYTES):
            return False
        self._pieces[piece] = payload
        self._missing -= 1
        return True

    def payload(self) -> bytes:
        """All of it; only when it is whole."""
        assert self.whole
        return b"".join(piece for piece in self._pieces if piece is not None)
