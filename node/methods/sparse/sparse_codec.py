"""Sparse codecs of a run, which know its layout.

They cut payloads into chunks, check them and join them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from thinwire.collectives.rounds.data_planes.allgather.payload_pieces import joined, payloads_of, piece_grid, pieces_of
from thinwire.collectives.rounds.data_planes.sparse_butterfly import parts
from thinwire.collectives.topology.shards import Grid
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.exact_block import ExactBlock
from thinwire.compression.core.parameter_chunks import Chunks
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.sparse import mean as sparsemean
from thinwire.compression.sparse.demo import Coefficients, Demo
from thinwire.compression.sparse.portions import PortionCodecs
from thinwire.compression.sparse.topk import Selected, Sparse


@dataclass(frozen=True, slots=True)
class SparseCodec:
    """Sparse codec with the layout of the model, which is needed to check payloads."""

    codec: Sparse | Demo
    chunks: Chunks
    block: ExactBlock = field(default=ExactBlock(), kw_only=True)
    """Buffers at the end of each payload."""

    @property
    def spec(self) -> str:
        more = f" buffers({self.block.averaged},{self.block.copied})" if self.block.size else ""
        return f"{self.codec.spec} {self.chunks.digest.hex()}{more}"

    @property
    def bound(self) -> int:
        """Largest payload in bytes."""
        return self.codec.bound(self.chunks) + self.block.nbytes

    def decode(self, payload: Buffer) -> Selected | Coefficients:
        """Decode a payload. Raises CodecError."""
        if not self.block.size:
            return self.codec.decode(payload, self.chunks)
        self.block.read(payload)
        return self.codec.decode(memoryview(payload).cast("B")[: -self.block.nbytes], self.chunks)

    def grid(self, total: int) -> Grid:
        """Return the chunk grid of a payload. Raises ValueError if it is too large."""
        return piece_grid(self.bound)

    def cut(self, payload: bytes, choice: Any, pieces: Grid) -> list[memoryview]:
        """Cut our payload into chunks. `choice`: the entries that it has."""
        return pieces_of(payload, pieces)

    def fits(self, chunks: int, pieces: Grid) -> bool:
        """Return True if a payload can have so many chunks."""
        return 0 < chunks <= len(pieces)

    def join(self, chunks: Sequence[Buffer], pieces: Grid) -> Selected | Coefficients:
        """Decode the payload of one contributor from its chunks. Raises CodecError."""
        return self.decode(joined(chunks))

    def nbytes(self, n: int) -> int:
        """Return the largest size in bytes of a chunk with `n` units of the grid, which are bytes here."""
        return n

    def read(self, results: Sequence[Buffer], weights: list[float], pieces: Grid) -> tuple[list[Any], list[float]]:
        """Decode the results of a round; return them and their weights. Raises CodecError."""
        return [self.decode(payload) for payload in payloads_of(results, pieces)], weights

    def buffers_of(self, results: Sequence[Buffer], weights: list[float], pieces: Grid) -> Floats:
        """Return the buffers of a round. Raises CodecError."""
        return self.block.combine([self.block.read(payload) for payload in payloads_of(results, pieces)], weights)

    def check(self, payload: Buffer, n: int) -> float:
        """Check a payload of at most `n` bytes; return its squared norm. Raises CodecError."""
        if memoryview(payload).nbytes > n:
            raise CodecError(f"a payload of {memoryview(payload).nbytes} bytes, at most {n} are needed", "length")
        found = self.decode(payload)
        selected = found.selected if isinstance(found, Coefficients) else found
        return float(sum(sparsemean.norm(selected, part) ** 2 for part in selected.parts))


@dataclass(frozen=True, slots=True)
class OwnedChunkCodec(SparseCodec):
    """Sparse codec for chunks with owners: one payload and one result for each portion of the parameters."""

    portions: PortionCodecs

    @property
    def spec(self) -> str:
        return f"{self.portions.spec} {self.chunks.digest.hex()}"

    def grid(self, total: int) -> Grid:
        """Return the grid of chunks that have owners."""
        return parts(total, self, self.codec.chunk)

    def cut(self, payload: bytes, choice: Any, pieces: Grid) -> list[memoryview]:
        return list(self.portions.split(payload, choice))

    def fits(self, chunks: int, pieces: Grid) -> bool:
        return chunks == len(pieces)

    def join(self, chunks: Sequence[Buffer], pieces: Grid) -> Selected | Coefficients:
        for index, chunk in enumerate(chunks):
            self.check(chunk, pieces.size(index))
        return SparseCodec.join(self, chunks, pieces)

    def read(self, results: Sequence[Buffer], weights: list[float], pieces: Grid) -> tuple[list[Any], list[float]]:
        """Decode the results; together they are one payload with the mean."""
        return [self.portions.wide.decode(b"".join(results), self.chunks)], [1.0]

    def nbytes(self, n: int) -> int:
        """Return the largest payload of `n` values in bytes.

        See SparseButterflyCodec, also for the next three methods.
        """
        return self.portions.nbytes(n)

    def check(self, payload: Buffer, n: int) -> float:
        return self.portions.check(payload, n)

    def check_sum(self, payload: Buffer, n: int) -> float:
        return self.portions.check_sum(payload, n)

    def reduce(
        self, payloads: Sequence[Buffer], weights: Sequence[float], residual: Floats | None, n: int
    ) -> tuple[bytes, Floats]:
        return self.portions.reduce(payloads, weights, residual, n)
