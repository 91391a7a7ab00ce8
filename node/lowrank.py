"""The outer state of a replica that averages matrices as two thin factors: DiLoCo's step with PowerSGD (arXiv 1905.13727).

An outer step is two rounds, one for each factor, because the second depends on the mean of the first. They are one transaction:
the mean of the first factors is part of the state, with the names and weights of those it is of, and the step is made when the
second round's record has the same ones. Else both rounds come to nothing, on all replicas alike, since all judge by the same
two records; what was trained is still in the model and is sent anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import blake3
import msgspec
import numpy as np
from thinwire.collectives.shards import Grid, grid
from thinwire.collectives.statesync import Fetched
from thinwire.compression import registry
from thinwire.compression.codec import Buffer, Codec, Floats
from thinwire.compression.kernels import outer_step
from thinwire.compression.lowrank import LowRank, PowerSGD, warm_up
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import Contribution, PeerId

from .fragments import Layout
from .outer import Read, Replica
from .sparse import chunks_of
from .tensorfile import Array, Tensors

NAME = 32
"""Numbers that name the contributors of the first round: the bytes of a hash."""


class LowRankReplica(Replica):
    """See the module. `memory` holds the residual, and what is pending between the two rounds. Made by `begin`.

    After parameters and momentum the state has: turn (0 before the first round of a step, 1 before the second), the name of
    the first round's contributors, Q of the last step, and the mean of the first factors (zeros while turn is 0).
    """

    memory: LowRank
    power: PowerSGD
    cuts: tuple[Grid, Grid]
    own: Floats | None = None
    """Our vector for the second round of a step in progress."""

    @classmethod
    def begin(cls, manifest: Manifest, layout: Layout, codec: Any, theta: Floats, members: Sequence[PeerId]) -> Self:
        """See Replica."""
        warm_up()
        power: Any = registry.parse(manifest.exchange.codec)
        chunks = chunks_of(layout)
        sizes = power.first(chunks), power.second(chunks)
        replica = cls(layout.digest, theta, members, extra=1 + NAME + sum(sizes))
        replica.power = power
        replica.memory = LowRank(power, chunks, manifest.run.seed, manifest.outer.on_exclusion)
        replica.cuts = grid(sizes[0], codec), grid(max(1, sizes[1]), codec)
        replica.q[:] = replica.memory.q
        replica.seal()
        return replica

    @property
    def turn(self) -> int:
        """0 or 1: which round of a step is next."""
        return int(self.extra[0])

    @property
    def q(self) -> Floats:
        """Q of the last step (a view)."""
        return self.extra[1 + NAME : 1 + NAME + self.power.second(self.memory.chunks)]

    @property
    def first(self) -> Floats:
        """The mean of the first factors (a view)."""
        return self.extra[1 + NAME + self.q.size :]

    def cut(self, usual: Grid) -> Grid:
        """See Replica."""
        return self.cuts[self.turn]

    def offer(self, read: Read) -> Floats | None:
        """The vector that we send in the next round; None when we have no part in it: the second round is for those whom the
        first one's record names. Raises FloatingPointError when something is not finite.
        """
        if self.turn:
            return self.own
        self.rollback()
        delta = np.empty(self.theta.size, np.float32)
        read(0, delta.size, delta)
        np.subtract(self.theta, delta, out=delta)
        try:
            return self.memory.prepare(delta)
        except ValueError as error:
            raise FloatingPointError(f"the pseudo-gradient is not finite: {error}") from None

    def rollback(self) -> None:
        """As though nothing had been offered."""
        self.own = None
        if self.memory.pending:
            self.memory.rollback()

    def commit(
        self,
        results: Sequence[Buffer],
        contributors: Sequence[Contribution],
        codec: Codec,
        *,
        me: PeerId,
        members: Sequence[PeerId],
        lr: float,
        momentum: float,
        nesterov: bool,
    ) -> bool:
        """Commit the next round; whether it has made a step. Cannot fail half-way: the results have been checked."""
        mean, cut = np.empty(self.cut(self.cuts[0]).total, np.float32), self.cut(self.cuts[0])
        for index, payload in enumerate(results):
            codec.decode(payload, mean[slice(*cut.span(index))])
        named = any(entry.peer == me for entry in contributors)
        step: Floats | None = None
        if not self.turn:
            if self.memory.pending:
                own = self.memory.turn(mean)
                self.own = own if named else None
            if self.q.size:
                self.extra[0], self.extra[1 : 1 + NAME], self.first[:] = 1, _name(contributors), mean
            else:
                step = self._finished(mean, np.empty(0, np.float32), excluded=not named)
        else:
            if np.array_equal(self.extra[1 : 1 + NAME], _name(contributors)):
                step = self._finished(self.first.copy(), mean, excluded=not named)
                self.q[:] = mean
            self.rollback()
            self.extra[: 1 + NAME], self.first[:] = 0, 0
        if step is not None:
            outer_step(self.theta, self.momentum, step, lr, momentum, nesterov)
        self.round += 1
        self.members = tuple(sorted(members))
        self.seal()
        return step is not None

    def _finished(self, first: Floats, second: Floats, *, excluded: bool) -> Floats:
        """What all have sent comes to."""
        if self.memory.pending:
            return self.memory.commit(second, excluded=excluded)
        self.memory.load(self.memory.residual.copy(), second)
        self.power.orthonormalise(first, self.memory.chunks)
        return self.power.rebuild(first, second, self.memory.chunks)

    def install(self, fetched: Fetched) -> int:
        """See Replica; what was left out of the old state's steps says nothing about another one."""
        self.rollback()
        residual = self.memory.residual.copy()
        if fetched.offer.digest != self.digest:
            residual[:] = 0
        changed = super().install(fetched)
        self.memory.load(residual, self.q)
        return changed

    def private(self, layout: Layout) -> dict[str, Array]:
        """See Replica."""
        return {f"residual/{name}": tensor for name, tensor in layout.split(self.memory.residual).items()}

    def recall(self, tensors: Tensors, layout: Layout) -> None:
        """See Replica."""
        residual = layout.flat({name.removeprefix("residual/"): one for name, one in tensors.items()})
        self.memory.load(residual, self.q)


def _name(contributors: Sequence[Contribution]) -> Floats:
    """Who contributes, with which weight, as numbers that every state may hold."""
    plain = [(entry.peer, entry.weight) for entry in contributors]
    return np.frombuffer(blake3.blake3(msgspec.msgpack.encode(plain)).digest(), np.uint8).astype(np.float32)
