"""Sparse reduce-scatter and all-gather by chunk owners: data per peer does not grow with the peers.

A contributor sends each owner the payloads of its chunks. The owner averages them, adds the residual of that chunk from
earlier rounds, sends the largest values of the sum to all peers and stores the rest: error feedback at the owner, too,
as in CocktailSGD (Wang et al., ICML 2023); compare Ok-Topk (Li and Hoefler, arXiv 2201.07598). In an all-gather every
payload goes to all peers.

The residuals change with the parameters, when a round is applied, and only for chunks where the committed result is the
owner's own. A residual belongs to the owner of the chunk: so owners hardly change from round to round when peers come
and go (`steady`), and a new owner starts without one.

The leader assigns owners and need not justify dropping one. A former owner therefore stores its residual for `HOLD` more
rounds and resumes with it if it gets the chunk back: a liar that leads now and then cannot destroy residuals. In a
round that a liar leads, values of reassigned chunks that were not sent may be lost; it could lose as many as an owner.
A residual is lost only if the owner loses the chunk for longer, as when owners really change; `OwnerResiduals` counts
that. With any leader, all residuals together are no larger than the parameters.

A checkpoint contains the residuals, and a returning owner resumes with them while the state is the same. If rounds have
passed, the owner must drop them, like its own residual: they may have gone into sums of those rounds that it made
before the restart, and part of them would be sent twice. For the same reason, in the first round that it applies after
the restart, it drops the residuals of chunks whose results it may have made before. With β =
`exchange.owner_residual_decay` the next sum would have included β times the residual: the loss is at most β / (1 − β)
times the longest mean of these chunks. With β = 0.5 that is one mean, of the one part in N that the owner has, once
(tests/unit/compression/sparse/test_portions.py).

Since results depend on the owners, another ballot has other results (`OwnerDependentButterfly`). They are computed
`aside`, because finding the largest of many values takes long and the owner may be in the middle of its inner steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol, cast

import blake3
import numpy as np
from numpy.typing import NDArray
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.rounds.data_planes.owner_dependent_butterfly import OwnerDependentButterfly
from thinwire.collectives.rounds.data_planes.owner_results import ChunkReducer
from thinwire.collectives.topology.shards import Grid
from thinwire.compression.core.types import Buffer, Floats
from thinwire.swarm.messages.registry import CHUNK_BYTES, MAX_CHUNKS, Digest, PeerId, Proposal
from thinwire.swarm.rendezvous_hash import rank

HOLD = 8
"""Rounds for which a former owner stores its residual: the pause after three failures (`PeerBackoff`)."""

PARTS = 128
"""Chunks of a fragment, if it is large enough: as many peers can share the work."""


class SparseButterflyCodec(Protocol):
    """Sparse codec of chunks, with the reduction at an owner: see compression/sparse/portions.py."""

    def nbytes(self, n: int) -> int:
        """Return the bytes of the largest payload of n elements."""
        ...

    def check(self, payload: Buffer, n: int) -> float:
        """Return the squared norm of a contribution, see contributions.Screen."""
        ...

    def check_sum(self, payload: Buffer, n: int) -> float:
        """Return the squared norm of a result."""
        ...

    def reduce(
        self, payloads: Sequence[Buffer], weights: Sequence[float], residual: Floats | None, n: int
    ) -> tuple[bytes, Floats]:
        """Return the result of checked contributions to n elements and the residual, and the new residual."""
        ...


def parts(total: int, codec: SparseButterflyCodec, step: int) -> Grid:
    """Return the grid of a fragment: multiples of `step` elements, payloads of at most CHUNK_BYTES.

    Raises ValueError if it has too many chunks.
    """
    size = -(-total // (PARTS * step)) * step
    while size > step and codec.nbytes(size) > CHUNK_BYTES:
        size = -(-size // (2 * step)) * step
    cut = Grid(total, size)
    if len(cut) > MAX_CHUNKS:
        raise ValueError(f"a fragment of {total} elements needs {len(cut)} chunks, the limit is {MAX_CHUNKS}")
    return cut


@lru_cache(maxsize=16)
def steady(count: int, peers: tuple[PeerId, ...], seed: bytes, fragment: int = 0) -> tuple[PeerId, ...]:
    """Return the owner of each of `count` chunks.

    The numbers of chunks per owner differ by at most one, and few owners change when peers join or leave. Each chunk goes to
    the first peer of its rendezvous ranking that has room (bounded loads: Mirrokni, Thorup and Zadimoghaddam, arXiv
    1608.01350).
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


class OwnerResiduals:
    """Residuals of the chunks of one owner, from round to round; arrays are replaced and never changed.

    `lost`: number of dropped residuals, and the sum of their squares.
    """

    def __init__(self) -> None:
        self._rests: dict[int, tuple[int, Floats]] = {}
        self._left: tuple[int, dict[int, Floats], Collection[int]] = (0, {}, ())
        self._earlier = False
        """True if the residuals are from before a restart, and may have gone into sums of the next round."""
        self.lost: tuple[int, float] = (0, 0.0)

    def of(self, index: int) -> Floats | None:
        """Return the residual of a chunk, None if there is none."""
        found = self._rests.get(index)  # read once: another thread may commit meanwhile
        return None if found is None else found[1]

    def all(self) -> dict[int, Floats]:
        """Return all residuals by chunk."""
        return {index: rest for index, (_, rest) in self._rests.items()}

    def prepare(self, round: int, rests: Mapping[int, Floats], others: Collection[int] = ()) -> None:
        """Prepare the residuals of chunks whose results we computed in a round; `commit` stores them.

        others: chunks whose results other peers computed.
        """
        self._left = round, dict(rests), others

    def commit(self, round: int) -> None:
        """Apply a round: drop residuals of chunks lost long ago, and those that may have been sent already."""
        left, self._left = self._left, (0, {}, ())
        _, rests, others = left if left[0] == round else (round, {}, ())
        self._rests |= {index: (round, rest) for index, rest in rests.items()}
        earlier, self._earlier = self._earlier, False
        for index, (since, _) in list(self._rests.items()):
            spent = earlier and since < round and index not in others
            if spent or since + HOLD < round:
                self._drop(index)

    def clear(self) -> None:
        """Drop all residuals: the parameters have been replaced."""
        self._left, self._earlier = (0, {}, ()), False
        for index in list(self._rests):
            self._drop(index)

    def load(self, rests: Mapping[int, NDArray[Any]], grid: Grid, round: int) -> int:
        """Load residuals that `all` returned before a restart, after `round`.

        Return how many do not fit `grid` and were skipped.
        """
        fit = {
            index: (round, rest.copy())
            for index, rest in rests.items()
            if 0 <= index < len(grid)
            and rest.shape == (grid.size(index),)
            and rest.dtype == np.float32
            and np.isfinite(rest).all()
        }
        self._rests, self._left, self._earlier = fit, (0, {}, ()), True
        return len(rests) - len(fit)

    def _drop(self, index: int) -> None:
        _, rest = self._rests.pop(index)
        self.lost = self.lost[0] + 1, self.lost[1] + float(np.dot(rest, rest))


class SparseButterfly(OwnerDependentButterfly):
    """Data plane of a sparse butterfly.

    owner_residuals: residuals of the chunks that we own, stored by the caller. The other arguments are those of Butterfly;
    all results are computed by `aside`.
    """

    def __init__(
        self,
        agreement: Agreement,
        codec: SparseButterflyCodec,
        grid: Grid,
        *,
        owner_residuals: OwnerResiduals,
        **butterfly: Any,
    ) -> None:
        # It calls only `nbytes` and `check` of the codec: `_compute` needs the residuals, too.
        super().__init__(agreement, cast(ChunkReducer, codec), grid, **butterfly)
        self._codec, self._residuals = codec, owner_residuals
        self._rests: dict[int, dict[Digest, Floats]] = {}

    def _check_result(self, chunk: Buffer, index: int) -> None:
        """Raise CodecError for a result that is no valid sum."""
        self._codec.check_sum(chunk, self.grid.size(index))

    @property
    def due(self) -> tuple[int, ...]:
        """Chunks of ours whose results are not computed yet, in the order of the computation."""
        return self._owned.computing

    def _basis(self, proposal: Proposal) -> object:
        """Return the inputs that determine the results: also the owners."""
        if proposal.adopted is None:
            return proposal.contributors, proposal.alive, proposal.idle
        return super()._basis(proposal)

    def _choose_owners(self, proposal: Proposal, working: Sequence[PeerId]) -> tuple[PeerId, ...]:
        """Return the owner of each chunk."""
        return steady(len(self.grid), tuple(working), self._seed, self.fragment)

    def _reduce(self, index: int) -> None:
        """Queue the computation of a result, unless the round has committed."""
        if self.agreement.commit is None:
            super()._reduce(index)

    def _compute(self, index: int, payloads: Sequence[Buffer], weights: Sequence[float]) -> None:
        """Queue the computation of a result of ours."""
        size = self.grid.size(index)
        make = partial(self._codec.reduce, payloads, weights, self._residuals.of(index), size)
        self._owned.compute(index, make, self._on_computed)

    def _on_computed(self, index: int, made: tuple[Buffer, Any]) -> None:
        """Publish a computed result, and store the residual that it leaves."""
        result, rest = made
        if self.agreement.commit is None:
            found = blake3.blake3(result).digest()
            self._rests.setdefault(index, {})[found] = rest
            super()._on_computed(index, (result, found))

    def finish(self) -> None:
        """Free the round's data. Residuals change when the round is applied."""
        super().finish()
        found = ((index, made.get(self.results.joined_hashes((index,)))) for index, made in self._rests.items())
        self._residuals.prepare(self.round, {index: rest for index, rest in found if rest is not None}, self._others())
        self._rests = {}

    def _others(self) -> Collection[int]:
        """Return chunks whose results other peers certainly made; the owners of an adopted ballot are unknown."""
        commit = self.agreement.commit
        if commit is None or commit.proposal.adopted is not None:
            return ()
        working = [peer for peer in commit.proposal.alive if peer not in commit.proposal.idle]
        return {index for index, owner in enumerate(self._choose_owners(commit.proposal, working)) if owner != self.me}
