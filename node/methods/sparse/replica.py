"""Replica that sends a small part of its pseudo-gradient: SparseLoCo (arXiv 2508.15706).

With Δ = θ̄ − θ after H inner steps, and e the residual of earlier rounds:

    a = β e + Δ;  sent = top-k of a, quantised;  e ← a − sent;  θ̄ ← θ̄ − α · mean(sent of all)

There is no outer momentum, which harms under strong sparsity; e takes its place. θ̄ is bit-identical on all replicas: a
pure function of the payloads in the order of the record. e is private, and changes when a round commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from thinwire.collectives.aggregation.rule_factory import sparse_rule
from thinwire.collectives.rounds.allgather_payload import cut_up, joined, pieces, put_together
from thinwire.collectives.rounds.sparse_butterfly import OwnerResiduals, parts
from thinwire.collectives.state_sync import FetchedState
from thinwire.collectives.topology.shards import Grid
from thinwire.compression.core.codec import Choice, CodecError
from thinwire.compression.core.exact_block import ExactBlock
from thinwire.compression.core.parameter_chunks import Chunks
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.device import select
from thinwire.compression.sparse import demo
from thinwire.compression.sparse import mean as sparsemean
from thinwire.compression.sparse.demo import Coefficients, Demo
from thinwire.compression.sparse.error_feedback import ErrorFeedback
from thinwire.compression.sparse.mean import Average
from thinwire.compression.sparse.sharded import Portions
from thinwire.compression.sparse.topk import Selected, Sparse
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica import Replica
from thinwire.node.state.replica_buffers import Read
from thinwire.node.state.tensor_file import Array, Tensors
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import Open, PeerId


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
        return pieces(self.bound)

    def cut(self, payload: bytes, says: Any, pieces: Grid) -> list[memoryview]:
        """Cut our payload, whose choice is `says`, into chunks."""
        return cut_up(payload, pieces)

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
        return [self.decode(payload) for payload in put_together(results, pieces)], weights

    def buffers_of(self, results: Sequence[Buffer], weights: list[float], pieces: Grid) -> Floats:
        """Return the buffers of a round. Raises CodecError."""
        return self.block.combine([self.block.read(payload) for payload in put_together(results, pieces)], weights)

    def check(self, payload: Buffer, n: int) -> float:
        """Check a payload of at most `n` bytes; return its squared norm. Raises CodecError."""
        if memoryview(payload).nbytes > n:
            raise CodecError(f"a payload of {memoryview(payload).nbytes} bytes, at most {n} are needed", "length")
        found = self.decode(payload)
        selected = found.selected if isinstance(found, Coefficients) else found
        return float(sum(sparsemean.norm(selected, part) ** 2 for part in selected.parts))


@dataclass(frozen=True, slots=True)
class RunCodec(SparseCodec):
    """Sparse codec for chunks with owners: one payload and one result for each run of parameters."""

    portions: Portions

    @property
    def spec(self) -> str:
        return f"{self.portions.spec} {self.chunks.digest.hex()}"

    def grid(self, total: int) -> Grid:
        """Return the grid of chunks that have owners."""
        return parts(total, self, self.codec.chunk)

    def cut(self, payload: bytes, says: Any, pieces: Grid) -> list[memoryview]:
        return list(self.portions.split(payload, says))

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
        """Return the largest payload of `n` values in bytes; this and the next three: ShardedSparseCodec."""
        return self.portions.nbytes(n)

    def check(self, payload: Buffer, n: int) -> float:
        return self.portions.check(payload, n)

    def check_sum(self, payload: Buffer, n: int) -> float:
        return self.portions.check_sum(payload, n)

    def thin(
        self, payloads: Sequence[Buffer], weights: Sequence[float], kept: Floats | None, n: int
    ) -> tuple[bytes, Floats]:
        return self.portions.thin(payloads, weights, kept, n)


_KEPT = "kept/"
"""Prefix of owner residuals in a checkpoint; the number of the chunk follows."""

KEPT = 4
"""Announcements of one round that are remembered; no record names an older one."""


def keep(announced: dict[int, Any], attempt: int, what: Any) -> None:
    """Remember `what` was announced as number `attempt`, and forget the oldest beyond KEPT."""
    announced[attempt] = what
    while len(announced) > KEPT:
        del announced[min(announced)]


def chunks_of(layout: Layout, chunk: int = 4096) -> Chunks:
    return Chunks(tuple((piece.name, piece.shape) for piece in layout.pieces), chunk)


class SparseReplica(Replica):
    """Replica of SparseLoCo. `feedback` holds e, `kept` the residuals of owned chunks. Made by `begin`."""

    vectors: ClassVar[int] = 1
    error_feedback: ClassVar[bool] = True
    feedback: ErrorFeedback
    kept: OwnerResiduals
    sent: dict[int, Choice]
    """Announcements of the round in progress by attempt: the record may name any of them."""
    codec: SparseCodec
    average: Average
    """Rule by which the contributions are aggregated."""

    def _begin(self, manifest: Manifest, layout: Layout) -> None:
        """Set up the error feedback; `codec` is a SparseCodec."""
        self.sent = {}
        rule = self.outer.residual
        self.feedback = ErrorFeedback(self.codec.codec, self.codec.chunks, rule.decay, rule.on_exclusion)
        self.kept = OwnerResiduals()
        # What comes from owners is aggregated already.
        whole = manifest.exchange.collective == "sparse-butterfly"
        self.average = sparsemean.mean if whole else sparse_rule(manifest.exchange.rule)

    @property
    def sent_codec(self) -> object:
        """The sparse codec."""
        return self.codec.codec

    def encode_on(self, device: torch.device) -> None:
        """Select entries on the device of the parameters, from the accumulator, which stays on the host."""
        super().encode_on(device)
        own = self.codec.codec
        self.feedback.select_with(own.select if self.device is None else partial(select, own, device=self.device))

    @property
    def lr(self) -> float:
        """Learning rate α of the next round."""
        return self.outer.lr_at(self.round + 1)

    def contribution(self, read: Read, *, attempt: int, peers: int) -> Iterable[memoryview]:
        """Encode the contribution; it is pending until `commit`, `rollback` or the next contribution."""
        payload = self._prepare(read) + self._sent_buffers.astype("<f4").tobytes()
        keep(self.sent, attempt, self.feedback.choice)
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
            return self.feedback.prepare(self.delta(read))
        except CodecError as error:
            raise FloatingPointError(f"the pseudo-gradient is not finite: {error}") from None

    def rollback(self) -> None:
        """Drop the pending contribution; the model's difference still has it."""
        if self.feedback.pending:
            self.feedback.rollback()

    def _outer_step(self, results: Sequence[Buffer], opened: Open, me: PeerId, since: Read | None) -> bool:
        """Make the step. The record may name an earlier announcement of ours; then that one counts as sent."""
        weights = [float(entry.weight) for entry in opened.contributors]
        contributions = self.codec.read(results, weights, self.grid)
        attempt = next((entry.attempt for entry in opened.contributors if entry.peer == me), None)
        sent = None if attempt is None else self.sent.get(attempt)
        self.sent = {}
        if self.feedback.pending:
            self.feedback.commit(excluded=sent is None, sent=sent)
        self._move(*contributions)  # after the old residual is freed: it takes as much memory
        self.kept.commit(self.round + 1)
        return True

    def _buffers_of(self, results: Sequence[Buffer], opened: Open) -> Floats:
        return self.codec.buffers_of(results, [float(entry.weight) for entry in opened.contributors], self.grid)

    def _move(self, selected: Sequence[Any], weights: Sequence[float]) -> None:
        mean = self.average(selected, weights, self.codec.chunks, self.outer.residual.denominator)
        np.multiply(mean, np.float32(self.lr), out=mean)
        np.subtract(self.theta, mean, out=self.theta)

    def install(self, fetched: FetchedState) -> int:
        """Take over a fetched state; residuals of another state are dropped."""
        self.rollback()
        self.sent = {}
        if fetched.offer.digest != self.digest:
            self.feedback.load(np.zeros(self.theta.size, np.float32))
            self.kept.clear()
        return super().install(fetched)

    def private_state(self, layout: Layout) -> dict[str, Array]:
        """Return the residuals of the contributions and of the owned chunks."""
        own = {f"residual/{name}": tensor for name, tensor in layout.split(self.feedback.residual).items()}
        return own | {f"{_KEPT}{index}": rest for index, rest in self.kept.all().items()}

    def load_private(self, tensors: Tensors, layout: Layout) -> str:
        """Load the residuals; return a remark about owner residuals that do not fit."""
        rests = {int(name.removeprefix(_KEPT)): one for name, one in tensors.items() if name.startswith(_KEPT)}
        own = {name.removeprefix("residual/"): one for name, one in tensors.items() if not name.startswith(_KEPT)}
        self.feedback.load(layout.flat(own))
        lost = self.kept.load(rests, self.codec.grid(layout.total), self.round)
        return f"of {len(rests)} sums that were kept here {lost} do not fit, and are dropped" if lost else ""


class DemoReplica(SparseReplica):
    """Replica of DeMo (arXiv 2411.19870).

    Δ is the gradient of one plain step, e is the momentum δ, and the strongest cosine coefficients are sent. With their
    mean G: θ̄ ← θ̄ − lr (sign G + decay θ̄).
    """

    def _move(self, selected: Sequence[Any], weights: Sequence[float]) -> None:
        """Move theta by the sign of the mean."""
        mean = demo.mean(selected, weights, self.codec.chunks, self.outer.residual.denominator, self.average)
        demo.step(self.theta, mean, self.lr, self.outer.sign_decay)
