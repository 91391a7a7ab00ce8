"""The outer state of a replica that sends a small part of its pseudo-gradient: SparseLoCo (arXiv 2508.15706).

With Δ = θ̄ − θ after H inner steps, and e what earlier rounds did not send:

    a = β e + Δ;  sent = top-k of a, quantised;  e ← a − sent;  θ̄ ← θ̄ − α · mean(all that was sent)

There is no outer momentum: under strong sparsity it hurts, and e takes its place. θ̄ is the same bits on all replicas, since it
is a pure function of the payloads in the order of the round's record; e is a replica's own, and changes when a round commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from thinwire.collectives.payload import cut_up, pieces, put_together
from thinwire.collectives.shards import Grid
from thinwire.collectives.sieve import Kept, parts
from thinwire.collectives.statesync import Fetched
from thinwire.compression import demo, sparsemean
from thinwire.compression.chunks import Chunks
from thinwire.compression.codec import Buffer, Choice, CodecError, Floats
from thinwire.compression.demo import Coefficients, Demo
from thinwire.compression.feedback import ErrorFeedback
from thinwire.compression.portions import Portions
from thinwire.compression.sparse import Selected, Sparse
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import Contribution, PeerId

from .fragments import Layout
from .outer import Read, Replica
from .tensorfile import Array, Tensors


@dataclass(frozen=True, slots=True)
class SparseCodec:
    """A sparse codec and the layout of the model: what says whether a payload is one."""

    codec: Sparse | Demo
    chunks: Chunks

    @property
    def spec(self) -> str:
        """Both."""
        return f"{self.codec.spec} {self.chunks.digest.hex()}"

    @property
    def bound(self) -> int:
        """Bytes of the largest payload."""
        return self.codec.bound(self.chunks)

    def decode(self, payload: Buffer) -> Selected | Coefficients:
        """What a payload says. Raises CodecError."""
        return self.codec.decode(payload, self.chunks)

    def grid(self, total: int) -> Grid:
        """The cut of what is sent of a model of so many parameters. Raises ValueError for one too large."""
        return pieces(self.bound)

    def cut(self, payload: bytes, says: Any, pieces: Grid) -> list[memoryview]:
        """What travels of our payload, which `says` that."""
        return cut_up(payload, pieces)

    def read(self, results: Sequence[Buffer], weights: list[float], pieces: Grid) -> tuple[list[Any], list[float]]:
        """What the results of a round say, and what each of them counts. Raises CodecError."""
        return [self.decode(payload) for payload in put_together(results, pieces)], weights

    def check(self, payload: Buffer, n: int) -> float:
        """See collectives.contributions.Screen."""
        if memoryview(payload).nbytes > n:
            raise CodecError(f"a payload of {memoryview(payload).nbytes} bytes, at most {n} are needed", "length")
        found = self.decode(payload)
        selected = found.selected if isinstance(found, Coefficients) else found
        return float(sum(sparsemean.norm(selected, part) ** 2 for part in selected.parts))


@dataclass(frozen=True, slots=True)
class RunCodec(SparseCodec):
    """The same for chunks that have owners: a payload is one of each run of parameters, and so is what comes back."""

    portions: Portions

    @property
    def spec(self) -> str:
        """All of it."""
        return f"{self.portions.spec} {self.chunks.digest.hex()}"

    def grid(self, total: int) -> Grid:
        """See SparseCodec: chunks that have owners."""
        return parts(total, self, self.codec.chunk)

    def cut(self, payload: bytes, says: Any, pieces: Grid) -> list[memoryview]:
        """See SparseCodec."""
        return list(self.portions.split(payload, says))

    def read(self, results: Sequence[Buffer], weights: list[float], pieces: Grid) -> tuple[list[Any], list[float]]:
        """See SparseCodec: the owners' results together are one payload."""
        return [self.portions.wide.decode(b"".join(results), self.chunks)], [1.0]

    def nbytes(self, n: int) -> int:
        """See collectives.sieve.Sifts, as the next three."""
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
"""Prefix of the sums' rests in a checkpoint; behind it comes the number of the chunk."""

KEPT = 4
"""Announcements of one round that are remembered: an older one than that is in no record any more."""


def keep(announced: dict[int, Any], attempt: int, what: Any) -> None:
    """Remember what was announced with this number."""
    announced[attempt] = what
    while len(announced) > KEPT:
        del announced[min(announced)]


def chunks_of(layout: Layout, chunk: int = 4096) -> Chunks:
    """The chunks of a model's parameters."""
    return Chunks(tuple((piece.name, piece.shape) for piece in layout.pieces), chunk)


class SparseReplica(Replica):
    """See the module. `feedback` holds e, `kept` what was not sent of sums that this peer owns. Made by `begin`."""

    vectors: ClassVar[int] = 1
    feedback: ErrorFeedback
    kept: Kept
    sent: dict[int, Choice]
    """What we have announced in the round in progress, by the number of the announcement: any may be its record's."""
    codec: SparseCodec
    rates: tuple[float, int, float]
    """lr; from which round on there is another one (0: none); and that one."""
    decay: float
    denominator: str

    @classmethod
    def begin(cls, manifest: Manifest, layout: Layout, codec: Any, theta: Floats, members: Sequence[PeerId]) -> Self:
        """See Replica; `codec` is a SparseCodec."""
        replica, outer = cls(layout.digest, theta, members), manifest.outer
        replica.codec, replica.decay, replica.rates = codec, outer.decay, (outer.lr, outer.late, outer.late_lr)
        replica.denominator, replica.sent = outer.denominator, {}
        replica.feedback = ErrorFeedback(codec.codec, codec.chunks, outer.beta, outer.on_exclusion)
        replica.kept = Kept()
        return replica

    @property
    def lr(self) -> float:
        """α of the next round."""
        lr, late, late_lr = self.rates
        return late_lr if late and self.round + 1 >= late else lr

    def prepare(self, read: Read, attempt: int | None = None) -> bytes:
        """The payload of this round. It is pending until `commit` or `rollback`, and takes the place of one that was.
        `attempt`: the number with which it will be announced, if it will.

        Raises FloatingPointError when something is not finite: such a contribution must not be sent.
        """
        self.rollback()
        try:
            payload = self.feedback.prepare(self.delta(read))
        except CodecError as error:
            raise FloatingPointError(f"the pseudo-gradient is not finite: {error}") from None
        if attempt is not None:
            keep(self.sent, attempt, self.feedback.choice)
        return payload

    def rollback(self) -> None:
        """The round did not commit: what was trained is still in the model and comes again."""
        if self.feedback.pending:
            self.feedback.rollback()

    def commit(
        self,
        results: Sequence[Buffer],
        contributors: Sequence[Contribution],
        cut: Grid,
        *,
        me: PeerId,
        members: Sequence[PeerId],
    ) -> None:
        """Commit the next round with the results of a gather. Its record may name an announcement of ours that is not the last:
        what was sent is what that one said. Cannot fail half-way: the results have been checked against the digest that was
        voted for.
        """
        weights = [float(entry.weight) for entry in contributors]
        self.step(*self.codec.read(results, weights, cut))
        attempt = next((entry.attempt for entry in contributors if entry.peer == me), None)
        sent = None if attempt is None else self.sent.get(attempt)
        self.sent = {}
        if self.feedback.pending:
            self.feedback.commit(excluded=sent is None, sent=sent)
        self.kept.commit(self.round + 1)
        self.moved(members)

    def step(self, selected: Sequence[Any], weights: Sequence[float]) -> None:
        """The outer step on what all have sent."""
        mean = sparsemean.mean(selected, weights, self.codec.chunks, self.denominator)
        np.multiply(mean, np.float32(self.lr), out=mean)
        np.subtract(self.theta, mean, out=self.theta)

    def install(self, fetched: Fetched) -> int:
        """See Replica; what was left out of the old state's steps says nothing about another one."""
        self.rollback()
        self.sent = {}
        if fetched.offer.digest != self.digest:
            self.feedback.load(np.zeros(self.theta.size, np.float32))
            self.kept.clear()
        return super().install(fetched)

    def private(self, layout: Layout) -> dict[str, Array]:
        """See Replica."""
        own = {f"residual/{name}": tensor for name, tensor in layout.split(self.feedback.residual).items()}
        return own | {f"{_KEPT}{index}": rest for index, rest in self.kept.all().items()}

    def recall(self, tensors: Tensors, layout: Layout) -> str:
        """See Replica."""
        rests = {int(name.removeprefix(_KEPT)): one for name, one in tensors.items() if name.startswith(_KEPT)}
        own = {name.removeprefix("residual/"): one for name, one in tensors.items() if not name.startswith(_KEPT)}
        self.feedback.load(layout.flat(own))
        lost = self.kept.load(rests, self.codec.grid(layout.total), self.round)
        return f"of {len(rests)} sums that were kept here {lost} do not fit, and are dropped" if lost else ""


class DemoReplica(SparseReplica):
    """DeMo (arXiv 2411.19870): Δ is the gradient of one plain step, e is the momentum δ, and what is sent are its strongest
    cosine coefficients. With their mean G: θ̄ ← θ̄ − lr (sign G + decay θ̄).
    """

    @classmethod
    def begin(cls, manifest: Manifest, layout: Layout, codec: Any, theta: Floats, members: Sequence[PeerId]) -> Self:
        """See Replica."""
        demo.warm_up()
        return super().begin(manifest, layout, codec, theta, members)

    def step(self, selected: Sequence[Any], weights: Sequence[float]) -> None:
        """See SparseReplica."""
        mean = demo.mean(selected, weights, self.codec.chunks, self.denominator)
        demo.step(self.theta, mean, self.lr, self.decay)
