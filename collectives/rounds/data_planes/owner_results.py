"""Computation of a chunk's encoded result at its owner, and again in an audit of the owner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import blake3
import numpy as np
from thinwire.collectives.aggregation.means import Rule
from thinwire.collectives.deterministic_rounding import encode
from thinwire.collectives.rounds.data_planes.contributions import Screen
from thinwire.collectives.topology.shards import Grid
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.compression.core.codec import Codec, CodecError
from thinwire.compression.core.exact_block import BufferedCodec
from thinwire.compression.core.types import Buffer
from thinwire.swarm.messages.registry import (
    Commit,
    Contribution,
    Digest,
    PeerId,
    Ready,
)


class ChunkReducer(Screen, Protocol):
    """Checks encoded chunks, and computes one result from several contributions."""

    def nbytes(self, n: int) -> int:
        """Return the bytes of an encoded chunk of n elements."""
        ...

    def result(self, payloads: Sequence[Buffer], weights: Sequence[float], size: int) -> Buffer:
        """Return the encoded aggregate of screened payloads of `size` elements each."""
        ...


class Reducer:
    """Averages and encodes into memory lent by `pool`."""

    def __init__(self, codec: Codec, rule: Rule, pool: BufferPool) -> None:
        self._codec, self._rule, self._pool = codec, rule, pool

    def with_rule(self, rule: Rule) -> Reducer:
        """Return a reducer with another rule and the same codec and memory."""
        return Reducer(self._codec, rule, self._pool)

    def nbytes(self, n: int) -> int:
        """Return the bytes of an encoded chunk of n elements."""
        return self._codec.nbytes(n)

    def check(self, payload: Buffer, n: int) -> float:
        """Return the squared L2 norm of an encoded chunk of n elements. Raises CodecError."""
        return self._codec.check(payload, n)

    def result(self, payloads: Sequence[Buffer], weights: Sequence[float], size: int) -> Buffer:
        """Return the encoded aggregate of screened payloads of `size` elements each."""
        codec, encoded = self._codec, self._pool.lend(self._codec.nbytes(size))
        if codec.plain:
            self._rule(codec, payloads, weights, np.frombuffer(encoded, np.float32))
            return encoded
        mean = np.frombuffer(self._pool.lend(4 * size), np.float32)
        self._rule(codec, payloads, weights, mean)
        encode(codec, mean, np.frombuffer(encoded, np.uint8))
        if isinstance(codec, BufferedCodec):
            codec.combine(payloads, weights, size, encoded)
        return encoded


@dataclass(frozen=True, slots=True)
class AuditData:
    """Data of a committed round from which a peer, with the contributions, computes its results again.

    - `digest`: of all results.
    - `announced`: hashes of each contributor's chunks, as the decided proposal names them.
    - `claims`: for each chunk its owner, and the hash of the result that the owner has signed for; empty if an announcement is
      not here.
    """

    round: int
    fragment: int
    lineage: bytes
    digest: Digest
    contributors: tuple[Contribution, ...]
    announced: Mapping[PeerId, bytes]
    claims: Mapping[int, tuple[PeerId, Digest]]
    reducer: ChunkReducer
    grid: Grid

    def inputs(self, index: int) -> list[Digest]:
        """Return the announced hash of each contribution to a chunk, in the order of the contributors."""
        return [self.announced[entry.peer][32 * index : 32 * index + 32] for entry in self.contributors]

    def confirms(self, index: int, payloads: Mapping[Digest, Buffer]) -> bool:
        """Return True if an honest owner signs its claim for a chunk.

        payloads: the contributions, by their hashes, which the caller has checked. The same bits follow on every machine
        (docs/design/aggregation.md).
        """
        rows, size = [payloads[found] for found in self.inputs(index)], self.grid.size(index)
        try:
            for row in rows:
                self.reducer.check(row, size)
        except CodecError:
            return False  # an honest owner refuses this contribution
        weights = [float(entry.weight) for entry in self.contributors]
        return blake3.blake3(self.reducer.result(rows, weights, size)).digest() == self.claims[index][1]


def audit_data(
    commit: Commit,
    announced: Callable[[Contribution], Ready | None],
    claims: Mapping[int, tuple[PeerId, Digest]],
    reducer: ChunkReducer,
    grid: Grid,
) -> AuditData:
    """Return the AuditData of a committed round.

    announced: returns the announcement that an entry names, if it is here.
    """
    proposal = commit.proposal
    found = {entry.peer: ready.hashes for entry in proposal.contributors if (ready := announced(entry)) is not None}
    if len(found) < len(proposal.contributors):
        claims = {}
    place = proposal.round, proposal.fragment, proposal.lineage, commit.digest
    return AuditData(*place, proposal.contributors, found, claims, reducer, grid)
