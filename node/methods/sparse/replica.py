"""Replica that sends a small part of its pseudo-gradient: SparseLoCo (arXiv 2508.15706).

With Δ = θ̄ − θ after H inner steps, and e the residual of earlier rounds:

    a = β e + Δ;  sent = top-k of a, quantised;  e ← a − sent;  θ̄ ← θ̄ − α · mean(sent of all)

There is no outer momentum, which harms under strong sparsity; e takes its place. θ̄ is bit-identical on all replicas: a
pure function of the payloads in the order of the record. e is private, and changes when a round commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
from thinwire.collectives.aggregation.rule_factory import sparse_rule
from thinwire.collectives.rounds.data_planes.sparse_butterfly import OwnerResiduals
from thinwire.collectives.state_sync.state_sync import FetchedState
from thinwire.compression.core.codec import Choice, CodecError
from thinwire.compression.core.parameter_chunks import Chunks
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.device import select
from thinwire.compression.sparse import demo
from thinwire.compression.sparse import mean as sparsemean
from thinwire.compression.sparse.error_feedback import Difference, ErrorFeedback, stored
from thinwire.compression.sparse.mean import Average
from thinwire.node.methods.sparse.sparse_codec import SparseCodec
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica import Replica
from thinwire.node.state.replica_buffers import Read
from thinwire.node.state.shared_state import SharedState
from thinwire.node.state.tensor_file import Array, Tensors
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import PeerId, Proposal

_OWNER_RESIDUAL = "kept/"
"""Prefix of owner residuals in a checkpoint; the number of the chunk follows."""

MOST_SENT = 4
"""Announcements of one round that are remembered; no record names an older one."""


def store_sent(sent: dict[int, Any], attempt: int, contribution: Any) -> None:
    """Store what announcement number `attempt` has sent, and forget the oldest beyond MOST_SENT."""
    sent[attempt] = contribution
    while len(sent) > MOST_SENT:
        del sent[min(sent)]


def chunks_of(layout: Layout, chunk: int = 4096) -> Chunks:
    """Return the division of a model's parameters into chunks of `chunk` elements."""
    return Chunks(tuple((piece.name, piece.shape) for piece in layout.pieces), chunk)


class SparseReplica(Replica):
    """Replica of SparseLoCo. `feedback` holds e, `owner_residuals` those of owned chunks. Made by `begin`."""

    vectors: ClassVar[int] = 1
    error_feedback: ClassVar[bool] = True
    feedback: ErrorFeedback
    owner_residuals: OwnerResiduals
    sent: dict[int, Choice]
    """Announcements of the round in progress by attempt: the record may name any of them."""
    codec: SparseCodec
    average: Average
    """Rule by which the contributions are aggregated."""
    trains_on = False
    """True if the model is trained while a round is in progress.

    Then the announced pseudo-gradient is stored.
    """
    _lent: Floats | None = None
    """In a twin for a checkpoint: the array of the residuals, which must not change. Else None."""

    def _begin(self, manifest: Manifest, layout: Layout) -> None:
        """Set up the error feedback; `codec` is a SparseCodec."""
        self.sent = {}
        rule = self.outer.residual
        self.feedback = ErrorFeedback(self.codec.codec, self.codec.chunks, rule.decay, rule.on_exclusion)
        self.owner_residuals = OwnerResiduals()
        # What comes from owners is aggregated already.
        whole = manifest.exchange.collective == "sparse-butterfly"
        self.average = sparsemean.means if whole else sparse_rule(manifest.exchange.rule)

    @property
    def sent_codec(self) -> object:
        """The sparse codec."""
        return self.codec.codec

    def encode_on(self, device: torch.device) -> None:
        """Select entries on the device of the parameters; the accumulator is computed on the host."""
        super().encode_on(device)
        own = self.codec.codec
        self.feedback.select_with(own.select_from if self.device is None else partial(select, own, device=self.device))

    @property
    def lr(self) -> float:
        """Learning rate α of the next round."""
        return self.outer.lr_at(self.round + 1)

    def contribution(self, read: Read, *, attempt: int, peers: int) -> Iterable[memoryview]:
        """Encode the contribution; it is pending until `commit`, `rollback` or the next contribution."""
        payload = self._prepare(read) + self._sent_buffers.astype("<f4").tobytes()
        store_sent(self.sent, attempt, self.feedback.choice)
        return self.codec.cut(payload, self.feedback.choice, self.grid)

    def fits(self, chunks: int) -> bool:
        return self.codec.fits(chunks, self.grid)

    def values_of(self, payloads: Sequence[Buffer]) -> Floats:
        values = np.zeros(self.theta.size, np.float32)
        self.codec.join(payloads, self.grid).scatter(values)
        return values

    def owes_forfeit(self, weight: int) -> bool:
        """Return True if tokens or an earlier announcement must be accounted for."""
        return bool(weight or self.sent)

    def forfeit(self, read: Read) -> None:
        """Treat the pending contribution as sent without effect.

        If the record names an earlier announcement, treat it as sent.
        """
        self._prepare(read)

    def _prepare(self, read: Read) -> bytes:
        self.rollback()
        try:
            return self.feedback.prepare(self._difference(read))
        except CodecError as error:
            raise FloatingPointError(f"the pseudo-gradient is not finite: {error}") from None

    def _difference(self, read: Read) -> Difference:
        """Return a reader of the pseudo-gradient that gives the same values until the outcome of the round."""
        if self.trains_on:
            return stored(self.delta(read))

        def difference(start: int, stop: int, out: Floats) -> None:
            read(start, stop, out)
            np.subtract(self.theta[start:stop], out, out=out)

        return difference

    def rollback(self) -> None:
        """Drop the pending contribution; the model's difference still has it."""
        if self.feedback.pending:
            self.feedback.rollback()

    def _outer_step(self, results: Sequence[Buffer], proposal: Proposal, me: PeerId, since: Read | None) -> bool:
        """Make the step. The record may name an earlier announcement of ours; then that one counts as sent."""
        weights = [float(entry.weight) for entry in proposal.contributors]
        contributions = self.codec.read(results, weights, self.grid)
        attempt = next((entry.attempt for entry in proposal.contributors if entry.peer == me), None)
        sent = None if attempt is None else self.sent.get(attempt)
        self.sent = {}
        if self.feedback.pending:
            self.feedback.commit(excluded=sent is None, sent=sent)
        self._move(*contributions)  # after the residual: the pseudo-gradient is measured from theta
        self.owner_residuals.commit(self.round + 1)
        return True

    def _buffers_of(self, results: Sequence[Buffer], proposal: Proposal) -> Floats:
        return self.codec.buffers_of(results, [float(entry.weight) for entry in proposal.contributors], self.grid)

    def _move(self, selected: Sequence[Any], weights: Sequence[float]) -> None:
        lr, theta = np.float32(self.lr), self.theta
        for section, mean in self.average(selected, weights, self.codec.chunks, self.outer.residual.denominator):
            np.multiply(mean, lr, out=mean)
            values = section.gather(theta)
            np.subtract(values, mean, out=values)
            section.put(values, theta)

    def install(self, fetched: FetchedState) -> int:
        """Take over a fetched state; residuals of another state are dropped."""
        self.rollback()
        self.sent = {}
        if fetched.offer.digest != self.digest:
            self.feedback.clear()
            self.owner_residuals.clear()
        return super().install(fetched)

    def twin(self, *, private: bool = False) -> Self:
        twin = super().twin(private=private)
        if private:
            twin._lent = self.feedback.memory
        return twin

    def release_private(self) -> None:
        """End the use of the residuals by this twin."""
        self._lent = None

    def _reads(self, replica: SharedState) -> bool:
        own = isinstance(replica, SparseReplica) and self._lent is replica.feedback.memory
        return own or super()._reads(replica)

    def _leave_arrays(self, readers: Sequence[SharedState]) -> None:
        memory = self.feedback.memory
        if any(isinstance(twin, SparseReplica) and twin._lent is memory for twin in readers):
            memory = memory.copy()
        super()._leave_arrays(readers)
        self.feedback.memory = memory

    def private_state(self, layout: Layout) -> dict[str, Array]:
        """Return the residuals of the contributions and of the owned chunks."""
        own = {f"residual/{name}": tensor for name, tensor in layout.split(self.feedback.residual).items()}
        return own | {f"{_OWNER_RESIDUAL}{index}": rest for index, rest in self.owner_residuals.all().items()}

    def load_private(self, tensors: Tensors, layout: Layout) -> str:
        """Load the residuals; return a remark about owner residuals that do not fit."""
        rests = {
            int(name.removeprefix(_OWNER_RESIDUAL)): one
            for name, one in tensors.items()
            if name.startswith(_OWNER_RESIDUAL)
        }
        own = {
            name.removeprefix("residual/"): one for name, one in tensors.items() if not name.startswith(_OWNER_RESIDUAL)
        }
        self.feedback.load(layout.flat(own))
        lost = self.owner_residuals.load(rests, self.codec.grid(layout.total), self.round)
        return f"of {len(rests)} sums that were stored here {lost} do not fit, and are dropped" if lost else ""


class DemoReplica(SparseReplica):
    """Replica of DeMo (arXiv 2411.19870).

    Δ is the gradient of one plain step, e is the momentum δ, and the strongest cosine coefficients are sent. With their
    mean G: θ̄ ← θ̄ − lr (sign G + decay θ̄).
    """

    def _move(self, selected: Sequence[Any], weights: Sequence[float]) -> None:
        """Move theta by the sign of the mean."""
        means = demo.means(selected, weights, self.codec.chunks, self.outer.residual.denominator, self.average)
        demo.step(self.theta, means, self.lr, self.outer.sign_decay)
