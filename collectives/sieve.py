"""The plane of sparse rounds in which chunks have owners: so that what a peer receives does not grow with their number.

A contributor sends each owner the payloads of its chunks. The owner takes the mean of what has come, adds what it has kept of
that chunk from rounds before, sends the largest values of this to all and keeps the rest: error feedback at the owner, too, as
in CocktailSGD (Wang et al., ICML 2023); compare Ok-Topk (Li and Hoefler, arXiv 2201.07598). With gather every payload goes to
everybody.

What is kept changes when the round commits, and only where what was committed is what the owner has made of it. It belongs to
who owns the chunk: so owners hardly change from round to round, whoever comes and goes (`steady`). Where one does, or its
process ends, what it has kept is lost: of one chunk never more than what rounds have not sent of it, and the next owner begins
with nothing. `Kept` counts it. Since results depend on who owns what, another ballot has others (`Settled`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol, cast

import blake3
import numpy as np
from thinwire.collectives.aggregate import RULES
from thinwire.collectives.agreement import Agreement
from thinwire.collectives.outbox import Outbox
from thinwire.collectives.results import Results
from thinwire.collectives.settled import Settled
from thinwire.collectives.shards import Grid
from thinwire.compression.codec import Buffer, Codec, Floats
from thinwire.swarm.protocol import CHUNK_BYTES, MAX_CHUNKS, Digest, Open, PeerId
from thinwire.swarm.rendezvous import rank

PARTS = 128
"""Chunks that a fragment is cut into, if it is large enough: so many peers can share the work."""


class Sifts(Protocol):
    """A sparse codec of chunks, and what an owner makes of several: see compression.portions."""

    def nbytes(self, n: int) -> int:
        """Bytes of the largest payload of n elements."""
        ...

    def check(self, payload: Buffer, n: int) -> float:
        """See contributions.Screen."""
        ...

    def check_sum(self, payload: Buffer, n: int) -> float:
        """The same for a result."""
        ...

    def thin(
        self, payloads: Sequence[Buffer], weights: Sequence[float], kept: Floats | None, n: int
    ) -> tuple[bytes, Floats]:
        """The result of checked contributions to n elements and of what was kept, and what is kept now."""
        ...


def parts(total: int, codec: Sifts, step: int) -> Grid:
    """The cut of a fragment: multiples of `step` elements, payloads of at most CHUNK_BYTES. Raises ValueError for too many."""
    run = -(-total // (PARTS * step)) * step
    while run > step and codec.nbytes(run) > CHUNK_BYTES:
        run = -(-run // (2 * step)) * step
    cut = Grid(total, run)
    if len(cut) > MAX_CHUNKS:
        raise ValueError(f"a fragment of {total} elements needs {len(cut)} chunks, the limit is {MAX_CHUNKS}")
    return cut


@lru_cache(maxsize=16)
def steady(count: int, peers: tuple[PeerId, ...], seed: bytes, fragment: int = 0) -> tuple[PeerId, ...]:
    """Owner of each of `count` chunks: equally many each but for one, and few others when somebody comes or goes.

    Each chunk goes to the first peer of its rendezvous ranking that has room (bounded loads: Mirrokni, Thorup and
    Zadimoghaddam, arXiv 1608.01350).
    """
    least, larger = divmod(count, len(peers))
    loads = dict.fromkeys(peers, 0)
    found = []
    for chunk in range(count):
        for peer in rank(seed, "keeper", peers, fragment * MAX_CHUNKS + chunk):
            if loads[peer] < least or (loads[peer] == least and larger > 0):
                larger -= loads[peer] == least
                loads[peer] += 1
                found.append(peer)
                break
    return tuple(found)


class Kept:
    """What an owner has not sent of its chunks, from round to round. `lost`: chunks whose rest was given up, and the sum of
    the squares of all that.
    """

    def __init__(self) -> None:
        self._rest: dict[int, Floats] = {}
        self.lost: tuple[int, float] = (0, 0.0)

    def of(self, index: int) -> Floats | None:
        """What is kept of a chunk, None where nothing is."""
        return self._rest.get(index)

    def put(self, index: int, rest: Floats) -> None:
        """What is kept of a chunk from now on."""
        self._rest[index] = rest

    def drop(self, index: int) -> None:
        """Somebody else owns this chunk now."""
        rest = self._rest.pop(index, None)
        if rest is not None:
            self.lost = self.lost[0] + 1, self.lost[1] + float(np.dot(rest, rest))

    def clear(self) -> None:
        """The parameters are others than those that all this was left of."""
        for index in list(self._rest):
            self.drop(index)


class Sieve(Settled):
    """See the module. `keeps` seeds who owns what, and is the same in all rounds; the caller keeps `kept`."""

    def __init__(
        self,
        agreement: Agreement,
        *,
        codec: Sifts,
        grid: Grid,
        kept: Kept,
        keeps: bytes,
        outbox: Outbox,
        now: Callable[[], float],
        usual: dict[int, float],
        phase: Callable[[int, str], None] = lambda round, name: None,
    ) -> None:
        super().__init__(
            agreement,
            codec=cast(Codec, codec),  # of which it only needs nbytes and check
            grid=grid,
            rule=RULES["mean"],
            seed=keeps,
            outbox=outbox,
            now=now,
            usual=usual,
            phase=phase,
        )
        self.results = Results(lambda chunk, index: codec.check_sum(chunk, grid.size(index)), len(grid))
        self._sifts, self._kept = codec, kept
        self._rests: dict[int, dict[Digest, Floats]] = {}

    def _basis(self, opened: Open) -> object:
        """See Plane."""
        if opened.adopted is None:
            return opened.contributors, opened.alive, opened.idle
        return super()._basis(opened)

    def _shared(self, opened: Open, working: Sequence[PeerId]) -> tuple[PeerId, ...]:
        """See Exchange."""
        return steady(len(self.grid), tuple(working), self._seed, self.fragment)

    def _reduce(self, index: int) -> None:
        """See Exchange; what has a verdict is not made again."""
        if self.agreement.commit is None:
            super()._reduce(index)

    def _made(self, index: int, payloads: Sequence[Buffer], weights: Sequence[float]) -> Buffer:
        """See Exchange. What is kept changes with the verdict."""
        result, rest = self._sifts.thin(payloads, weights, self._kept.of(index), self.grid.size(index))
        self._rests.setdefault(index, {})[blake3.blake3(result).digest()] = rest
        return result

    def settle(self) -> None:
        """See Plane."""
        super().settle()
        free = self.opened is not None and self.opened.adopted is None
        for index in range(len(self.grid)):
            rest = self._rests.get(index, {}).get(self.results.hashes((index,)))
            if rest is not None:
                self._kept.put(index, rest)
            elif free and self.owners[index] != self.me:
                self._kept.drop(index)
        self._rests = {}
