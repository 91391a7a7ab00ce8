"""One vector on its way from one side of a pair to the other: its chunks are announced by their hashes, asked for, and sent
once over a link.

A pair has two of them each way at most, numbered one behind the other, so that a chunk's number says of which it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import blake3
from thinwire.collectives.shards import Grid
from thinwire.compression.codec import Buffer, Codec, CodecError
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import Base, Chunk, Digest, Ready


def digest_of(hashes: bytes, first: int) -> Digest:
    """Names a vector whose chunks have these hashes and are numbered from `first` on."""
    return blake3.blake3(first.to_bytes(2, "big") + hashes).digest()


class Outgoing:
    """What we have announced to the partner. `asked`: whether it has asked for any of it. Holds no copy of `source`."""

    def __init__(self, announced: Base | Ready, source: Sequence[Buffer], first: int) -> None:
        self.announced, self.asked = announced, False
        self.digest = digest_of(announced.hashes, first)
        self._source, self._first = source, first
        self._served: set[int] = set()

    def serve(self, numbers: Iterable[int]) -> Iterator[Frame]:
        """Those that have not gone over this link yet: what it has taken comes, unless the link breaks."""
        self.asked = True
        message = self.announced
        for number in numbers:
            index = number - self._first
            if 0 <= index < len(self._source) and index not in self._served:
                self._served.add(index)
                yield Frame(Chunk(message.round, message.fragment, message.attempt, number), self._source[index])

    def lost(self) -> None:
        """The link broke."""
        self._served.clear()


class Incoming:
    """What the partner has announced, and what has come of it."""

    def __init__(self, announced: Base | Ready, codec: Codec, grid: Grid, first: int) -> None:
        self.attempt, self.digest = announced.attempt, digest_of(announced.hashes, first)
        self.missing = len(grid)
        self._hashes, self._codec, self._grid, self._first = announced.hashes, codec, grid, first
        self._chunks: list[Buffer | None] = [None] * len(grid)

    @property
    def lacking(self) -> tuple[int, ...]:
        """Numbers of the chunks that are not here."""
        return tuple(self._first + index for index, chunk in enumerate(self._chunks) if chunk is None)

    @property
    def chunks(self) -> tuple[Buffer, ...]:
        """Those that are here, in grid order."""
        return tuple(chunk for chunk in self._chunks if chunk is not None)

    def wants(self, number: int) -> bool:
        """Whether this chunk is one of it, and not here."""
        return 0 <= number - self._first < len(self._chunks) and self._chunks[number - self._first] is None

    def take(self, number: int, frame: Frame) -> str:
        """Keep a wanted chunk; or what is wrong with it, beside its announced hash first, then as the codec says."""
        index = number - self._first
        if frame.hashed() != self._hashes[32 * index : 32 * index + 32]:
            return "hash"
        try:
            self._codec.check(frame.payload, self._grid.size(index))
        except CodecError as error:
            return error.reason
        self._chunks[index] = frame.payload
        self.missing -= 1
        return ""
