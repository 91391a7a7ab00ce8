"""Pieces of an all-gather at one peer, and the slots of a ballot that they fill.

A slot takes only a piece whose hash is vouched for: by the announcement of its contributor or, once the results are settled,
by their digest. A payload is validated when all its slots are filled. A later ballot has other slots, but the same payloads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import blake3
from thinwire.collectives.rounds.data_planes.allgather.payload_pieces import EMPTY, joined, slot_hashes
from thinwire.collectives.rounds.data_planes.contributions import Contributions
from thinwire.collectives.rounds.data_planes.result_store import Results
from thinwire.collectives.topology.relay_plan import PLANS
from thinwire.collectives.topology.shards import Grid
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.types import Buffer
from thinwire.swarm.messages.registry import Ballot, ContributionKey, Digest, Proposal


class Slots:
    """Slots of the ballot in progress and of those before it.

    Each contributor has `each` slots, in the order of the proposal.
    """

    def __init__(self, each: int) -> None:
        self.keys: tuple[ContributionKey, ...] = ()
        """The contributors of the ballot in progress, each with the number of its announcement."""
        self._each = each
        self._places: dict[ContributionKey, int] = {}
        self._named: dict[Ballot, tuple[ContributionKey, ...]] = {}

    def open(self, proposal: Proposal) -> None:
        """Number the slots of a ballot."""
        self.keys = tuple(entry.key for entry in proposal.contributors)
        self._places = {key: place for place, key in enumerate(self.keys)}
        self._named = dict([*self._named.items(), (proposal.ballot, self.keys)][-PLANS:])

    def split(self, slot: int) -> tuple[ContributionKey, int]:
        """Return the contribution of a slot and the index of its piece."""
        place, index = divmod(slot, self._each)
        return self.keys[place], index

    def find(self, key: ContributionKey, index: int) -> int | None:
        """Return the slot of a contributor's piece; None if the ballot does not name the contribution."""
        place = self._places.get(key)
        return None if place is None else place * self._each + index

    def of(self, key: ContributionKey) -> range:
        """Return all slots of a contribution; empty if the ballot does not name it."""
        first = self.find(key, 0)
        return range(0) if first is None else range(first, first + self._each)

    def translate(self, ballot: Ballot, slot: int) -> int | None:
        """Return the slot that a piece of an earlier ballot has now; None if it has none."""
        place, index = divmod(slot, self._each)
        named = self._named.get(ballot, ())
        return self.find(named[place], index) if place < len(named) else None


class PieceStore:
    """Pieces of one round at one peer, in the slots of `results` and by payload and hash.

    `cut`: division of the largest possible payload.
    """

    # As in Results, there is no reference to the data plane: it takes the faults (`take_faults`).
    def __init__(self, cut: Grid, results: Results, contributions: Contributions) -> None:
        self.slots = Slots(len(cut))
        self._cut, self._results, self._contributions = cut, results, contributions
        self._pieces: dict[ContributionKey, dict[Digest, Buffer]] = {}
        """Stored pieces of each announcement, by hash."""
        self._faults: dict[ContributionKey, str] = {}
        self._fresh_faults: list[ContributionKey] = []
        self._validated: set[ContributionKey] = set()

    def open(self, proposal: Proposal, *, changed: bool) -> None:
        """Number the slots of a ballot, and empty them if its results differ from those of the ballot before."""
        self.slots.open(proposal)
        if changed:
            self._results.clear(len(proposal.contributors) * len(self._cut))
            self._validated.clear()

    def keep(self, needed: Collection[ContributionKey]) -> None:
        """Free the payloads of all other announcements than the needed ones."""
        self._pieces = {key: pieces for key, pieces in self._pieces.items() if key in needed}
        for peer in {peer for peer, _ in needed}:
            self._contributions.forget(peer, {attempt for one, attempt in needed if one == peer})

    def clear(self) -> None:
        """Free the pieces that are not in slots."""
        self._pieces.clear()

    # --- hashes of slots

    def expect(self, key: ContributionKey, announced: bytes) -> None:
        """Set the hashes of a payload's slots from its announcement, unless the results are settled already."""
        if self._results.wanted is not None:
            return  # settled results are judged by their own hashes
        hashes = slot_hashes(announced, self._cut)
        if hashes is None:
            self.mark(key, "length")
            return
        for slot, found in zip(self.slots.of(key), hashes, strict=True):
            if not self._results.signed(slot):
                self._sign(slot, found)

    def settle(self, hashes: bytes) -> None:
        """Set the hashes of all slots, which match the settled digest."""
        for slot in range(len(self._results)):
            self._sign(slot, hashes[32 * slot : 32 * slot + 32])

    def _sign(self, slot: int, found: Digest) -> None:
        self._results.sign(slot, found)
        if found == EMPTY and self._results.chunks[slot] is None:
            self._take(slot, b"", lambda: EMPTY)

    # --- pieces

    def store_own(self, key: ContributionKey, source: Sequence[Buffer]) -> None:
        """Store our own payload, unless it is stored already."""
        if not self._pieces.get(key):
            self._pieces[key] = {blake3.blake3(piece).digest(): piece for piece in source}

    def fill(self) -> None:
        """Put stored pieces into slots that lack them."""
        here = {found: piece for pieces in self._pieces.values() for found, piece in pieces.items()}
        for slot in self._results.missing_indices():
            found = self._results.expected_hash(slot) or b""
            if found in here:
                self._take(slot, here[found], partial(bytes, found))

    def put(self, slot: int, piece: Buffer, hashed: Callable[[], Digest]) -> bool:
        """Store a received piece with hash `hashed()` in its slot; return whether it is new and vouched for."""
        if self._results.chunks[slot] is not None or not self._take(slot, piece, hashed):
            return False
        key, _ = self.slots.split(slot)
        self._pieces.setdefault(key, {})[self._results.joined_hashes((slot,))] = piece
        return True

    def whole(self, key: ContributionKey) -> bool:
        """Return True if all slots of a payload are filled."""
        return all(self._results.chunks[slot] is not None for slot in self.slots.of(key))

    def _take(self, slot: int, piece: Buffer, hashed: Callable[[], Digest]) -> bool:
        """Put a piece into its slot if its hash is vouched for and it is not too long; return whether it is."""
        taken = bool(self._results.take(slot, piece, hashed, check=self._check_length, from_owner=False))
        key, _ = self.slots.split(slot)
        if taken and self.whole(key):
            self._validate(key)
        return taken

    def _check_length(self, piece: Buffer, slot: int) -> None:
        if memoryview(piece).nbytes > self._cut.size(slot % len(self._cut)):
            raise CodecError(f"a piece of {memoryview(piece).nbytes} bytes", "length")

    # --- validity of payloads

    def _validate(self, key: ContributionKey) -> None:
        """Validate a payload whose slots are all filled."""
        parts = [part for slot in self.slots.of(key) if (part := self._results.chunks[slot]) is not None]
        sizes = [memoryview(part).nbytes for part in parts if memoryview(part).nbytes]
        uneven = any(size != self._cut.chunk for size in sizes[:-1])
        reason = "length" if uneven else self._contributions.screen(key, 0, joined(parts))
        self._validated.add(key)
        self._faults.pop(key, None)
        if reason:
            self.mark(key, reason)
            self._fresh_faults.append(key)

    def mark(self, key: ContributionKey, fault: str) -> None:
        """Note a fault of a payload."""
        self._faults[key] = fault

    def fault(self, key: ContributionKey) -> str:
        """Return the known fault of a payload; empty if there is none."""
        return self._faults.get(key, "")

    def take_faults(self) -> list[ContributionKey]:
        """Return the payloads that were found invalid since the last call."""
        found, self._fresh_faults = self._fresh_faults, []
        return found

    @property
    def sound(self) -> bool:
        """True if all payloads of the ballot are here and valid."""
        return all(key in self._validated and key not in self._faults for key in self.slots.keys)
