"""Owners of chunks: pure functions that every peer computes alike.

The chunk grid depends only on the fragment and the codec, not on the group. So a contributor can announce the hashes of
its payloads before their owners are known, and a change of the group moves only the chunks of the peers that departed.

Each of several fragments has its own rounds, often at the same time. If the chunks are fewer than the peers, or not a
multiple of them, the assignment of the next fragment continues where the previous one ended, so that small fragments
are not all owned by one peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from thinwire.swarm.messages.registry import CHUNK_BYTES, MAX_CHUNKS, PeerId
from thinwire.swarm.rendezvous_hash import backups

MIN_CHUNK = 4096
"""Minimum number of elements in a chunk; below it the frame costs more than its payload."""

MIN_COUNT = 32
"""Minimum number of chunks of a large fragment, so that a group of this size can share the work."""

DIVISIBLE = 24
"""Divisor of the number of chunks of a larger fragment, as far as MIN_CHUNK allows.

So groups of 2, 3, 4, 6, 8 and 12 peers own equal numbers. A peer that owns one chunk less than others is done early, and then
the connections of the others are slow to use its part of the links.
"""


class Sized(Protocol):
    """Interface of an object that knows the size of payloads, such as a Codec."""

    def nbytes(self, n: int) -> int:
        """Return the size in bytes of the payload of n elements."""
        ...


@dataclass(frozen=True, slots=True)
class Grid:
    """Division of a fragment of `total` elements into chunks of `chunk` elements; the last may be shorter."""

    total: int
    chunk: int

    def __len__(self) -> int:
        return (self.total + self.chunk - 1) // self.chunk

    def span(self, index: int) -> tuple[int, int]:
        """Return the elements [start, stop) of chunk `index`."""
        return index * self.chunk, min((index + 1) * self.chunk, self.total)

    def size(self, index: int) -> int:
        """Return the number of elements in chunk `index`."""
        start, stop = self.span(index)
        return stop - start


def largest_chunk(codec: Sized) -> int:
    """Return the maximum number of elements in a chunk."""
    largest = MIN_CHUNK
    while largest < 1 << 19 and codec.nbytes(2 * largest) <= CHUNK_BYTES + CHUNK_BYTES // 16:
        largest *= 2
    return largest


def grid(total: int, codec: Sized) -> Grid:
    """Return the chunk grid of a fragment.

    A chunk has a multiple of MIN_CHUNK elements, and its payload has at most 1 MiB (plus scales). Raises ValueError if
    the fragment would need more than MAX_CHUNKS chunks.
    """
    largest = largest_chunk(codec)
    count = min(MAX_CHUNKS, max(MIN_COUNT, DIVISIBLE * -(-total // (DIVISIBLE * largest))))
    wanted = MIN_CHUNK * -(-total // (MIN_CHUNK * count))
    result = Grid(total, max(MIN_CHUNK, min(wanted, largest)))
    if len(result) > MAX_CHUNKS:
        raise ValueError(f"a fragment of {total} elements needs {len(result)} chunks, the limit is {MAX_CHUNKS}")
    return result


def shares(count: int, group: Sequence[PeerId], counts: Sequence[int] = (), fragment: int = 0) -> tuple[PeerId, ...]:
    """Return the primary owner of each of `count` chunks: consecutive runs of the lengths in `counts`.

    `counts` must sum to `count`; by default the lengths are those of `equal`.
    """
    lengths = counts or equal(count, len(group), fragment)
    return tuple(peer for peer, length in zip(group, lengths, strict=True) for _ in range(length))


def equal(count: int, peers: int, fragment: int = 0) -> tuple[int, ...]:
    """Return an equal number of chunks for each peer; some get one more, which depends on `fragment`."""
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
    """Return the owner of each chunk: the primary of `shares` if alive, else its first living backup.

    Backups are ranked by rendezvous hashing. Only the chunks of departed peers move; they are spread over all
    survivors, or over those with chunks by `counts`. `alive` must not be empty.
    """
    living = set(alive)
    able = {peer for peer, owned in zip(group, counts, strict=False) if owned and peer in living} or living

    def owner(primary: PeerId, chunk: int) -> PeerId:
        if primary in living:
            return primary
        return next((peer for peer in backups(seed, group, primary, chunk) if peer in able), alive[0])

    return tuple(owner(primary, chunk) for chunk, primary in enumerate(shares(count, group, counts, fragment)))
