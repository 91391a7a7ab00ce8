"""A model whose fragments move each for itself: a chain of rounds has a replica, members, a digest and votes of its own.

Fragment p of P is a part of the model (see `parts`). Chains take turns: turn n, counted from 0, is round n // P + 1 of fragment
n mod P, so that several are under way while training goes on, and who holds only some fragments has part in their chains only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import blake3
import numpy as np
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounds.payload import pieces
from thinwire.collectives.topology.shards import Grid, grid
from thinwire.compression.core.types import Floats
from thinwire.node.methods.sparse.replica import SparseCodec, SparseReplica, chunks_of
from thinwire.node.state.fragments import FragmentSpans, fragments_of, layout_of_part
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica import ParameterWrite, Read, Replica
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import Digest, PeerId


def turn_of(number: int, round: int, count: int) -> int:
    """The turn in which a fragment of `count` has its round after `round`."""
    return round * count + number


def rounds_of(number: int, turns: int, count: int) -> int:
    """How many of the first `turns` turns are a fragment's."""
    return max(0, (turns - number + count - 1) // count)


@dataclass(frozen=True, slots=True)
class FragmentReplica:
    """One fragment that is held here: its place in the model, and its outer state."""

    number: int
    part: FragmentSpans
    layout: Layout
    replica: Replica

    def reader(self, read: Read) -> Read:
        """Reads elements of the part, where `read` does the model's."""

        def within(start: int, stop: int, out: Floats) -> None:
            at = 0
            for low, high in self.part.within(start, stop):
                read(low, high, out[at : at + high - low])
                at += high - low

        return within

    def writer(self, write: ParameterWrite) -> ParameterWrite:
        """Sets elements of the part, where `write` does the model's."""

        def within(theta: Floats, start: int = 0, keep: float = 0.0) -> None:
            at = 0
            for low, high in self.part.within(start, start + theta.size):
                write(theta[at : at + high - low], low, keep)
                at += high - low

        return within


def chain_of(
    manifest: Manifest, layout: Layout, codec: Any, theta: Floats, number: int, members: Sequence[PeerId]
) -> FragmentReplica:
    """Fragment `number` of a model with these parameters (of which it takes its own); `codec`: of the whole model's rounds."""
    part = fragments_of(manifest, layout)[number]
    inner = layout_of_part(layout, part, number, manifest.outer.fragment_count)
    kind, own, cut = Replica, codec, grid(part.size, codec) if not manifest.sparse else None
    if cut is None:
        kind, own = SparseReplica, SparseCodec(codec.codec, chunks_of(inner, codec.codec.chunk))
        cut = pieces(own.bound)
    return FragmentReplica(number, part, inner, kind.begin(manifest, inner, own, cut, part.take(theta), members))


class FragmentReplicas:
    """The chains of one peer: what `Replica` is where a round is about the whole model. Made by `begin`.

    `chains`: by fragment number, those that are held; `count`: fragments of the model.
    """

    alike: ClassVar[bool] = True
    vectors: ClassVar[int] = 2
    ledger: ClassVar[None] = None

    def __init__(self, layout: Layout, chains: Mapping[int, FragmentReplica], count: int, theta: Floats) -> None:
        self.layout, self.size = layout.digest, layout.total
        self.chains, self.count = chains, count
        self._first = theta if len(chains) < count else None

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
        """See Replica. `held`: numbers of the fragments that this peer holds; None: all."""
        count = manifest.outer.fragment_count
        numbers = range(count) if held is None else sorted(held)
        chains = {number: chain_of(manifest, layout, codec, theta, number, members) for number in numbers}
        return cls(layout, chains, count, theta)

    @property
    def round(self) -> int:
        """Turns that are over, as far as they are of fragments held here: no earlier one is missing."""
        rounds = {number: chain.replica.round for number, chain in self.chains.items()}
        return min(turn_of(number, one, self.count) for number, one in rounds.items()) if any(rounds.values()) else 0

    @property
    def digest(self) -> Digest:
        """Names the state of all fragments that are held."""
        hasher = blake3.blake3(b"thinwire/chains/1\0")
        for number, chain in self.chains.items():
            hasher.update(number.to_bytes(2, "big") + chain.replica.newest[1])
        return hasher.digest()

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Who took part in the last round of any fragment that is held."""
        return tuple(sorted({peer for chain in self.chains.values() for peer in chain.replica.members}))

    def hold_alone(self, member: PeerId, life: bytes) -> None:
        """Make a peer the only member of all held fragments, see Replica."""
        for chain in self.chains.values():
            chain.replica.hold_alone(member, life)

    @property
    def theta(self) -> Floats:
        """A copy of the outer parameters; of fragments that are not held, what they were at first."""
        theta = np.empty(self.size, np.float32) if self._first is None else self._first.copy()
        for chain in self.chains.values():
            chain.part.put(theta, chain.replica.theta)
        return theta

    def seal(self) -> None:
        """See Replica."""
        for chain in self.chains.values():
            chain.replica.seal()

    def keep_ledger(self, manifest: Manifest) -> None:
        """Several fragments under way keep no book of the data; the manifest sees to that."""

    def each(self, layout: Layout) -> Iterator[tuple[int, Replica, Layout]]:
        """See Replica."""
        for number, chain in self.chains.items():
            yield number, chain.replica, chain.layout

    @property
    def newest(self) -> tuple[int, Digest]:
        """See Replica: the latest turn, and the digest of its fragment."""
        return max((self.name(number), chain.replica.newest[1]) for number, chain in self.chains.items())

    @property
    def complete(self) -> bool:
        """Whether this peer holds all fragments of the model."""
        return len(self.chains) == self.count

    @property
    def fragment_digests(self) -> dict[int, Digest]:
        """Digests of the held fragments, by number."""
        return {number: chain.replica.digest for number, chain in self.chains.items()}

    def members_of(self, number: int) -> tuple[PeerId, ...]:
        """Members of the last round of fragment `number`, or of all that are held where that one is not."""
        return self.chains[number].replica.members if number in self.chains else self.members

    def name(self, number: int) -> int:
        """What the last round of a fragment is called where those of all are counted: its turn, from 1 on; 0: none."""
        done = self.chains[number].replica.round
        return turn_of(number, done - 1, self.count) + 1 if done else 0

    def after(self, outcome: Outcome) -> tuple[int, tuple[PeerId, ...], Digest]:
        """See Replica: the turn, and members and digest of its fragment."""
        assert outcome.commit is not None
        number = outcome.commit.opened.fragment
        replica = self.chains[number].replica
        return self.name(number), replica.members, replica.digest
