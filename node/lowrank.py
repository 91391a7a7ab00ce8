"""The outer state of a replica that averages matrices as two thin factors: DiLoCo's step with PowerSGD (arXiv 1905.13727).

An outer step is two rounds, one for each factor, because the second depends on the mean of the first. They are one transaction:
the mean of the first factors is part of the state, with the names and weights of those it is of (`pledges`), and the step is
made when the second round's record has the same ones. Else both rounds come to nothing, on all replicas alike, since all judge
by the same two records; what was trained is still in the model and is sent anew, and who was missing sits out the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
from thinwire.collectives.proposal import Terms
from thinwire.collectives.shards import Grid, grid
from thinwire.collectives.statesync import Fetched
from thinwire.compression import registry
from thinwire.compression.chunks import Chunks
from thinwire.compression.codec import Buffer, Codec, Floats
from thinwire.compression.kernels import outer_step
from thinwire.compression.lowrank import LowRank, PowerSGD, warm_up
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import Contribution, PeerId

from . import pledges
from .fragments import Layout
from .outer import Read, Replica
from .sparse import chunks_of, keep
from .tensorfile import Array, Tensors

_Q = 1 + pledges.SIZE
"""Where Q begins in what the state has beside parameters and momentum."""


def cuts(power: PowerSGD, chunks: Chunks, codec: Codec) -> tuple[Grid, Grid]:
    """The chunk grids of the two rounds of a step. Raises ValueError when a factor is too large."""
    return grid(power.first(chunks), codec), grid(max(1, power.second(chunks)), codec)


class LowRankReplica(Replica):
    """See the module. `memory` holds the residual, and what is pending between the two rounds. Made by `begin`.

    After parameters and momentum the state has: turn (0 before the first round of a step, 1 before the second), the pledges,
    Q of the last step, and the mean of the first factors (zeros while turn is 0).
    """

    memory: LowRank
    power: PowerSGD
    cuts: tuple[Grid, Grid]
    own: Floats | None = None
    """Our vector for the second round of a step in progress."""
    sent: dict[int, Floats]
    """What we have announced for the first round in progress, by the number of the announcement: any may be its record's."""

    @classmethod
    def begin(cls, manifest: Manifest, layout: Layout, codec: Any, theta: Floats, members: Sequence[PeerId]) -> Self:
        """See Replica."""
        warm_up()
        power: Any = registry.parse(manifest.exchange.codec)
        chunks = chunks_of(layout)
        extra = _Q + power.first(chunks) + power.second(chunks)
        replica = cls(layout.digest, theta, members, extra=extra)
        replica.power, replica.sent = power, {}
        replica.memory = LowRank(power, chunks, manifest.run.seed, manifest.outer.on_exclusion)
        replica.cuts = cuts(power, chunks, codec)
        replica.q[:] = replica.memory.q
        replica.seal()
        return replica

    @property
    def turn(self) -> int:
        """0 or 1: which round of a step is next, whatever a fetched state says."""
        return int(self.extra[0] == 1)

    @property
    def notes(self) -> Floats:
        """The pledges (a view)."""
        return self.extra[1:_Q]

    @property
    def q(self) -> Floats:
        """Q of the last step (a view)."""
        return self.extra[_Q : _Q + self.power.second(self.memory.chunks)]

    @property
    def first(self) -> Floats:
        """The mean of the first factors (a view)."""
        return self.extra[_Q + self.q.size :]

    def cut(self, usual: Grid) -> Grid:
        """See Replica."""
        return self.cuts[self.turn]

    def terms(self, usual: Terms) -> Terms:
        """See Replica. The second round is of those of the first, however few are left: it is it that needed so many."""
        noted = pledges.read(self.notes)
        if self.turn:
            return replace(usual, weights=pledges.weights(noted), min_peers=0)
        return replace(usual, spare=pledges.resting(noted))

    def offer(self, read: Read, attempt: int | None = None) -> Floats | None:
        """The vector that we send in the next round; None when we have no part in it: the second round is for those whom the
        first one's record names. `attempt`: the number with which it will be announced, if it will.

        Raises FloatingPointError when something is not finite.
        """
        if self.turn:
            return self.own
        self.rollback()
        self.memory.adopt(self.q)
        try:
            first = self.memory.prepare(self.delta(read))
        except ValueError as error:
            raise FloatingPointError(f"the pseudo-gradient is not finite: {error}") from None
        if attempt is not None:
            keep(self.sent, attempt, first)
        return first

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
        since: Read | None = None,
    ) -> bool:
        """Commit the next round; whether it has made a step. `since`: reads the model, when training went on after the first
        round. Cannot fail half-way: the results have been checked.
        """
        mean, cut = np.empty(self.cut(self.cuts[0]).total, np.float32), self.cut(self.cuts[0])
        for index, payload in enumerate(results):
            codec.decode(payload, mean[slice(*cut.span(index))])
        weights = {entry.peer: entry.weight for entry in contributors}
        noted, step = pledges.read(self.notes), None
        if not self.turn:
            # An older announcement of ours may be the record's. What we do not know any more is not ours.
            attempt = next((entry.attempt for entry in contributors if entry.peer == me), None)
            sent = None if attempt is None else self.sent.get(attempt)
            self.sent = {}
            if self.memory.pending:
                own = self.memory.turn(mean, sent)
                self.own = None if sent is None else own
            if self.q.size:
                pledges.begin(noted, contributors)
                self.extra[0], self.first[:] = 1, mean
            else:
                step = self._finished(mean, np.empty(0, np.float32), excluded=sent is None)
        else:
            if pledges.weights(noted) == weights:
                step = self._finished(self.first.copy(), mean, excluded=me not in weights, since=since)
                self.q[:] = mean
            self.rollback()
            pledges.settle(noted, weights, members)
            self.extra[0], self.first[:] = 0, 0
        pledges.write(noted, self.notes)
        if step is not None:
            outer_step(self.theta, self.momentum, step, lr, momentum, nesterov)
        self.round += 1
        self.members = tuple(sorted(members))
        self.seal()
        return step is not None

    def _finished(self, first: Floats, second: Floats, *, excluded: bool, since: Read | None = None) -> Floats:
        """What all have sent comes to."""
        if self.memory.pending:
            delta = None if since is None else self.delta(since)
            if delta is not None and not np.isfinite(delta).all():
                delta = None  # what came since is of no use
            return self.memory.commit(second, excluded=excluded, delta=delta)
        self.memory.load(self.memory.residual.copy(), second)
        self.power.orthonormalise(first, self.memory.chunks)
        return self.power.rebuild(first, second, self.memory.chunks)

    def install(self, fetched: Fetched) -> int:
        """See Replica; what was left out of the old state's steps says nothing about another one."""
        self.rollback()
        self.sent = {}
        residual = self.memory.residual.copy()
        if fetched.offer.digest != self.digest:
            residual[:] = 0
        changed = super().install(fetched)
        self.memory.load(residual, self.q)
        return changed

    def private(self, layout: Layout) -> dict[str, Array]:
        """See Replica."""
        return {f"residual/{name}": tensor for name, tensor in layout.split(self.memory.residual).items()}

    def recall(self, tensors: Tensors, layout: Layout) -> str:
        """See Replica."""
        residual = layout.flat({name.removeprefix("residual/"): one for name, one in tensors.items()})
        self.memory.load(residual, self.q)
        return ""
