"""Transfer of one vector from one side of a pair to the other.

Chunks are announced by hash, requested, and sent once per link.

A pair has at most two vectors each way. The number of a chunk is its place in the grid, plus the number that the vector
begins with, so that it identifies both. A vector may have some chunks of the grid only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import blake3
from thinwire.collectives.topology.shards import Grid
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.types import Buffer
from thinwire.compression.sparse.flat import ChunkCodec
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Base, Chunk, Digest, Ready


def digest_of(hashes: bytes, first: int) -> Digest:
    """Return the digest of a vector whose chunks have these hashes and numbers from `first` on."""
    return blake3.blake3(first.to_bytes(2, "big") + hashes).digest()


class ChunkSender:
    """A vector announced to the partner. `asked`: whether the partner requested any of it.

    `source`: its chunks, of which no copy is held. `places`: where they are in the grid.
    """

    def __init__(self, announced: Base | Ready, source: Sequence[Buffer], first: int, places: Sequence[int]) -> None:
        self.announced, self.asked = announced, False
        self.digest = digest_of(announced.hashes, first)
        self._chunks = {first + place: chunk for place, chunk in zip(places, source, strict=True)}
        self._served: set[int] = set()

    def serve(self, numbers: Iterable[int]) -> Iterator[Frame]:
        """Yield the requested chunks not yet sent over this link; the link delivers them unless it breaks."""
        self.asked = True
        message = self.announced
        for number in numbers:
            if number in self._chunks and number not in self._served:
                self._served.add(number)
                yield Frame(Chunk(message.round, message.fragment, message.attempt, number), self._chunks[number])

    def resend(self) -> None:
        """Send all chunks again on request: the link broke, or the partner has dropped them."""
        self._served.clear()


class ChunkReceiver:
    """A vector announced by the partner, and its received chunks.

    `places`: where its chunks are in the grid. `wanted`: numbers of the chunks that we need, by default all.
    """

    def __init__(
        self,
        announced: Base | Ready,
        codec: ChunkCodec,
        grid: Grid,
        first: int,
        places: Sequence[int],
        wanted: Collection[int] | None = None,
    ) -> None:
        self.attempt, self.digest = announced.attempt, digest_of(announced.hashes, first)
        self._hashes, self._codec, self._grid, self._first, self._places = announced.hashes, codec, grid, first, places
        self._chunks: dict[int, Buffer | None] = {
            place: None for place in places if wanted is None or first + place in wanted
        }
        self.missing = len(self._chunks)

    @property
    def missing_chunks(self) -> tuple[int, ...]:
        """Numbers of the missing chunks."""
        return tuple(self._first + index for index, chunk in self._chunks.items() if chunk is None)

    @property
    def chunks(self) -> tuple[Buffer, ...]:
        """Received chunks in grid order."""
        return tuple(chunk for chunk in self._chunks.values() if chunk is not None)

    def chunk(self, index: int) -> Buffer | None:
        """Return the chunk at this place of the grid; None if it is missing."""
        return self._chunks.get(index)

    def wants(self, number: int) -> bool:
        """Return True if this chunk belongs to the vector and is missing."""
        index = number - self._first
        return index in self._chunks and self._chunks[index] is None

    def take(self, number: int, frame: Frame) -> str:
        """Store a wanted chunk.

        Return "" or what is wrong with it: first its hash, then its content as the codec reports it.
        """
        index = number - self._first
        at = 32 * self._places.index(index)
        if frame.hashed() != self._hashes[at : at + 32]:
            return "hash"
        try:
            self._codec.check(frame.payload, self._grid.size(index))
        except CodecError as error:
            return error.reason
        self._chunks[index] = frame.payload
        self.missing -= 1
        return ""
