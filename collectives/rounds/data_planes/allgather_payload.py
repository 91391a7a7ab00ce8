"""Payloads of the all-gather, their pieces and slots.

A payload has as many pieces as it needs, all but the last of `pieces.chunk` bytes, and at most `len(pieces)`, the
number for the largest possible payload. A contributor has a slot for each of those; unused slots are empty.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import blake3
from thinwire.collectives.rounds.data_planes.contributions import Contributions
from thinwire.collectives.topology.relay_plan import PLANS
from thinwire.collectives.topology.shards import Grid, Key
from thinwire.compression.core.types import Buffer
from thinwire.swarm.messages.registry import CHUNK_BYTES, MAX_CHUNKS, MAX_GROUP, Ballot, Digest, Proposal

EMPTY = blake3.blake3(b"").digest()
"""Hash of an unused slot."""

PIECES, LEAST = MAX_CHUNKS // MAX_GROUP, 1 << 14
"""Pieces per payload, if they have at least LEAST bytes.

A piece is forwarded while the next ones arrive, and the limit leaves room for all payloads of the largest group.
"""


def pieces(bound: int) -> Grid:
    """Return the division of a payload of at most `bound` bytes.

    Raises ValueError if a round has no room for two contributors.
    """
    cut = Grid(bound, min(CHUNK_BYTES, max(LEAST, -(-bound // PIECES))))
    if room(cut) < 2:
        raise ValueError(f"a payload of up to {bound} bytes is too large for an all-gather")
    return cut


def room(cut: Grid) -> int:
    """Return the number of contributors whose payloads fit in one round."""
    return min(MAX_GROUP, MAX_CHUNKS // max(1, len(cut)))


def cut_up(payload: Buffer, cut: Grid) -> list[memoryview]:
    """Return the pieces of one payload (at least one)."""
    view = memoryview(payload).cast("B")
    return [view[start : start + cut.chunk] for start in range(0, max(1, view.nbytes), cut.chunk)]


def put_together(results: Sequence[Buffer], cut: Grid) -> list[Buffer]:
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


class Slots:
    """Slots of the ballot in progress and of those before it.

    Each contributor has `each` slots, in the order of the proposal.
    """

    def __init__(self, each: int) -> None:
        self.keys: tuple[Key, ...] = ()
        """The contributors of the ballot in progress, each with the number of its announcement."""
        self._each = each
        self._places: dict[Key, int] = {}
        self._named: dict[Ballot, tuple[Key, ...]] = {}

    def open(self, proposal: Proposal) -> None:
        """Number the slots of a ballot."""
        self.keys = tuple((entry.peer, entry.attempt) for entry in proposal.contributors)
        self._places = {key: place for place, key in enumerate(self.keys)}
        self._named = dict([*self._named.items(), (proposal.ballot, self.keys)][-PLANS:])

    def split(self, slot: int) -> tuple[Key, int]:
        """Return the contribution of a slot and the index of its piece."""
        place, index = divmod(slot, self._each)
        return self.keys[place], index

    def find(self, key: Key, index: int) -> int | None:
        """Return the slot of a contributor's piece; None if the ballot does not name the contribution."""
        place = self._places.get(key)
        return None if place is None else place * self._each + index

    def translate(self, ballot: Ballot, slot: int) -> int | None:
        """Return the slot that a piece of an earlier ballot has now; None if it has none."""
        place, index = divmod(slot, self._each)
        named = self._named.get(ballot, ())
        return self.find(named[place], index) if place < len(named) else None


class Payloads:
    """Payloads of a round at one peer: pieces by hash, and faults.

    A later ballot has other slots, but the same payloads.
    """

    def __init__(self, cut: Grid, contributions: Contributions) -> None:
        self._cut, self._contributions = cut, contributions
        self.pieces: dict[Key, dict[Digest, Buffer]] = {}
        """Stored pieces of each announcement, by hash."""
        self._faults: dict[Key, str] = {}
        self._screened: set[Key] = set()

    def put(self, key: Key, found: Digest, piece: Buffer) -> None:
        """Store a piece with its hash."""
        self.pieces.setdefault(key, {})[found] = piece

    def own(self, key: Key, source: Sequence[Buffer]) -> None:
        """Store our own payload, unless it is stored already."""
        if not self.pieces.get(key):
            self.pieces[key] = {blake3.blake3(piece).digest(): piece for piece in source}

    def stored(self) -> dict[Digest, Buffer]:
        """Return the stored pieces of all payloads by hash."""
        return {digest: piece for pieces in self.pieces.values() for digest, piece in pieces.items()}

    def keep(self, needed: Collection[Key]) -> None:
        """Free the payloads of all other announcements than the needed ones."""
        self.pieces = {key: pieces for key, pieces in self.pieces.items() if key in needed}
        for peer in {peer for peer, _ in needed}:
            self._contributions.forget(peer, {attempt for one, attempt in needed if one == peer})

    def begin(self) -> None:
        """Note that payloads must be screened again: the results of a ballot differ from those before it."""
        self._screened.clear()

    def clear(self) -> None:
        """Free all pieces."""
        self.pieces.clear()

    def screen(self, key: Key, parts: Sequence[Buffer]) -> str:
        """Validate a payload whose slots are all here; return its fault, empty if there is none."""
        sizes = [memoryview(part).nbytes for part in parts if memoryview(part).nbytes]
        if any(size != self._cut.chunk for size in sizes[:-1]):
            reason = "length"
        else:
            reason = self._contributions.screen(key, 0, joined(parts))
        self._screened.add(key)
        if reason:
            self._faults[key] = reason
        else:
            self._faults.pop(key, None)
        return reason

    def mark(self, key: Key, fault: str) -> None:
        """Note a fault of a payload."""
        self._faults[key] = fault

    def fault(self, key: Key) -> str:
        """Return the known fault of a payload; empty if there is none."""
        return self._faults.get(key, "")

    def sound(self, keys: Iterable[Key]) -> bool:
        """Return whether these payloads are here and valid."""
        return all(key in self._screened and key not in self._faults for key in keys)
