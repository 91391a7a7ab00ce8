"""The outer state of a replica, and a Round: one outer step that commits or rolls back, whole.

DiLoCo (arXiv 2311.08105): the pseudo-gradient Δ = θ̄ − θ after H inner steps is averaged, and an outer SGD with Nesterov
momentum moves θ̄; the inner optimizer keeps its state and goes on from the new θ̄. We differ in one thing: what is averaged
and applied is the codec's decoded value, the same bits on every replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, Self

import blake3
import numpy as np
from numpy.typing import NDArray
from thinwire.collectives.buffers import Pool
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.proposal import Terms
from thinwire.collectives.rounding import encode
from thinwire.collectives.shards import Grid
from thinwire.collectives.sieve import Kept
from thinwire.collectives.statesync import Fetched, state_digest
from thinwire.compression.codec import Buffer, Codec, Floats
from thinwire.compression.kernels import outer_step
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import CHUNK_BYTES, Contribution, Digest, PeerId

from .fragments import Layout
from .ledger import Ledger
from .tensorfile import Array, Tensors

SPARE = 64 << 20
"""Bytes of encoded chunks at most whose memory one contribution leaves to the next: clearing fresh pages takes as long as
reading, subtracting and quantizing what goes into them.
"""

Read = Callable[[int, int, Floats], None]
"""Copies the model's parameters [start, stop) as float32 into an array of stop - start elements."""


class Write(Protocol):
    """Sets the model's parameters [start, start + theta.size) to keep · what they are + (1 − keep) · theta."""

    def __call__(self, theta: Floats, start: int = 0, keep: float = 0.0) -> None: ...


class Replica:
    """Outer parameters and momentum of one peer: what all replicas agree on after every round, bit for bit.

    theta, momentum: flat float32 of the layout's total. round: the last committed one, 0 before the first.
    members: who took part in that round, sorted; the base of the next round's quorum.
    """

    alike: ClassVar[bool] = True
    """Whether replicas that made the same rounds are equal, so that their digests are."""
    vectors: ClassVar[int] = 2
    """How many times the model's parameters the state is: with outer momentum twice."""
    kept: Kept | None = None
    """What was not sent of sums that this peer owns, where a method has such."""

    def __init__(self, layout: Digest, theta: Floats, members: Sequence[PeerId], *, extra: int = 0) -> None:
        self.layout, self.size = layout, theta.size
        self.ledger: Ledger | None = None
        """What of the data is used up, where the swarm keeps book of it."""
        self.state: NDArray[np.float32] = np.zeros(self.vectors * theta.size + extra, np.float32)
        self.theta[:] = theta
        self.round, self.members = 0, tuple(sorted(members))
        self._pool = Pool(SPARE)
        self._hashes: list[Digest] = []
        self._named: tuple[int, Digest] = (0, bytes(32))
        self._unsealed: tuple[int, ...] = ()
        self.seal()

    @classmethod
    def begin(cls, manifest: Manifest, layout: Layout, codec: Any, theta: Floats, members: Sequence[PeerId]) -> Self:
        """The replica of a run's first state; `codec` is the method's."""
        return cls(layout.digest, theta, members)

    @property
    def theta(self) -> Floats:
        """Outer parameters (a view)."""
        return self.state[: self.size]

    @property
    def momentum(self) -> Floats:
        """Outer momentum (a view); empty where there is none."""
        return self.state[self.size : self.vectors * self.size]

    @property
    def extra(self) -> Floats:
        """What a method's state has beside these (a view)."""
        return self.state[self.vectors * self.size :]

    def keep_ledger(self, manifest: Manifest) -> None:
        """From the first state on have a ledger of the data, if the run has one."""
        words = Ledger.words(manifest)
        if words:
            self.state = np.concatenate([self.state, np.zeros(words, np.float32)])
            self.ledger = Ledger(self.state[-words:], manifest.model.context)
            self._hashes = []  # there may be a chunk more than before
            self.seal()

    def book(self, contributors: Sequence[Contribution]) -> None:
        """Book what went into the next round, before it is applied."""
        if self.ledger is not None:
            self.ledger.book(contributors, self.members, self.round)

    @property
    def turn(self) -> int:
        """Which vector the next round is about, where they take turns."""
        return 0

    def cut(self, usual: Grid) -> Grid:
        """The chunk grid of the next round."""
        return usual

    def terms(self, usual: Terms) -> Terms:
        """The terms of the next round."""
        return usual

    def spans(self, start: int, stop: int) -> Iterable[tuple[int, int]]:
        """Which elements of the parameters are elements [start, stop) of the next round's vector."""
        return ((start, stop),)

    def touched(self) -> Iterable[int]:
        """Chunks of the state that the next round changes."""
        return range(len(self))

    def private(self, layout: Layout) -> dict[str, Array]:
        """What only this replica has and needs after a restart, by name, for a checkpoint."""
        return {}

    def recall(self, tensors: Tensors, layout: Layout) -> str:
        """Take up what `private` gave; says what was passed over, if anything. Raises KeyError or ValueError, with nothing
        changed, when it does not fit.
        """
        return ""

    def each(self, layout: Layout) -> Iterator[tuple[int, Replica, Layout]]:
        """What is kept on its own: fragment number, outer state, and its part of the model's layout."""
        yield 0, self, layout

    @property
    def newest(self) -> tuple[int, Digest]:
        """The latest round whose state has its digest, and that: what all that have it call the state that it has left."""
        return self._named

    def after(self, outcome: Outcome) -> tuple[int, tuple[PeerId, ...], Digest]:
        """What to tell of a committed round that has been applied: its number, and what members and digest it has left."""
        return self.round, self.members, self.digest

    def reset(self) -> None:
        """The state is another one: forget what only this replica has and what belongs to the old one."""

    def chunk(self, index: int) -> memoryview:
        """Chunk `index` (CHUNK_BYTES, the last one shorter) of the state's bytes: parameters, then momentum."""
        return self.state.view(np.uint8).data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]

    def __len__(self) -> int:
        """Chunks of the state."""
        return (self.state.nbytes + CHUNK_BYTES - 1) // CHUNK_BYTES

    @property
    def digest(self) -> Digest:
        """Names round, members and state. Whoever asks before `settle` waits for the hashes."""
        self.settle()
        return self._named[1]

    @property
    def hashes(self) -> list[Digest]:
        """Those of the chunks."""
        self.settle()
        return self._hashes

    def seal(self, chunks: Iterable[int] | None = None) -> None:
        """Recompute the hashes and the digest after a change of the state, or of these chunks of it."""
        self._seal(range(len(self)) if chunks is None else (*self._unsealed, *chunks))

    def settle(self) -> None:
        """Compute what `moved` has left to be computed, if anything; it takes a while. In any thread while nothing changes the
        state: two that do so at once find the same.
        """
        if unsealed := self._unsealed:
            self._seal(unsealed)

    def _seal(self, chunks: Iterable[int]) -> None:
        self._hashes = self._hashes or [bytes(32)] * len(self)
        for index in chunks:
            self._hashes[index] = blake3.blake3(self.chunk(index)).digest()
        self._named = self.round, state_digest(self.round, self.layout, self.members, self._hashes)
        self._unsealed = ()

    def delta(self, read: Read) -> Floats:
        """The pseudo-gradient Δ = θ̄ − θ, whole."""
        model = np.empty(self.theta.size, np.float32)
        read(0, model.size, model)
        return np.subtract(self.theta, model, out=model)

    def encode(self, read: Read, grid: Grid, codec: Codec) -> Iterator[memoryview]:
        """The pseudo-gradient Δ = θ̄ − θ, chunk by chunk. Never needs a whole copy of it.

        Raises FloatingPointError when a parameter is not finite: such a contribution must not be sent.
        """
        whole = self._floats(grid.chunk)
        for index in range(len(grid)):
            start, stop = grid.span(index)
            delta, at = whole[: stop - start], 0
            for low, high in self.spans(start, stop):
                local = delta[at : at + high - low]
                read(low, high, local)
                np.subtract(self.theta[low:high], local, out=local)
                at += local.size
            if not np.isfinite(np.dot(delta, delta)):
                raise FloatingPointError(f"the pseudo-gradient is not finite in elements {start} to {stop}")
            yield self._encoded(codec, delta)

    def _encoded(self, codec: Codec, delta: Floats) -> memoryview:
        """A chunk's payload, in memory that is used again when nobody needs it any more."""
        payload = self._pool.lend(codec.nbytes(delta.size))
        encode(codec, delta, np.frombuffer(payload, np.uint8))
        return payload

    def _floats(self, size: int) -> Floats:
        """So many, with arbitrary values, in such memory."""
        return np.frombuffer(self._pool.lend(4 * size), np.float32)

    def apply(
        self,
        results: Sequence[Buffer],
        grid: Grid,
        codec: Codec,
        *,
        members: Sequence[PeerId],
        lr: float,
        momentum: float,
        nesterov: bool,
    ) -> None:
        """Commit the next round: the outer step on the decoded results. Cannot fail half-way: the results have been
        checked against the digest that was voted for, and their form when they came in. The new digest is for `settle`."""
        for low, high, mean in self.means(results, grid, codec):
            outer_step(self.theta[low:high], self.momentum[low:high], mean, lr, momentum, nesterov)
        self.moved(members)

    def means(self, results: Sequence[Buffer], grid: Grid, codec: Codec) -> Iterator[tuple[int, int, Floats]]:
        """What the results say of elements [low, high) of the parameters, piece by piece: each is good until the next comes."""
        mean = self._floats(grid.chunk)
        for index, payload in enumerate(results):
            start, stop = grid.span(index)
            delta, at = mean[: stop - start], 0
            codec.decode(payload, delta)
            for low, high in self.spans(start, stop):
                yield low, high, delta[at : at + high - low]
                at += high - low

    def moved(self, members: Sequence[PeerId]) -> None:
        """The outer step is made: the round is over, with these members. What names the new state is for `settle` to find."""
        touched = self.touched()
        self.round += 1
        self.members = tuple(sorted(members))
        self._unsealed = (*self._unsealed, *touched)  # last: another thread may ask for the digest at any moment

    def install(self, fetched: Fetched) -> int:
        """Take over a fetched state; returns the bytes that differed. The chunks have been checked against its digest."""
        raw = self.state.view(np.uint8)
        changed = 0
        for index, chunk in fetched.chunks.items():
            raw[index * CHUNK_BYTES : index * CHUNK_BYTES + len(chunk)] = np.frombuffer(chunk, np.uint8)
            changed += len(chunk)
        self.round, self.members = fetched.offer.round, fetched.offer.members
        self._hashes, self._named, self._unsealed = list(fetched.hashes), (self.round, fetched.offer.digest), ()
        return changed
