"""A payload of the sparse gather, and the pieces that it travels in.

A payload has as many pieces as it needs, all but the last of `pieces.chunk` bytes, and none has more than `pieces`, the cut
of the largest payload there can be. A contributor has a slot for each of those; what it does not need is empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import blake3
from thinwire.collectives.shards import Grid
from thinwire.compression.codec import Buffer
from thinwire.swarm.protocol import CHUNK_BYTES, MAX_CHUNKS, MAX_GROUP

EMPTY = blake3.blake3(b"").digest()
"""Hash of a slot that is not used."""

PIECES, LEAST = MAX_CHUNKS // MAX_GROUP, 1 << 14
"""A payload has so many pieces, if they are not smaller than this: a piece is handed on while the next ones come, and there is
room for all of the largest group.
"""


def pieces(bound: int) -> Grid:
    """The cut of a payload of at most `bound` bytes. Raises ValueError when not even two contributors would fit a round."""
    cut = Grid(bound, min(CHUNK_BYTES, max(LEAST, -(-bound // PIECES))))
    if room(cut) < 2:
        raise ValueError(f"a payload of up to {bound} bytes is too large to be gathered")
    return cut


def room(cut: Grid) -> int:
    """Contributors whose payloads fit in one round."""
    return min(MAX_GROUP, MAX_CHUNKS // max(1, len(cut)))


def cut_up(payload: Buffer, cut: Grid) -> list[memoryview]:
    """The pieces of one payload (at least one)."""
    view = memoryview(payload).cast("B")
    return [view[start : start + cut.chunk] for start in range(0, max(1, view.nbytes), cut.chunk)]


def put_together(results: Sequence[Buffer], cut: Grid) -> list[Buffer]:
    """The payloads of all contributors from the results of a round."""
    return [joined(results[at : at + len(cut)]) for at in range(0, len(results), len(cut))]


def joined(parts: Sequence[Buffer]) -> Buffer:
    """The payload of one contributor from its slots."""
    return b"".join(parts) if len(parts) > 1 else parts[0]
