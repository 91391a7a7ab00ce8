"""The results of a round's chunks, as far as they are here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import blake3
from thinwire.compression.codec import Buffer, CodecError
from thinwire.swarm.protocol import Digest


def digest_of(hashes: Sequence[Digest | None]) -> Digest:
    """Digest of all results: blake3 over their hashes in grid order."""
    return blake3.blake3(b"".join(h for h in hashes if h is not None)).digest()


class Results:
    """One round's `count`, each with its hash, and with the hash that its owner has signed for.

    `wanted`: the digest of all of them, once it is settled. `check(chunk, index)` raises CodecError for what cannot be one.
    """

    def __init__(self, check: Callable[[Buffer, int], object], count: int) -> None:
        self._check, self._count = check, count
        self.wanted: Digest | None = None
        self.clear()

    def __len__(self) -> int:
        return self._count

    def clear(self, count: int | None = None) -> None:
        """Begin anew: other contributors, other results; `count` when it is another number of them."""
        self._count = count = self._count if count is None else count
        self.wanted = None
        self._signed: list[Digest | None] = [None] * count
        self._refuted: list[Digest | None] = [None] * count
        self.chunks: list[Buffer | None] = [None] * count
        self._hashes: list[Digest | None] = [None] * count
        self.missing = count
        self._digest: Digest | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the results that are here."""
        return sum(memoryview(chunk).nbytes for chunk in self.chunks if chunk is not None)

    @property
    def digest(self) -> Digest | None:
        """Digest of all results, None while one is missing."""
        if self._digest is None and not self.missing:
            self._digest = digest_of(self._hashes)
        return self._digest

    def lacks(self) -> list[int]:
        """Chunks whose result is missing."""
        return [index for index, chunk in enumerate(self.chunks) if chunk is None]

    def hashes(self, indices: Sequence[int]) -> bytes:
        """Hashes of these results, all of which are here, concatenated."""
        return b"".join(found for index in indices if (found := self._hashes[index]) is not None)

    def signed(self, index: int) -> bool:
        """Whether an owner has signed for the result of this chunk."""
        return self._signed[index] is not None

    def vouched(self, index: int) -> Digest | None:
        """The hash that the result of this chunk must have, as far as that is known."""
        return self._signed[index]

    def unsign(self, index: int) -> None:
        """Whoever signed for this chunk owns it no more."""
        self._signed[index] = self._refuted[index] = None

    def denies(self, index: int, settled: Digest) -> bool:
        """Whether the owner of this chunk has signed for another result than what was settled."""
        return bool({self._signed[index], self._refuted[index]} - {None, settled})

    def sign(self, index: int, digest: Digest) -> None:
        """The word of a chunk's owner; a result that differs from it is dropped."""
        self._signed[index] = digest
        if self._hashes[index] not in (None, digest):
            self._hashes[index], self.chunks[index] = None, None
            self._changed(1)

    def settle(self, digest: Digest) -> None:
        """All results together are `digest`: if those that are here are others, neither they nor their owners' words count."""
        if self.digest not in (None, digest):
            said = self._signed
            self.clear()
            self._refuted = said
        self.wanted = digest

    def put(self, index: int, chunk: Buffer) -> None:
        """Our own result of a chunk that we own."""
        self.chunks[index], self._hashes[index] = chunk, blake3.blake3(chunk).digest()
        self._changed(-1)

    def take(self, index: int, chunk: Buffer, hashed: Callable[[], Digest], *, from_owner: bool) -> bool | None:
        """Keep a result, hash `hashed()`: True when it is one, False when it cannot be right, None when nobody vouches."""
        signed = self._signed[index]
        if signed is None and not from_owner:
            return None  # and so it may come again and again: it costs nothing to say so
        found = hashed()
        try:
            self._check(chunk, index)
        except CodecError:
            return False  # what cannot be decoded must never be voted for, whatever its owner signed
        if signed not in (None, found):
            return False
        self.chunks[index], self._hashes[index] = chunk, found
        self._changed(-1)
        return True

    def _changed(self, missing: int) -> None:
        self.missing += missing
        self._digest = None
