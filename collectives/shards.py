"""Which peer owns which chunk: pure functions that every peer computes alike.

The chunk grid depends on the fragment and the codec alone, never on the group, so that a contributor can announce the
hashes of its payloads before it knows who will own them, and a change of the group moves only the chunks of the peers
that left.

Of several fragments each is a round of its own, often at the same time: where chunks are fewer than peers, or no multiple of
them, the next fragment goes on dealing where the one before it left off, so that small fragments are not all one peer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from thinwire.swarm.protocol import CHUNK_BYTES, MAX_CHUNKS, PeerId
from thinwire.swarm.rendezvous import backups

MIN_CHUNK = 4096
"""Fewest elements in a chunk: below it the frame costs more than its payload."""

MIN_COUNT = 32
"""Chunks that a large enough fragment is cut into at least, so that a group of this size can share the work."""


class Sized(Protocol):
    """What says how large a payload is, such as a Codec."""

    def nbytes(self, n: int) -> int:
        """Bytes of n elements."""
        ...


@dataclass(frozen=True, slots=True)
class Grid:
    """A fragment of `total` elements cut into chunks of `chunk` elements (the last one may be shorter)."""

    total: int
    chunk: int

    def __len__(self) -> int:
        return (self.total + self.chunk - 1) // self.chunk

    def span(self, index: int) -> tuple[int, int]:
        """Elements [start, stop) of chunk `index`."""
        return index * self.chunk, min((index + 1) * self.chunk, self.total)

    def size(self, index: int) -> int:
        """Elements in chunk `index`."""
        start, stop = self.span(index)
        return stop - start


def grid(total: int, codec: Sized) -> Grid:
    """The chunk grid of a fragment: a multiple of MIN_CHUNK elements a chunk, payloads of at most 1 MiB (and scales).

    Raises ValueError when the fragment would need more than MAX_CHUNKS chunks.
    """
    largest = MIN_CHUNK
    while largest < 1 << 19 and codec.nbytes(2 * largest) <= CHUNK_BYTES + CHUNK_BYTES // 16:
        largest *= 2
    wanted = -(-total // (MIN_COUNT * MIN_CHUNK)) * MIN_CHUNK
    result = Grid(total, max(MIN_CHUNK, min(wanted, largest)))
    if len(result) > MAX_CHUNKS:
        raise ValueError(f"a fragment of {total} elements needs {len(result)} chunks, the limit is {MAX_CHUNKS}")
    return result


def shares(count: int, group: Sequence[PeerId], counts: Sequence[int] = (), fragment: int = 0) -> tuple[PeerId, ...]:
    """Primary owner of each of `count` chunks: consecutive runs as long as `counts` says (it sums to `count`).

    Without it they are those of `equal`.
    """
    lengths = counts or equal(count, len(group), fragment)
    return tuple(peer for peer, length in zip(group, lengths, strict=True) for _ in range(length))


def equal(count: int, peers: int, fragment: int = 0) -> tuple[int, ...]:
    """Chunks of each of so many peers: equally many, some by one more, which ones follows from the number of the fragment."""
    run, odd = divmod(count, peers)
    return tuple(run + ((at - fragment * odd) % peers < odd) for at in range(peers))


def owners(
    count: int,
    group: Sequence[PeerId],
    alive: Sequence[PeerId],
    seed: bytes,
    counts: Sequence[int] = (),
    fragment: int = 0,
) -> tuple[PeerId, ...]:
    """Owner of each chunk: the primary of `shares` while it is alive, else the first alive of its backups (rendezvous ranking).

    Only the chunks of peers that left move, spread over all survivors, or over those of them that own some by `counts`.
    `alive` must not be empty.
    """
    living = set(alive)
    able = {peer for peer, owned in zip(group, counts, strict=False) if owned and peer in living} or living

    def owner(primary: PeerId, chunk: int) -> PeerId:
        if primary in living:
            return primary
        return next((peer for peer in backups(seed, group, primary, chunk) if peer in able), alive[0])

    return tuple(owner(primary, chunk) for chunk, primary in enumerate(shares(count, group, counts, fragment)))
