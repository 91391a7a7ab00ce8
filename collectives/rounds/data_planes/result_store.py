"""Results of a round's chunks that are here so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import blake3
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.types import Buffer
from thinwire.swarm.messages.registry import Digest


def digest_of(hashes: Sequence[Digest | None]) -> Digest:
    """Return the digest of all results: blake3 over their hashes in grid order."""
    return blake3.blake3(b"".join(h for h in hashes if h is not None)).digest()


class Results:
    """The `count` results of one round, each with its hash and the hash that its owner signed.

    `wanted`: the digest of all of them once settled.
    """

    # The store has no reference to the data plane that has it: in a cycle, the memory of a past round's results would be
    # free only after the next run of the garbage collector.
    def __init__(self, count: int) -> None:
        self._count = count
        self.wanted: Digest | None = None
        self.clear()

    def __len__(self) -> int:
        return self._count

    def clear(self, count: int | None = None) -> None:
        """Start over with other contributors, and with `count` results if given."""
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

    def missing_indices(self) -> list[int]:
        """Return the chunks whose result is missing."""
        return [index for index, chunk in enumerate(self.chunks) if chunk is None]

    def joined_hashes(self, indices: Sequence[int]) -> bytes:
        """Return the concatenated hashes of these results, all of which must be here."""
        return b"".join(found for index in indices if (found := self._hashes[index]) is not None)

    def all_hashes(self) -> list[Digest]:
        """Return the hash of each result, empty where one is missing."""
        return [found or b"" for found in self._hashes]

    def signed(self, index: int) -> bool:
        """Return True if an owner has signed for the result of this chunk."""
        return self._signed[index] is not None

    def expected_hash(self, index: int) -> Digest | None:
        """Return the hash that the result of this chunk must have, None if unknown."""
        return self._signed[index]

    def unsign(self, index: int) -> None:
        """Forget the signature for a chunk whose owner has changed."""
        self._signed[index] = self._refuted[index] = None

    def denies(self, index: int, settled: Digest) -> bool:
        """Return True if the owner of this chunk has signed for another result than the settled one."""
        return bool({self._signed[index], self._refuted[index]} - {None, settled})

    def sign(self, index: int, digest: Digest) -> None:
        """Store the hash that a chunk's owner signed; drop a result that differs from it."""
        self._signed[index] = digest
        if self._hashes[index] not in (None, digest):
            self.drop(index)

    def drop(self, index: int) -> None:
        """Free the result of a chunk that is here."""
        self._hashes[index], self.chunks[index] = None, None
        self._changed(1)

    def settle(self, digest: Digest) -> None:
        """Set the digest of all results.

        If the present results differ from it, drop them and the owners' signatures.
        """
        if self.digest not in (None, digest):
            signed = self._signed
            self.clear()
            self._refuted = signed
        self.wanted = digest

    def put(self, index: int, chunk: Buffer, found: Digest | None = None) -> None:
        """Store our own result of a chunk that we own. `found`: its hash, if the caller has it."""
        self.chunks[index], self._hashes[index] = chunk, found or blake3.blake3(chunk).digest()
        self._changed(-1)

    def take(
        self,
        index: int,
        chunk: Buffer,
        hashed: Callable[[], Digest],
        *,
        check: Callable[[Buffer, int], object],
        from_owner: bool,
    ) -> bool | None:
        """Store a result with hash `hashed()`. `check(chunk, index)` raises CodecError for an invalid chunk.

        True: stored. False: it cannot be right. None: no signature vouches for it.
        """
        signed = self._signed[index]
        if signed is None and not from_owner:
            return None  # The cheap check comes first, because a peer may send a result repeatedly.
        found = hashed()
        try:
            check(chunk, index)
        except CodecError:
            return False  # No vote may be for a result that cannot be decoded, whatever its owner signed.
        if signed not in (None, found):
            return False
        self.chunks[index], self._hashes[index] = chunk, found
        self._changed(-1)
        return True

    def _changed(self, missing: int) -> None:
        self.missing += missing
        self._digest = None
