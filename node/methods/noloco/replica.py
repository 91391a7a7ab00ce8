"""Replica that averages with one or a few partners per round: NoLoCo (arXiv 2506.10911).

With Δ = θ − φ after H inner steps (the pseudo-gradient with the opposite sign), means over
the round's group (a pair, or one replica alone), and α, β, γ:

    δ ← α δ + β mean(Δ) − γ (φ − mean(φ)),    φ ← φ + δ

The paper prints −β with this Δ, which would ascend; its code adds. Replicas and their digests differ. The mean of all replicas
makes exactly the outer step of DiLoCo if all peers of each group apply the same contributions (for other cases see
`collectives/gossip/group.py`). With a sparse codec mean(Δ) is that of SparseLoCo (`FlatSparse.mean`). In chunks whose slow
weights do not travel in a round the step has no γ-term.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from thinwire.collectives.gossip.means import Means
from thinwire.collectives.gossip.pair_codec import PairCodec, payload_of
from thinwire.collectives.state_sync.state_sync import FetchedState
from thinwire.collectives.topology.shards import Grid
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.device import empty, finite, placed
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica import Replica
from thinwire.node.state.replica_buffers import Read
from thinwire.node.state.shared_state import SharedState
from thinwire.node.state.tensor_file import Array, Tensors
from thinwire.swarm.messages.registry import PeerId
from thinwire.swarm.method_specs.noloco import NoLoCo

_RESIDUAL = "residual/"
"""Prefix of the residual's tensors in a checkpoint; the name of the parameter follows."""


@dataclass(frozen=True, slots=True)
class GossipStep:
    """Coefficients α, β and γ of the step, and the part of the residual that the next round carries over."""

    momentum: float
    lr: float
    gamma: float
    residual_decay: float = 1.0


def step_of(outer: NoLoCo) -> GossipStep:
    """Return the coefficients of a manifest."""
    return GossipStep(outer.momentum, outer.lr, outer.gamma, outer.residual_decay)


class GossipReplica(Replica):
    """Replica in which theta is φ and momentum is δ.

    `residual`: what the codec lost of Δ, added to the next one; empty if lossless.
    """

    alike: ClassVar[bool] = False
    residual: Floats = np.empty(0, np.float32)
    _lent: Floats | None = None
    """In a twin for a checkpoint: the array of the residual, which must not change. Else None."""

    @property
    def sent_codec(self) -> object:
        """The codec of Δ; that of the slow weights, which are on the host, encodes there."""
        return self.codec.fast

    def base(self, grid: Grid, codecs: PairCodec) -> Iterator[memoryview]:
        """Yield the encoded chunks of the slow weights that travel in the next round.

        They are known as soon as the previous round is over.
        """
        for index in codecs.mixed(grid, self.round + 1):
            start, stop = grid.span(index)
            assert codecs.slow is not None
            payload = np.empty(codecs.slow.nbytes(stop - start), np.uint8)
            codecs.slow.encode(self.theta[start:stop], payload)
            yield payload.data

    def offer(self, read: Read, grid: Grid, codecs: PairCodec) -> Iterator[memoryview]:
        """Yield the encoded chunks of the contribution after the inner steps.

        Raises FloatingPointError if a parameter is not finite: such a contribution must not be sent.
        """
        for index in range(len(grid)):
            start, stop = grid.span(index)
            fast = empty(stop - start, self.device)
            read(start, stop, fast)
            if not finite(fast):
                raise FloatingPointError(f"the parameters are not finite in elements {start} to {stop}")
            if codecs.slow is not None:
                fast -= placed(self.theta[start:stop], self.device)
                if self.residual.size:
                    fast += placed(self.residual[start:stop], self.device)
            yield payload_of(codecs.fast, fast)

    def install(self, fetched: FetchedState) -> int:
        """Take over a fetched state; the residual of the old state is dropped."""
        self.residual = np.empty(0, np.float32)
        return super().install(fetched)

    def twin(self, *, private: bool = False) -> Self:
        twin = super().twin(private=private)
        if private and self.residual.size:
            twin._lent = self.residual
        return twin

    def release_private(self) -> None:
        """End the use of the residual by this twin."""
        self._lent = None

    def _reads(self, replica: SharedState) -> bool:
        own = isinstance(replica, GossipReplica) and self._lent is replica.residual
        return own or super()._reads(replica)

    def _leave_arrays(self, readers: Sequence[SharedState]) -> None:
        residual = self.residual
        if any(isinstance(twin, GossipReplica) and twin._lent is residual for twin in readers):
            residual = residual.copy()
        super()._leave_arrays(readers)
        self.residual = residual

    def private_state(self, layout: Layout) -> dict[str, Array]:
        """Return the residual, if there is one."""
        tensors = layout.split(self.residual) if self.residual.size else {}
        return {f"{_RESIDUAL}{name}": tensor for name, tensor in tensors.items()}

    def load_private(self, tensors: Tensors, layout: Layout) -> str:
        """Load the residual. Raises KeyError or ValueError, with nothing changed, if it does not fit."""
        if tensors:
            residual = layout.flat({name.removeprefix(_RESIDUAL): one for name, one in tensors.items()})
            if residual.size != self.theta.size:
                raise ValueError(f"a residual of {residual.size} elements, expected {self.theta.size}")
            self.residual = residual
        return ""

    def own(self, start: int, stop: int, out: Floats) -> None:
        """Read the slow weights, for a replica without a contribution."""
        out[:] = self.theta[start:stop]

    def lengths(self, payloads: Sequence[Sequence[Buffer]], grid: Grid, codecs: PairCodec) -> list[float]:
        """Return the L2 distance of each checked contribution from φ: √(|Δ|² + |φ' − φ|²), or |θ' − φ|.

        The slow weights are those that travel in the next round.
        """
        squares = [0.0] * len(payloads)
        scratch, mixed = np.empty(grid.chunk, np.float32), codecs.mixed(grid, self.round + 1)
        for index in range(len(grid)):
            start, stop = grid.span(index)
            for which, payload in enumerate(payloads):
                out = scratch[: stop - start]
                codecs.fast.decode(payload[index], out)
                if codecs.slow is None:
                    out -= self.theta[start:stop]
                squares[which] += float(np.dot(out, out))
                if codecs.slow is not None and index in mixed:
                    codecs.slow.decode(payload[len(grid) + mixed.index(index)], out)
                    out -= self.theta[start:stop]
                    squares[which] += float(np.dot(out, out))
        return [float(np.sqrt(square)) if np.isfinite(square) else float("inf") for square in squares]

    def length(self, means: Means, grid: Grid, codecs: PairCodec) -> float:
        """Return the L2 norm of checked means: √(|mean(Δ)|² + |mean(φ) − φ|²), or |mean(θ) − φ|."""
        square, scratch = 0.0, np.empty(grid.chunk, np.float32)
        for index in range(len(grid)):
            start, stop = grid.span(index)
            out = scratch[: stop - start]
            if means.fast(index, out):
                if codecs.slow is None:
                    out -= self.theta[start:stop]
                square += float(np.dot(out, out))
            if means.pull(index, out):
                square += float(np.dot(out, out))
        return float(np.sqrt(square)) if np.isfinite(square) else float("inf")

    def step(
        self,
        read: Read,
        mine: Sequence[Buffer],
        means: Means | None,
        grid: Grid,
        codecs: PairCodec,
        *,
        members: Sequence[PeerId],
        pull: GossipStep,
    ) -> None:
        """Commit the next round with the means of the group; None for a replica alone.

        `mine`: our payloads of `offer`. `read` gives the parameters from which they were encoded. Where a chunk has no
        mean the step is exact and the residual stays. The payloads have been checked, so the step cannot fail half-way.
        """
        alpha, beta, gamma = np.float32(pull.momentum), np.float32(pull.lr), np.float32(pull.gamma)
        if means is not None and not codecs.exact and not self.residual.size:
            self.residual = np.zeros(self.theta.size, np.float32)
        size = min(grid.chunk, grid.total)
        buffers = [np.empty(size, np.float32) for _ in range(3)]
        for index in range(len(grid)):
            start, stop = grid.span(index)
            phi, delta = self.theta[start:stop], self.momentum[start:stop]
            fast, own, one = (part[: stop - start] for part in buffers)
            delta *= alpha
            if means is None or not means.fast(index, fast):
                read(start, stop, fast)
                fast -= phi
            elif codecs.slow is None:
                fast -= phi
            elif not codecs.exact:
                read(start, stop, own)
                own -= phi
                codecs.fast.decode(mine[index], one)
                residual = self.residual[start:stop]
                residual += own
                residual -= one
                residual *= np.float32(pull.residual_decay)
            delta += beta * fast
            if means is not None and means.pull(index, one):
                delta += gamma * one
            phi += delta
        self.round += 1
        self.members, self.lives = tuple(sorted(members)), b""  # Partners vote on nothing, so their lives do not count.
        self.seal()
