"""Outer state of a replica, and the outer step of DiLoCo, which commits as a whole or not at all.

DiLoCo (arXiv 2311.08105) averages the pseudo-gradient Δ = θ̄ − θ after H inner steps, and an outer SGD with Nesterov
momentum moves θ̄. The inner optimizer retains its state and continues from the new θ̄. This implementation differs in
one point: it averages and applies the codec's decoded values, which are bit-identical on every replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from thinwire.collectives.consensus.chain import encode as encode_chain
from thinwire.collectives.consensus.chain import extended, founded
from thinwire.collectives.consensus.members.lives import lives_of, next_members
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounds.data_planes.sparse_butterfly import OwnerResiduals
from thinwire.collectives.state_sync.state_sync import FetchedState
from thinwire.collectives.topology.shards import Grid
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.compression.core.exact_block import BufferedCodec
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.device import encoding_device
from thinwire.compression.kernels.common import outer_step
from thinwire.node.state.data_ledger import DataLedger
from thinwire.node.state.layout import Layout
from thinwire.node.state.pseudogradient_coder import PseudogradientCoder
from thinwire.node.state.replica_buffers import Read
from thinwire.node.state.shared_state import SharedState
from thinwire.node.state.tensor_file import Array, Tensors
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import (
    CHAIN_BYTES,
    CHUNK_BYTES,
    MAX_CHAIN_ENTRIES,
    Chain,
    ChainEntry,
    Digest,
    Fork,
    PeerId,
    Proposal,
)
from thinwire.swarm.method_specs.base import MethodSpec


class Replica(SharedState):
    """Outer parameters and momentum, equal on all replicas after every round, and the outer step.

    theta, momentum: flat float32 vectors with one element per parameter of the layout. round: number of the last committed
    round, 0 before the first. members: peers that took part in that round, by seniority; they vote in the next one. lives:
    LIFE bytes of each member, see Proposal. chain: proves round, members, lives and lineage; empty without a state.

    `begin` makes a replica, with its codec, chunk grid and hyper-parameters. A subclass for each method overrides
    `contribution`, `_outer_step`, `forfeit` and the properties that describe its private state.
    """

    alike: ClassVar[bool] = True
    """True if replicas with the same rounds are equal, so that their digests are equal too."""
    vectors: ClassVar[int] = 2
    """Vectors of the model's size in the state: two with outer momentum."""
    count: ClassVar[int] = 1
    """Fragments of the model."""
    asynchronous: ClassVar[bool] = False
    """True if a round takes the peers that are ready, while the others continue to train and follow it."""
    error_feedback: ClassVar[bool] = False
    """True if parts of earlier contributions that were not sent are stored and sent later."""
    owner_residuals: OwnerResiduals | None = None
    """Residuals of sums that this peer owns, where the method has them."""

    codec: Any
    """Codec of the contributions."""
    device: torch.device | None = None
    """Device that encodes contributions; None: the host. See `encode_on`."""
    plan_grid: Grid
    """Chunk grid that the plan's digest names."""
    outer: MethodSpec
    """Keys of the outer method."""

    def __init__(
        self, layout: Digest, theta: Floats, members: Sequence[PeerId], *, extra: int = 0, buffers: int = 0
    ) -> None:
        """Create the state.

        `theta` ends with `buffers` values of buffers. `extra`: number of elements that the method adds.
        """
        theta, first = theta[: theta.size - buffers], theta[theta.size - buffers :]
        super().__init__()
        self.layout, self.size = layout, theta.size
        self._place = slice(self.vectors * theta.size + extra, self.vectors * theta.size + extra + buffers)
        self.ledger: DataLedger | None = None
        """Ledger of the used data, where the run has one."""
        self.state: NDArray[np.float32] = np.zeros(self._place.stop, np.float32)
        self.theta[:], self.buffers[:] = theta, first
        self._sent_buffers = self.buffers.copy()
        self.round, self.members, self.lives = 0, tuple(sorted(members)), b""
        given = Fork(0, bytes(32), (), self.members, b"", ())
        self.chain: Chain = (ChainEntry(given),) if self.members else ()
        self._proof: tuple[Chain, bytes] = (), b""
        self.fetched = 0
        """Number of states that were taken over from other peers."""
        self.pool = BufferPool()
        """Memory of contributions, and of the results that this peer computes."""
        self.seal()

    @classmethod
    def begin(
        cls, manifest: Manifest, layout: Layout, codec: Any, grid: Grid, theta: Floats, members: Sequence[PeerId]
    ) -> Self:
        """Return the replica of a run's first state. `codec`, `grid`: those of the method's contributions."""
        extra, buffers = cls.extra_size(manifest, layout), layout.buffers.size
        replica = cls(layout.digest, theta, members, extra=extra, buffers=buffers)
        replica.codec, replica.plan_grid, replica.outer = codec, grid, manifest.outer
        replica._begin(manifest, layout)
        return replica

    @classmethod
    def extra_size(cls, manifest: Manifest, layout: Layout) -> int:
        """Elements that the state has besides parameters and momentum."""
        return 0

    def _begin(self, manifest: Manifest, layout: Layout) -> None:
        """Set up what the method needs besides codec, grid and hyper-parameters."""

    @property
    def grid(self) -> Grid:
        """The chunk grid of the next round."""
        return self.plan_grid

    @property
    def momentum(self) -> Floats:
        """Outer momentum (a view); empty where there is none."""
        return self.state[self.size : self.vectors * self.size]

    @property
    def extra(self) -> Floats:
        """Additional state of the method (view)."""
        return self.state[self.vectors * self.size :]

    def keep_ledger(self, manifest: Manifest) -> None:
        """Add a ledger of the data to the first state, if the run has one."""
        words = DataLedger.words(manifest)
        if words:
            self.state = np.concatenate([self.state, np.zeros(words, np.float32)])
            self.ledger = DataLedger(self.state[-words:], manifest.model.context)
            self._hashes = []  # there may be a chunk more than before
            self.seal()

    @property
    def phase(self) -> int:
        """Number of the next round among those that make one outer step, from 0 on."""
        return 0

    def terms(self, usual: RoundTerms) -> RoundTerms:
        """The terms of the next round."""
        return usual

    @property
    def complete(self) -> bool:
        """True if this peer holds all fragments of the model."""
        return True

    @property
    def fragment_digests(self) -> dict[int, Digest]:
        """Digests of fragments with separate rounds, by number; empty if the model is one fragment."""
        return {}

    def members_of(self, number: int) -> tuple[PeerId, ...]:
        """Return the members of the last round of fragment `number`, if this peer holds it.

        Otherwise those of all fragments that it holds.
        """
        return self.members

    def private_state(self, layout: Layout) -> dict[str, Array]:
        """Tensors by name that only this replica has and needs after a restart, for a checkpoint.

        A checkpoint is written from their arrays while rounds continue, so they are replaced, or left to a twin first.
        """
        return {}

    def load_private(self, tensors: Tensors, layout: Layout) -> str:
        """Take up the tensors of `private_state`; return a remark about those that were dropped, if any.

        Raises KeyError or ValueError, with nothing changed, when they do not fit.
        """
        return ""

    def each(self, layout: Layout) -> Iterator[tuple[int, Replica, Layout]]:
        """Yield what is stored separately: fragment number, outer state, and its layout."""
        yield 0, self, layout

    def with_fragments(self, fragments: Mapping[int, Replica]) -> Replica:
        """Return this replica with these instead of what `each` yields."""
        return fragments[0]

    @property
    def proof(self) -> bytes:
        """Encoded chain; empty without one, and if it is too long for a message."""
        if self._proof[0] is not self.chain:
            encoded = encode_chain(self.chain)
            fits = len(encoded) <= CHAIN_BYTES and len(self.chain) <= MAX_CHAIN_ENTRIES
            self._proof = self.chain, encoded if fits else b""
        return self._proof[1]

    @property
    def contents(self) -> tuple[int, int]:
        """Round, and number of fetched states: they tell whether the values have changed, in whatever lineage."""
        return self._named[0], self.fetched

    def after(self, outcome: Outcome) -> tuple[int, tuple[PeerId, ...], Digest]:
        """Number, members and digest to report of a committed round that has been applied."""
        return self.round, self.members, self.digest

    def reset(self) -> None:
        """Forget private values that belong to an earlier state: the model starts again from theta."""

    def delta(self, read: Read) -> Floats:
        """The pseudo-gradient Δ = θ̄ − θ, whole."""
        model = np.empty(self.theta.size, np.float32)
        read(0, model.size, model)
        return np.subtract(self.theta, model, out=model)

    def contribution(self, read: Read, *, attempt: int, peers: int) -> Iterable[memoryview]:
        """Yield the encoded chunks of the contribution to the next round; none without a part in it.

        The pseudo-gradient Δ = θ̄ − θ is never copied as a whole. `attempt`: number of the announcement that follows.
        `peers`: expected contributors of the round. Raises FloatingPointError if a parameter is not finite: such a
        contribution must not be sent.
        """
        yield from self.coder.differences(self.theta, read)

    def fits(self, chunks: int) -> bool:
        """Return True if a contribution to the next round can have so many chunks."""
        return chunks == len(self.grid)

    def values_of(self, payloads: Sequence[Buffer]) -> Floats:
        """Return the values of a contribution of any peer, from its chunks.

        Raises CodecError for chunks that no honest peer makes.
        """
        values = np.empty(self.theta.size, np.float32)
        for index, payload in enumerate(payloads):
            self.codec.check(payload, self.grid.size(index))
        for low, high, part in self.coder.decoded(payloads):
            values[low:high] = part
        return values

    @property
    def coder(self) -> PseudogradientCoder:
        """Coder of the vectors of the next round."""
        return PseudogradientCoder(self.codec, self.grid, self.pool, self.device, self._sent_buffers)

    @property
    def sent_codec(self) -> object:
        """The codec that encodes contributions, without what a method or buffers add to it."""
        return self.codec.codec if isinstance(self.codec, BufferedCodec) else self.codec

    def encode_on(self, device: torch.device) -> None:
        """Encode contributions on the device of the parameters, if that is faster, with the same bytes."""
        self.device = encoding_device(self.sent_codec, device)

    @property
    def next_start(self) -> Floats | None:
        """Parameters from which the model continues after the contribution was read; None: its own."""
        return None

    def owes_forfeit(self, weight: int) -> bool:
        """Return True if `forfeit` is needed for `weight` tokens that were not announced before the commit."""
        return False

    def forfeit(self, read: Read) -> None:
        """Account for a contribution that came too late for its round. Raises FloatingPointError."""

    def rollback(self) -> None:
        """Forget a contribution whose round did not commit; the model still has its training."""

    def commit(self, outcome: Outcome, me: PeerId, since: Read | None = None) -> bool:
        """Commit the next round: record used data, make the outer step; return True if it made one.

        Cannot fail half-way: the results have been checked against the digest of the commit, and their form when they
        arrived. `me`: this peer. `since`: reads the model, if it was trained after its contribution was read. The digest of
        the new state is computed later, by `compute_digest`.
        """
        assert outcome.commit is not None
        proposal = outcome.commit.proposal
        if self.ledger is not None:
            self.ledger.book(proposal.contributors, self.leaseholders, self.round)
        stepped = self._outer_step(outcome.results, proposal, me, since)
        if self.buffers.size:
            self.buffers[:] = self._buffers_of(outcome.results, proposal)
        if outcome.certificate is not None:
            self.chain = extended(self.chain, outcome.certificate)
        self.advance(proposal.members, proposal.lives)
        return stepped

    def _outer_step(self, results: Sequence[Buffer], proposal: Proposal, me: PeerId, since: Read | None) -> bool:
        """Change the state by the decoded results of the round `proposal`; return True if that was a step."""
        outer = self.outer
        for low, high, mean in self.coder.decoded(results):
            outer_step(self.theta[low:high], self.momentum[low:high], mean, *outer.sgd)
        return True

    def _buffers_of(self, results: Sequence[Buffer], proposal: Proposal) -> Floats:
        """Return the buffers after a round."""
        found: Floats = self.codec.block_of(results, [self.grid.size(index) for index in range(len(self.grid))])
        return found

    def advance(self, members: Sequence[PeerId], lives: bytes = b"") -> None:
        """End a round that has decided these members, sorted, and lives; `compute_digest` is needed next."""
        self.round += 1
        self.members, self.lives = next_members(members, lives, self.members)
        self._unsealed = tuple(range(len(self)))  # last: another thread may ask for the digest at any moment

    @property
    def known_lives(self) -> dict[PeerId, bytes]:
        """Lives of the members of which one was announced."""
        return lives_of(self.members, self.lives)

    @property
    def leaseholders(self) -> tuple[PeerId, ...]:
        """Peers that share the data of the next round.

        They are the members, or in the first round of a lineage those of its parent: a founder contributes what it has
        trained since the last round, so that is recorded by the lease with which it was drawn. If no founder had one, the
        founders share the data.
        """
        holders: tuple[PeerId, ...] = ()
        for fork in (entry.fork for entry in self.chain):
            if fork.round == self.round and fork.before:
                holders = holders or fork.before
                holders = holders if set(holders) & set(fork.members) else fork.members
        return holders or self.members

    def found(self, fork: Fork) -> None:
        """Begin the lineage of `fork`, which was founded with our state, when that has its digest.

        A fork without members before it begins the run.
        """
        parent = self.chain if fork.before else ()
        self.members, self.lives, self.chain = fork.members, fork.lives, founded(parent, fork)
        self._name()

    def install(self, fetched: FetchedState) -> int:
        """Take over a fetched, checked state, whose chunks are dropped; return the bytes that differed."""
        raw = self.state.view(np.uint8)
        changed = 0
        while fetched.chunks:
            index, chunk = fetched.chunks.popitem()
            raw[index * CHUNK_BYTES : index * CHUNK_BYTES + len(chunk)] = np.frombuffer(chunk, np.uint8)
            changed += len(chunk)
        offer = fetched.offer
        self.fetched += 1
        self.round, self.members, self.lives, self.chain = offer.round, offer.members, offer.lives, fetched.chain
        self._hashes, self._named, self._unsealed = list(fetched.hashes), (self.round, offer.digest), ()
        return changed
