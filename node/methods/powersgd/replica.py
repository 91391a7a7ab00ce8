"""Replica that averages matrices as two thin factors: DiLoCo with PowerSGD (arXiv 1905.13727).

An outer step takes two rounds, one for each factor, since the second depends on the mean of the first. They are one
transaction: the state has the mean of the first factors with its contributors and weights
(`pledges`), and the step is made only if the second record names the same. Otherwise both rounds are
void, on all replicas alike. The contribution is then sent again, and the missing peers sit out the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.state_sync.state_sync import FetchedState
from thinwire.collectives.topology.shards import Grid, grid
from thinwire.compression import registry
from thinwire.compression.core.codec import Codec
from thinwire.compression.core.parameter_chunks import Chunks
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.kernels.common import outer_step
from thinwire.compression.powersgd import LowRank, PowerSGD
from thinwire.node.methods.powersgd import pledges
from thinwire.node.methods.sparse.replica import chunks_of, store_sent
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica import Replica
from thinwire.node.state.replica_buffers import Read
from thinwire.node.state.tensor_file import Array, Tensors
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import PeerId, Proposal

_Q = 1 + pledges.SIZE
"""Index of Q in the extra state."""


def cuts(power: PowerSGD, chunks: Chunks, codec: Codec) -> tuple[Grid, Grid]:
    """Return the chunk grids of the two rounds of a step. Raises ValueError if a factor is too large."""
    return grid(power.first_size(chunks), codec), grid(max(1, power.second_size(chunks)), codec)


class PowerSGDReplica(Replica):
    """Replica with PowerSGD factors; `memory` holds the residual and the pending vectors. Made by `begin`.

    The extra state has: turn (0 before the first round of a step, 1 before the second), the pledges, Q of the last
    step, and the mean of the first factors (zeros if turn is 0).
    """

    error_feedback: ClassVar[bool] = True
    memory: LowRank
    power: PowerSGD
    cuts: tuple[Grid, Grid]
    own: Floats | None = None
    """Our vector for the second round of a step in progress."""
    sent: dict[int, Floats]
    """Vectors announced for the first round in progress, by attempt: the record may name any of them."""

    @classmethod
    def extra_size(cls, manifest: Manifest, layout: Layout) -> int:
        """Return the number of elements of turn, pledges, Q and the first factors."""
        power: Any = registry.parse(manifest.exchange.codec)
        chunks = chunks_of(layout)
        return _Q + int(power.first_size(chunks)) + int(power.second_size(chunks))

    def _begin(self, manifest: Manifest, layout: Layout) -> None:
        """Set up the factors and the residual."""
        power: Any = registry.parse(manifest.exchange.codec)
        self.power, self.sent = power, {}
        self.memory = LowRank(power, chunks_of(layout), manifest.run.seed, manifest.outer.residual.on_exclusion)
        self.cuts = cuts(power, self.memory.chunks, self.codec)
        self.q[:] = self.memory.q
        self.seal()

    @property
    def phase(self) -> int:
        """Next round of a step, 0 or 1. Any other value of a fetched state counts as 0 or 1 too."""
        return int(self.extra[0] == 1)

    @property
    def notes(self) -> Floats:
        """Pledges (view)."""
        return self.extra[1:_Q]

    @property
    def q(self) -> Floats:
        """Q of the last step (view)."""
        return self.extra[_Q : _Q + self.power.second_size(self.memory.chunks)]

    @property
    def first(self) -> Floats:
        """Mean of the first factors (view)."""
        return self.extra[_Q + self.q.size :]

    @property
    def grid(self) -> Grid:
        return self.cuts[self.phase]

    def terms(self, usual: RoundTerms) -> RoundTerms:
        """Restrict the second round to the contributors of the first, which had enough, without a minimum."""
        noted = pledges.read(self.notes)
        if self.phase:
            return replace(usual, weights=pledges.weights(noted), min_peers=0)
        return replace(usual, spare=pledges.resting(noted))

    def contribution(self, read: Read, *, attempt: int, peers: int) -> Iterable[memoryview]:
        """Encode the vector for the next round; nothing in a second round whose first one lacks this peer."""
        vector = self._offer(read, attempt)
        return () if vector is None else self.coder.encoded(vector)

    def owes_forfeit(self, weight: int) -> bool:
        """Return True if the first round of a step has something to account for."""
        return bool(weight or self.sent) and not self.phase

    def forfeit(self, read: Read) -> None:
        """Treat the pending vector as without effect, or as sent if the record names an older announcement."""
        self._offer(read)

    def _offer(self, read: Read, attempt: int | None = None) -> Floats | None:
        """Return the vector for the next round, noted as announcement `attempt`; None without a part in it.

        Raises FloatingPointError if a value is not finite.
        """
        if self.phase:
            return self.own
        self._discard()
        self.memory.adopt(self.q)
        try:
            first = self.memory.prepare(self.delta(read))
        except ValueError as error:
            raise FloatingPointError(f"the pseudo-gradient is not finite: {error}") from None
        if attempt is not None:
            store_sent(self.sent, attempt, first)
        return first

    def _discard(self) -> None:
        """Discard the pending vectors of the step in progress."""
        self.own = None
        if self.memory.pending:
            self.memory.rollback()

    def _outer_step(self, results: Sequence[Buffer], proposal: Proposal, me: PeerId, since: Read | None) -> bool:
        """End one of the two rounds of a step; return True if the step was made."""
        cut, contributors = self.grid, proposal.contributors
        mean = np.empty(cut.total, np.float32)
        for index, payload in enumerate(results):
            self.codec.decode(payload, mean[slice(*cut.span(index))])
        weights = {entry.peer: entry.weight for entry in contributors}
        noted, step = pledges.read(self.notes), None
        if not self.phase:
            # The record may name an older announcement of ours. A forgotten one does not count.
            attempt = next((entry.attempt for entry in contributors if entry.peer == me), None)
            sent = None if attempt is None else self.sent.get(attempt)
            self.sent = {}
            if self.memory.pending:
                own = self.memory.second_vector(mean, sent)
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
            self._discard()
            pledges.settle(noted, weights, proposal.members)
            self.extra[0], self.first[:] = 0, 0
        pledges.write(noted, self.notes)
        if step is not None:
            outer = self.outer
            outer_step(self.theta, self.momentum, step, *outer.sgd)
        return step is not None

    def _finished(self, first: Floats, second: Floats, *, excluded: bool, since: Read | None = None) -> Floats:
        """Return the update from the means of both factors, and commit the residual."""
        if self.memory.pending:
            delta = None if since is None else self.delta(since)
            if delta is not None and not np.isfinite(delta).all():
                delta = None  # not finite: the training since then is lost
            return self.memory.commit(second, excluded=excluded, delta=delta)
        self.memory.load(self.memory.residual.copy(), second)
        self.power.orthonormalise(first, self.memory.chunks)
        return self.power.rebuild(first, second, self.memory.chunks)

    def install(self, fetched: FetchedState) -> int:
        """Take over a fetched state; the residual of another state is dropped."""
        self._discard()
        self.sent = {}
        residual = self.memory.residual.copy()
        if fetched.offer.digest != self.digest:
            residual[:] = 0
        changed = super().install(fetched)
        self.memory.load(residual, self.q)
        return changed

    def private_state(self, layout: Layout) -> dict[str, Array]:
        return {f"residual/{name}": tensor for name, tensor in layout.split(self.memory.residual).items()}

    def load_private(self, tensors: Tensors, layout: Layout) -> str:
        residual = layout.flat({name.removeprefix("residual/"): one for name, one in tensors.items()})
        self.memory.load(residual, self.q)
        return ""
