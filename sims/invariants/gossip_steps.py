"""The outer step of a round of gossip, from the contributions to its group.

It is implemented a second time here, from the paper (NoLoCo, arXiv 2506.10911) and not from the product; only codecs, the
chunk grid and the owners of chunks are shared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from thinwire.collectives.gossip.owner_group import MESH
from thinwire.collectives.gossip.pair_codec import parse_pair_codec
from thinwire.collectives.topology.shards import grid, shares
from thinwire.compression.core.types import Floats
from thinwire.compression.sparse.flat import FlatSparse
from thinwire.sims.invariants.gossip_contributions import Offer, ReplicaState, Vectors, decoded
from thinwire.sims.invariants.sparse_mean import sparse_mean
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import Contribution, PeerId
from thinwire.swarm.method_specs.noloco import NoLoCo

MOST = 256
"""Most pairs of means of one chunk that are tried; the number grows with that of absent members."""


@dataclass(frozen=True, slots=True)
class Group:
    """Members of a round as one peer reports them: those that contributed, and those that it gave up."""

    round: int
    entries: tuple[Contribution, ...]
    absent: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class Step:
    """A peer's round: its state before and after, and its contribution."""

    peer: PeerId
    old: ReplicaState
    new: ReplicaState
    offer: Offer


class OuterSteps:
    """The step of a run: δ ← α δ + β mean(Δ) + γ (mean(φ) − φ), φ ← φ + δ, and what the codec leaves out.

    `owned`: chunks have owners.
    """

    def __init__(self, manifest: Manifest) -> None:
        outer = manifest.method(NoLoCo)
        self.how = parse_pair_codec(
            manifest.exchange.codec, lr=outer.lr, gamma=outer.gamma, parts=outer.slow_weight_parts
        )
        self.owned = manifest.exchange.gossip_group_size > MESH
        self.alpha, self.beta, self.gamma = map(np.float32, (outer.momentum, outer.lr, outer.gamma))
        self._parts = outer.slow_weight_parts

    def chunks(self, group: Group, size: int, *, slow: bool) -> Iterator[tuple[slice, PeerId | None]]:
        """Yield elements and owner, if any, of each chunk of Δ.

        `slow`: of the chunks of the slow weights that travel in the round.
        """
        members = sorted(group.absent.union(entry.peer for entry in group.entries))
        cut = grid(size, self.how)
        chunks = [chunk for chunk in range(len(cut)) if not slow or self._travels(chunk, group.round)]
        owned = slow or not isinstance(self.how.fast, FlatSparse)
        for chunk, owner in zip(chunks, shares(len(chunks), members, fragment=group.round), strict=True):
            yield slice(*cut.span(chunk)), owner if owned else None

    def _travels(self, chunk: int, round: int) -> bool:
        return self.how.slow is not None and chunk % self._parts == round % self._parts

    def left(self, me: PeerId, mine: Offer, found: Floats, group: Group) -> Floats:
        """Return the residual after a round, which changes where a chunk has a mean.

        All pairs of a member may have failed after contributions to its own chunks had arrived. So these may have a mean or
        not, and `found` decides.
        """
        old, alone = mine.replica.left, len(group.entries) == 1
        if self.how.exact or (alone and not (self.owned and group.absent)):
            return old
        after = mine.left
        if not self.owned:
            return after
        left = old.copy()
        for part, owner in self.chunks(group, old.size, slow=False):
            if alone:
                mean = owner == me and found[part].tobytes() != old[part].tobytes()
            else:
                mean = owner not in group.absent
            if mean:
                left[part] = after[part]
        return left

    def alone(self, mine: Offer) -> Floats:
        """Return δ after a step without means."""
        return self._delta(mine, slice(None), None, None)

    def together(self, mine: Offer, others: Sequence[Offer], round: int) -> Floats:
        """Return δ after a step with these contributions, in a group whose chunks have no owners."""
        offers = [mine, *others]
        mean, middle = self.mean(offers), _mean([offer.sent[1] for offer in offers])
        chunks = np.arange(mean.size) // grid(mean.size, self.how).chunk
        pull = np.where(chunks % self._parts == round % self._parts, middle - mine.sent[1], np.float32(0))
        return self._step(mine, slice(None), mean, pull)

    def mean(self, offers: Sequence[Offer]) -> Floats:
        """Return the mean of Δ of these contributions."""
        vectors, marked = [offer.sent[0] for offer in offers], [one.marks for one in offers if one.marks is not None]
        mean = _mean(vectors)
        if marked:
            for index in range(len(cut := grid(mean.size, self.how))):
                part = slice(*cut.span(index))
                mean[part] = sparse_mean([vector[part] for vector in vectors], [one[part] for one in marked])
        return mean

    def with_owners(self, steps: Sequence[Step], group: Group, absent: Sequence[Vectors]) -> list[Floats] | None:
        """Return δ of each member after its step with the means of owners.

        `steps`: those of all members. `absent`: vectors that each absent member may have sent. None: there are too many
        possibilities.

        The mean of a chunk is that of all members, and of those absent ones whose contributions had arrived before the owner
        gave them up. Which ones is not known, but all members have the same mean, so the one that fits best is expected.
        """
        if math.prod((1 + len(fast)) * (1 + len(slow)) for fast, slow in absent) > MOST:
            return None
        if isinstance(self.how.fast, FlatSparse):
            fasts = [self.mean([step.offer for step in steps]) if len(steps) > 1 else None]
        else:
            fasts = _means([step.offer.vector for step in steps], [fast for fast, _ in absent])
        slows = _means([step.offer.sent[1] for step in steps], [slow for _, slow in absent])
        size = steps[0].old.phi.size
        owners = {part.start: owner for part, owner in self.chunks(group, size, slow=True)}
        wanted = [np.empty_like(step.old.delta) for step in steps]
        for part, owner in self.chunks(group, size, slow=False):
            fast = _possible(fasts, owner, group)
            slow = _possible(slows, owners[part.start], group) if part.start in owners else [None]
            tried = ([self._delta(step.offer, part, *means) for step in steps] for means in product(fast, slow))
            best = min(tried, key=lambda deltas: _distance(steps, part, deltas))
            for out, delta in zip(wanted, best, strict=True):
                out[part] = delta
        return wanted

    def _delta(self, mine: Offer, part: slice, fast: Floats | None, slow: Floats | None) -> Floats:
        """Return δ in a chunk after the step with these means of all chunks, which owners encode."""
        how, phi = self.how, mine.replica.phi[part]
        if fast is None:
            mean = mine.theta[part] - phi
        elif how.slow is None:  # The mean of θ = Δ + φ has both terms.
            mean = fast[part] - phi
        else:
            mean = fast[part] if how.exact or isinstance(how.fast, FlatSparse) else decoded(how.means, fast[part])
        pull = None if slow is None else slow[part] - mine.sent[1][part]
        return self._step(mine, part, mean, pull if pull is None or how.exact else decoded(how.means, pull))

    def _step(self, mine: Offer, part: slice, mean: Floats, pull: Floats | None) -> Floats:
        """Return α δ + β mean + γ pull in some elements; without a pull the last term is left out."""
        delta = self.alpha * mine.replica.delta[part] + self.beta * mean
        if pull is not None:
            delta += self.gamma * pull
        return np.asarray(delta, np.float32)


def _means(sent: Sequence[Floats], absent: Sequence[Sequence[Floats]]) -> list[Floats | None]:
    """Return the means of these vectors and of one or none of the vectors of each absent member.

    The first one has none of them. None: a single vector has no mean.
    """
    means: list[Floats | None] = []
    for chosen in product(*((None, *vectors) for vectors in absent)):
        vectors = [*sent, *(one for one in chosen if one is not None)]
        means.append(_mean(vectors) if len(vectors) > 1 else None)
    return means


def _mean(vectors: Sequence[Floats]) -> Floats:
    return np.asarray(np.sum(vectors, axis=0) * np.float32(1 / len(vectors)), np.float32)


def _possible(means: Sequence[Floats | None], owner: PeerId | None, group: Group) -> Sequence[Floats | None]:
    """Return the means that a chunk may have.

    Without an owner members use only contributions of each other.
    """
    if owner is None:
        return means[:1]
    return [None] if owner in group.absent else means


def _distance(steps: Sequence[Step], part: slice, deltas: Sequence[Floats]) -> float:
    """Return the largest difference between δ in a chunk of all members and these."""
    return max(float(np.abs(step.new.delta[part] - delta).max()) for step, delta in zip(steps, deltas, strict=True))
