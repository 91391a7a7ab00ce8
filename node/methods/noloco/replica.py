"""The outer state of a replica that averages with one partner a round, or with some: NoLoCo (arXiv 2506.10911).

With Δ = θ − φ after H inner steps, means over the group of the round (a pair, or the replica alone), α, β and γ:

    δ ← α δ + β mean(Δ) − γ (φ − mean(φ)),    φ ← φ + δ

The paper prints −β with this Δ, which climbs; its code adds. Replicas are not equal, and their digests differ; their mean makes
exactly the outer step of DiLoCo, as long as all of each group apply it with the same contributions (what becomes of it else
is in `collectives/gossip/group.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from thinwire.collectives.deterministic_rounding import encode
from thinwire.collectives.gossip.pair_codec import PairCodec
from thinwire.collectives.state_sync import FetchedState
from thinwire.collectives.topology.shards import Grid
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.device import empty, finite, placed
from thinwire.node.state.replica import Read, Replica
from thinwire.swarm.messages.registry import PeerId


@dataclass(frozen=True, slots=True)
class GossipStep:
    """α, β and γ of the module's step."""

    momentum: float
    lr: float
    gamma: float


class GossipReplica(Replica):
    """theta is φ and momentum is δ of the module. `residual`: what the codec has left out of Δ so far, sent with the next one;
    empty while nothing was lost.
    """

    alike: ClassVar[bool] = False
    residual: Floats = np.empty(0, np.float32)

    @property
    def sent_codec(self) -> object:
        """The codec of Δ; that of the slow weights, which are on the host, encodes there."""
        return self.codec.fast

    def base(self, grid: Grid, halves: PairCodec) -> Iterator[memoryview]:
        """The slow weights, chunk by chunk, where they travel: known as soon as the round before is made."""
        for index in range(len(grid) if halves.slow is not None else 0):
            start, stop = grid.span(index)
            assert halves.slow is not None
            payload = np.empty(halves.slow.nbytes(stop - start), np.uint8)
            halves.slow.encode(self.theta[start:stop], payload)
            yield payload.data

    def offer(self, read: Read, grid: Grid, halves: PairCodec) -> Iterator[memoryview]:
        """What is sent to the partner after the inner steps, chunk by chunk: never a whole copy of it.

        Raises FloatingPointError when a parameter is not finite: such a contribution must not be sent.
        """
        for index in range(len(grid)):
            start, stop = grid.span(index)
            fast = empty(stop - start, self.device)
            read(start, stop, fast)
            if not finite(fast):
                raise FloatingPointError(f"the parameters are not finite in elements {start} to {stop}")
            if halves.slow is not None:
                fast -= placed(self.theta[start:stop], self.device)
                if self.residual.size:
                    fast += placed(self.residual[start:stop], self.device)
            payload = np.empty(halves.fast.nbytes(stop - start), np.uint8)
            encode(halves.fast, fast, payload)
            yield payload.data

    def install(self, fetched: FetchedState) -> int:
        """See Replica; what was left out of the old state's steps says nothing about the new one."""
        self.residual = np.empty(0, np.float32)
        return super().install(fetched)

    def own(self, start: int, stop: int, out: Floats) -> None:
        """A Read of the slow weights: of a replica that has nothing of its own to add."""
        out[:] = self.theta[start:stop]

    def lengths(self, payloads: Sequence[Sequence[Buffer]], grid: Grid, halves: PairCodec) -> list[float]:
        """How far each of several checked contributions is from φ, as L2 norms: √(|Δ|² + |φ' − φ|²), or |θ' − φ|."""
        squares = [0.0] * len(payloads)
        scratch = np.empty(grid.chunk, np.float32)
        for index in range(len(grid)):
            start, stop = grid.span(index)
            for which, payload in enumerate(payloads):
                out = scratch[: stop - start]
                halves.fast.decode(payload[index], out)
                if halves.slow is None:
                    out -= self.theta[start:stop]
                squares[which] += float(np.dot(out, out))
                if halves.slow is not None:
                    halves.slow.decode(payload[len(grid) + index], out)
                    out -= self.theta[start:stop]
                    squares[which] += float(np.dot(out, out))
        return [float(np.sqrt(square)) if np.isfinite(square) else float("inf") for square in squares]

    def step(
        self,
        read: Read,
        mine: Sequence[Buffer],
        others: Sequence[Sequence[Buffer]],
        grid: Grid,
        halves: PairCodec,
        *,
        members: Sequence[PeerId],
        pull: GossipStep,
        place: int = 0,
    ) -> None:
        """Commit the next round with what `mine` sent and `others` did (what `offer` gave, then what `base` did); with nobody
        else it is exact and keeps the residual.

        `others` are in peer-id order, `place` of them before us: all of a group add up in the same order, so that replicas
        that were equal stay equal while the group is everybody. Cannot fail half-way: the payloads have been checked. `read`
        gives the parameters that `mine` was made of.
        """
        alpha, beta, gamma = np.float32(pull.momentum), np.float32(pull.lr), np.float32(pull.gamma)
        share = np.float32(1.0 / (1 + len(others)))
        if others and not halves.exact and not self.residual.size:
            self.residual = np.zeros(self.theta.size, np.float32)
        size = min(grid.chunk, grid.total)
        fast_mean, slow_mean, scratch, spare = (np.empty(size, np.float32) for _ in range(4))
        for index in range(len(grid)):
            start, stop = grid.span(index)
            phi, delta = self.theta[start:stop], self.momentum[start:stop]
            fast, slow, one, away = (part[: stop - start] for part in (fast_mean, slow_mean, scratch, spare))
            if not others:
                read(start, stop, fast)
                fast -= phi
                delta *= alpha
                delta += beta * fast
                phi += delta
                continue
            fast[:], slow[:] = 0.0, 0.0
            for turn, payload in enumerate((*others[:place], mine, *others[place:])):
                halves.fast.decode(payload[index], one)
                fast += one
                if turn == place and not halves.exact:
                    read(start, stop, away)
                    away -= phi
                    self.residual[start:stop] += away
                    self.residual[start:stop] -= one
                if halves.slow is not None:
                    halves.slow.decode(payload[len(grid) + index], one)
                    slow += one
                    if turn == place:
                        away[:] = one
            fast *= share
            delta *= alpha
            if halves.slow is None:
                fast -= phi
                delta += beta * fast
            else:
                slow *= share
                away -= slow
                delta += beta * fast
                delta -= gamma * away
            phi += delta
        self.round += 1
        self.members = tuple(sorted(members))
        self.seal()
