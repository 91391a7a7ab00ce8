"""Division of a payload of the all-gather into pieces.

A payload has as many pieces as it needs, all but the last of `pieces.chunk` bytes, and at most `len(pieces)`, the
number for the largest possible payload. A contributor has a slot for each of those; unused slots are empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import blake3
from thinwire.collectives.topology.shards import Grid
from thinwire.compression.core.types import Buffer
from thinwire.swarm.messages.registry import CHUNK_BYTES, MAX_CHUNKS, MAX_GROUP, Digest

EMPTY = blake3.blake3(b"").digest()
"""Hash of an unused slot."""

PIECES, LEAST = MAX_CHUNKS // MAX_GROUP, 1 << 14
"""Pieces per payload, if they have at least LEAST bytes.

A piece is forwarded while the next ones arrive, and the limit leaves room for all payloads of the largest group.
"""


def piece_grid(bound: int) -> Grid:
    """Return the division of a payload of at most `bound` bytes.

    Raises ValueError if a round has no room for two contributors.
    """
    cut = Grid(bound, min(CHUNK_BYTES, max(LEAST, -(-bound // PIECES))))
    if max_contributors(cut) < 2:
        raise ValueError(f"a payload of up to {bound} bytes is too large for an all-gather")
    return cut


def max_contributors(cut: Grid) -> int:
    """Return the number of contributors whose payloads fit in one round."""
    return min(MAX_GROUP, MAX_CHUNKS // max(1, len(cut)))


def pieces_of(payload: Buffer, cut: Grid) -> list[memoryview]:
    """Return the pieces of one payload (at least one)."""
    view = memoryview(payload).cast("B")
    return [view[start : start + cut.chunk] for start in range(0, max(1, view.nbytes), cut.chunk)]


def payloads_of(results: Sequence[Buffer], cut: Grid) -> list[Buffer]:
    """Return the payloads of all contributors from the results of a round."""
    return [joined(results[at : at + len(cut)]) for at in range(0, len(results), len(cut))]


def joined(parts: Sequence[Buffer]) -> Buffer:
    """Return the payload of one contributor from its slots."""
    return b"".join(parts) if len(parts) > 1 else parts[0]


def slot_hashes(hashes: bytes, cut: Grid) -> list[Digest] | None:
    """Return the hash of each slot of a contributor, from its announcement; None if that is malformed."""
    found = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
    if not 0 < len(found) <= len(cut) or len(found[-1]) < 32 or EMPTY in found:
        return None
    return found + [EMPTY] * (len(cut) - len(found))
