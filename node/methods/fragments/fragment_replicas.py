"""Replicas of a model whose fragments have separate rounds, members, digests and votes.

Fragments take turns: turn n, from 0 on, is round n // P + 1 of fragment n mod P. Several rounds may be in progress
while training continues. A peer that holds only some fragments takes part only in their rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import blake3
import numpy as np
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounds.data_planes.allgather.payload_pieces import piece_grid
from thinwire.collectives.topology.shards import Grid, grid
from thinwire.compression.core.types import Floats
from thinwire.node.methods.sparse.replica import SparseReplica, chunks_of
from thinwire.node.methods.sparse.sparse_codec import SparseCodec
from thinwire.node.state.fragments import FragmentSpans, fragments_of, layout_of_part
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica import Replica
from thinwire.node.state.replica_buffers import ParameterWrite, Read
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import Digest, PeerId


def turn_of(number: int, round: int, count: int) -> int:
    """Return the turn of the round after `round` of a fragment; `count`: number of fragments."""
    return round * count + number


def rounds_of(number: int, turns: int, count: int) -> int:
    """Return how many of the first `turns` turns belong to a fragment."""
    return max(0, (turns - number + count - 1) // count)


@dataclass(frozen=True, slots=True)
class FragmentReplica:
    """One held fragment: its range in the model, and its outer state."""

    number: int
    part: FragmentSpans
    layout: Layout
    replica: Replica

    def reader(self, read: Read) -> Read:
        """Return a reader of the fragment's elements, given a reader of the model's."""

        def within(start: int, stop: int, out: Floats) -> None:
            at = 0
            for low, high in self.part.within(start, stop):
                read(low, high, out[at : at + high - low])
                at += high - low

        return within

    def writer(self, write: ParameterWrite) -> ParameterWrite:
        """Return a writer of the fragment's elements, given a writer of the model's."""

        def within(theta: Floats, start: int = 0, keep: float = 0.0) -> None:
            at = 0
            for low, high in self.part.within(start, start + theta.size):
                write(theta[at : at + high - low], low, keep)
                at += high - low

        return within


def begin_fragment(
    manifest: Manifest, layout: Layout, codec: Any, theta: Floats, number: int, members: Sequence[PeerId]
) -> FragmentReplica:
    """Make fragment `number` of a model with parameters `theta`. `codec`: of the whole model's rounds."""
    part = fragments_of(manifest, layout)[number]
    inner = layout_of_part(layout, part, number, manifest.outer.fragment_count)
    kind, own, cut = Replica, codec, grid(part.size, codec) if not manifest.sparse else None
    if cut is None:
        kind, own = SparseReplica, SparseCodec(codec.codec, chunks_of(inner, codec.codec.chunk))
        cut = piece_grid(own.bound)
    replica = kind.begin(manifest, inner, own, cut, part.take(theta), members)
    if isinstance(replica, SparseReplica):
        replica.trains_on = True
    return FragmentReplica(number, part, inner, replica)


class FragmentReplicas:
    """All fragments of one peer; has the interface of `Replica`. Made by `begin`.

    `fragments`: held fragments by number. `count`: fragments of the model.
    """

    alike: ClassVar[bool] = True
    vectors: ClassVar[int] = 2
    ledger: ClassVar[None] = None
    buffers: ClassVar[Floats] = np.empty(0, np.float32)

    def __init__(self, layout: Layout, fragments: Mapping[int, FragmentReplica], count: int, theta: Floats) -> None:
        self.layout, self.size = layout.digest, layout.total
        self.fragments, self.count = fragments, count
        self._initial_theta = theta if len(fragments) < count else None

    @classmethod
    def begin(
        cls,
        manifest: Manifest,
        layout: Layout,
        codec: Any,
        grid: Grid,
        theta: Floats,
        members: Sequence[PeerId],
        held: Collection[int] | None = None,
    ) -> Self:
        """Make the initial state. `held`: numbers of the fragments that this peer holds; None: all."""
        count = manifest.outer.fragment_count
        numbers = range(count) if held is None else sorted(held)
        fragments = {number: begin_fragment(manifest, layout, codec, theta, number, members) for number in numbers}
        return cls(layout, fragments, count, theta)

    @property
    def round(self) -> int:
        """Number of completed turns, without a gap among those of held fragments."""
        rounds = {number: fragment.replica.round for number, fragment in self.fragments.items()}
        return min(turn_of(number, one, self.count) for number, one in rounds.items()) if any(rounds.values()) else 0

    @property
    def digest(self) -> Digest:
        """Digest of all held fragments. It is not comparable between peers."""
        hasher = blake3.blake3(b"thinwire/chains/1\0")
        for number, fragment in self.fragments.items():
            hasher.update(number.to_bytes(2, "big") + fragment.replica.newest[1])
        return hasher.digest()

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Members of the last round of any held fragment."""
        return tuple(sorted({peer for fragment in self.fragments.values() for peer in fragment.replica.members}))

    @property
    def theta(self) -> Floats:
        """Copy of the outer parameters; fragments that are not held have their initial values."""
        theta = np.empty(self.size, np.float32) if self._initial_theta is None else self._initial_theta.copy()
        for fragment in self.fragments.values():
            fragment.part.put(theta, fragment.replica.theta)
        return theta

    def write_model(self, write: ParameterWrite) -> None:
        """Set the model to the outer parameters."""
        write(self.theta)

    def seal(self) -> None:
        """Compute the digests of all held fragments."""
        for fragment in self.fragments.values():
            fragment.replica.seal()

    def keep_ledger(self, manifest: Manifest) -> None:
        """Do nothing: the manifest does not allow a data ledger with this method."""

    def each(self, layout: Layout) -> Iterator[tuple[int, Replica, Layout]]:
        """Yield number, replica and layout of each held fragment."""
        for number, fragment in self.fragments.items():
            yield number, fragment.replica, fragment.layout

    def with_fragments(self, fragments: Mapping[int, Replica]) -> Self:
        """Return this state with other replicas of its fragments."""
        other = copy(self)
        other.fragments = {
            number: replace(fragment, replica=fragments[number]) for number, fragment in self.fragments.items()
        }
        return other

    @property
    def newest(self) -> tuple[int, Digest]:
        """The latest turn and the digest of its fragment."""
        return max((self.last_turn(number), fragment.replica.newest[1]) for number, fragment in self.fragments.items())

    @property
    def contents(self) -> tuple[int, int]:
        """Latest turn, and number of fetched states, see Replica."""
        return self.newest[0], sum(fragment.replica.fetched for fragment in self.fragments.values())

    @property
    def complete(self) -> bool:
        """True if this peer holds all fragments of the model."""
        return len(self.fragments) == self.count

    @property
    def fragment_digests(self) -> dict[int, Digest]:
        return {number: fragment.replica.digest for number, fragment in self.fragments.items()}

    def members_of(self, number: int) -> tuple[PeerId, ...]:
        """Return the members of a fragment's last round, or of any held one if it is not held."""
        return self.fragments[number].replica.members if number in self.fragments else self.members

    def last_turn(self, number: int) -> int:
        """Return the turn, from 1 on, of the last round of a fragment; 0 before the first."""
        done = self.fragments[number].replica.round
        return turn_of(number, done - 1, self.count) + 1 if done else 0

    def after(self, outcome: Outcome) -> tuple[int, tuple[PeerId, ...], Digest]:
        """Return turn, members and digest of the fragment of the outer step of `outcome`."""
        assert outcome.commit is not None
        number = outcome.commit.proposal.fragment
        replica = self.fragments[number].replica
        return self.last_turn(number), replica.members, replica.digest
