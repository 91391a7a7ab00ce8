"""Invariants of committed rounds of pairs or groups (NoLoCo), for any codec.

The checker keeps its own state of every honest replica. From this and from the trained parameters it computes what each
replica has sent, and from that the next state of each. The step is implemented a second time here, from the paper and
not from the product; only codecs, the chunk grid and the owners of chunks are shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import blake3
import numpy as np
from thinwire.collectives.aggregation.screening import NORM_LIMIT
from thinwire.collectives.gossip.owner_group import MESH
from thinwire.collectives.gossip.pair_codec import halves
from thinwire.collectives.topology.shards import grid, shares
from thinwire.compression.core.types import Floats
from thinwire.compression.sparse.flat import FlatSparse
from thinwire.sims.invariants.gossip_contributions import Offer, OfferHistory, ReplicaState, decoded
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import Commit, Contribution, PeerId
from thinwire.swarm.method_specs.noloco import NoLoCo

STEPS = 2
"""Number of stored steps for each honest peer, of groups that have not reported in full yet."""

MOST = 256
"""Most pairs of means of one chunk that are tried; the number grows with that of absent members."""

ROUNDING = 16.0
"""Tolerance of a sum of two values, in ULPs of the larger one; larger for a group."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Members of a round as one peer reports them: those that contributed, and those that it gave up."""

    round: int
    entries: tuple[Contribution, ...]
    absent: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class _Step:
    """A peer's round: its state before and after, and its contribution."""

    index: int
    old: ReplicaState
    new: ReplicaState
    offer: Offer


_Span = tuple[slice, PeerId | None]
"""A chunk: its elements, and its owner, None for a chunk that has none."""


class GossipInvariants:
    """Checker of gossip rounds. `honest`: peer id -> index. `tell`: reports oracle, peer, detail.

    `met`: number of checked states that several peers have made.
    """

    def __init__(self, manifest: Manifest, honest: Mapping[PeerId, int], tell: Callable[[str, int, str], None]) -> None:
        outer = manifest.method(NoLoCo)
        self._how = halves(manifest.exchange.codec, lr=outer.lr, gamma=outer.gamma, parts=outer.slow_weight_parts)
        self._parts = outer.slow_weight_parts
        self._alpha, self._beta, self._gamma = map(np.float32, (outer.momentum, outer.lr, outer.gamma))
        self._honest, self._tell = honest, tell
        self._owned = manifest.exchange.gossip_group_size > MESH
        self._at: dict[int, ReplicaState] = {}
        self._history = OfferHistory(self._how, outer.residual_decay)
        self._made: dict[int, dict[bytes, bytes]] = {}
        """Hash of each state that a peer has made -> hash of its residual: a restart may return to any of them."""
        self._longest: dict[int, float] = {}
        self._steps: dict[_Group, list[_Step]] = {}
        """Steps of groups of which not all members have reported yet."""
        self.met = 0

    def encoded(self, peer: PeerId, attempt: int, theta: Floats) -> None:
        """Record that a peer is about to announce its slow weights minus `theta`, which does not change any more.

        Instead of parameters that are not finite it announces its slow weights.
        """
        index = self._honest.get(peer, -1)
        state = self._at.get(index)
        if state is not None:
            self._history.announce(index, attempt, state, theta if np.isfinite(theta).all() else state.phi)

    def installed(self, index: int, round: int, state: Floats, residual: Floats, *, damaged: bool) -> None:
        """Check the residual of a state that a peer did not compute in this process.

        It is that of the checkpoint, if the state is one that the peer has made, otherwise zero. `damaged`: a fault may have
        damaged the private part of the checkpoint.
        """
        phi, delta = _halved(state)
        left = self._whole(residual, phi)
        expected = self._made.get(index, {}).get(_hash(phi, delta), _hash(np.zeros_like(left)))
        if _hash(left) != expected and not (damaged and not residual.size):
            self._tell("aggregate", index, f"round {round}: the state is restored with another residual")
        self._begin(index, ReplicaState(round, phi, delta, left))

    def ended(self, index: int) -> None:
        """Record that a process ended."""
        self._at.pop(index, None)
        self._longest.pop(index, None)

    def committed(self, index: int, round: int, state: Floats, residual: Floats, commit: Commit) -> None:
        """Check a round that an honest peer has made with others, or alone."""
        opened, old = commit.opened, self._at.get(index)
        group = _Group(round, opened.contributors, frozenset(one.peer for one in opened.excluded))
        phi, delta = _halved(state)
        left = self._whole(residual, phi)
        mine, others = None, []
        for entry in group.entries:
            peer = self._honest.get(entry.peer)
            offer = self._history.find(peer, round, entry.attempt)
            if peer == index:
                mine = offer
            else:
                others.append(offer)
        if old is None or mine is None or mine.replica is not old:
            return self._begin(index, ReplicaState(round, phi, delta, left))
        expected = self._left(index, mine, left, group)
        if expected.tobytes() != left.tobytes():
            away = float(np.abs(expected - left).max())
            self._tell("aggregate", index, f"round {round}: the residual is off by up to {away:.3g}")
        step = _Step(index, old, ReplicaState(round, phi, delta, expected), mine)
        self._begin(index, step.new)
        self._made.setdefault(index, {})[_hash(phi, delta)] = _hash(expected)
        known = [offer.sent for offer in others if offer is not None]
        unknown, owned = len(known) < len(others), self._owned and bool(others or group.absent)
        if unknown or (owned and group.absent):
            self._bound(step, group)
        if unknown:
            return
        if owned:
            steps = self._complete(step, group)
            for one, wanted in zip(steps, self._owner_steps(steps, group) if steps else (), strict=False):
                self._equal(one, wanted, len(group.entries) + len(group.absent))
                self.met += len(steps) > 1
        elif not others:
            self._equal(step, self._alpha * old.delta + self._beta * (mine.theta - old.phi), 2)
        else:
            self.met += 1
            self._equal(step, self._together(step, known), len(group.entries))
            self._mean(self._complete(step, replace(group, absent=frozenset())))

    def _begin(self, index: int, state: ReplicaState) -> None:
        self._at[index] = state
        self._history.begin(index, state)

    def _complete(self, step: _Step, group: _Group) -> list[_Step]:
        """Store a step; return those of all members once each of them has reported this group.

        A pair that failed on one side shows in a report, so such a group is never complete.
        """
        steps = self._steps.setdefault(group, [])
        steps.append(step)
        if len(steps) == len(group.entries):
            return self._steps.pop(group)
        while sum(map(len, self._steps.values())) > STEPS * len(self._honest):
            del self._steps[next(iter(self._steps))]
        return []

    # Residuals

    def _whole(self, residual: Floats, phi: Floats) -> Floats:
        """Return a copy of a residual; zeros if a lossy codec has not left any yet."""
        return residual.copy() if residual.size or self._how.exact else np.zeros_like(phi)

    def _left(self, index: int, mine: Offer, found: Floats, group: _Group) -> Floats:
        """Return the residual after a round, which changes where the chunk has a mean.

        If `found` decides, all pairs of an owner have failed: the contributions to its chunks may have been there before.
        """
        old, alone = mine.replica.left, len(group.entries) == 1
        if self._how.exact or (alone and not (self._owned and group.absent)):
            return old
        after = mine.left
        if not self._owned:
            return after
        left = old.copy()
        for part, owner in self._chunks(False, old.size, group):
            if alone:
                mean = self._honest.get(owner) == index and found[part].tobytes() != old[part].tobytes()
            else:
                mean = owner not in group.absent
            if mean:
                left[part] = after[part]
        return left

    # Groups whose chunks have owners

    def _chunks(self, slow: bool, size: int, group: _Group) -> Iterator[_Span]:
        """Yield the chunks of Δ, or those of the slow weights that travel in the round."""
        members = sorted(group.absent.union(entry.peer for entry in group.entries))
        cut = grid(size, self._how)
        chunks = [chunk for chunk in range(len(cut)) if not slow or chunk % self._parts == group.round % self._parts]
        owned = slow or not isinstance(self._how.fast, FlatSparse)
        for chunk, owner in zip(chunks, shares(len(chunks), members, fragment=group.round), strict=True):
            yield slice(*cut.span(chunk)), owner if owned else None

    def _owner_steps(self, steps: Sequence[_Step], group: _Group) -> list[Floats]:
        """Return δ of each member after the step with the means of owners; nothing if too much is unknown.

        The mean of a chunk is that of all members, and of those absent ones whose contributions had arrived before their
        owner gave them up. Which ones is not known, but it is the same for all members, so the mean that fits best is
        expected.
        """
        absent = [self._history.vectors(self._honest.get(peer), group.round) for peer in sorted(group.absent)]
        sent = [one for one in absent if one is not None]
        tries = math.prod((1 + len(fast)) * (1 + len(slow)) for fast, slow in sent)
        if len(sent) < len(absent) or tries > MOST:
            return []
        fasts = _means([step.offer.vector for step in steps], [fast for fast, _ in sent])
        slows = _means([step.offer.sent[1] for step in steps], [slow for _, slow in sent])
        size = steps[0].old.phi.size
        mixed = {part.start: owner for part, owner in self._chunks(True, size, group)}
        wanted = [np.empty_like(step.old.delta) for step in steps]

        def away(part: slice, deltas: Sequence[Floats]) -> float:
            found = zip(steps, deltas, strict=True)
            return max(float(np.abs(step.new.delta[part] - delta).max()) for step, delta in found)

        for part, owner in self._chunks(False, size, group):
            travels = self._how.slow is not None and part.start in mixed
            fast = _possible(fasts, owner, group)
            slow = _possible(slows, mixed[part.start], group) if travels else [None]
            tried = [[self._delta(step, part, *means) for step in steps] for means in product(fast, slow)]
            best = min(tried, key=lambda deltas: away(part, deltas))
            for out, delta in zip(wanted, best, strict=True):
                out[part] = delta
        return wanted

    def _delta(self, step: _Step, part: slice, fast: Floats | None, slow: Floats | None) -> Floats:
        """Return δ in a chunk after the step with these means of all chunks, which the owner encodes."""
        how, old = self._how, step.old
        if fast is None:
            mean = step.offer.theta[part] - old.phi[part]
        elif how.slow is None:  # One vector, θ = Δ + φ, whose mean has both.
            mean = fast[part] - old.phi[part]
        else:
            mean = fast[part] if how.exact or isinstance(how.fast, FlatSparse) else decoded(how.means, fast[part])
        delta = self._alpha * old.delta[part] + self._beta * mean
        if slow is not None:
            pull = slow[part] - step.offer.sent[1][part]
            delta += self._gamma * (pull if how.exact else decoded(how.means, pull))
        return np.asarray(delta, np.float32)

    # Checks

    def _together(self, step: _Step, others: Sequence[tuple[Floats, Floats]]) -> Floats:
        mine, share = step.offer.sent, np.float32(1 / (1 + len(others)))
        mean, middle = (np.sum([mine[i], *(one[i] for one in others)], axis=0) * share for i in (0, 1))
        chunks = np.arange(mean.size) // grid(mean.size, self._how).chunk
        pull = np.where(chunks % self._parts == step.new.round % self._parts, mine[1] - middle, np.float32(0))
        return np.asarray(self._alpha * step.old.delta + self._beta * mean - self._gamma * pull, np.float32)

    def _equal(self, step: _Step, delta: Floats, size: int) -> None:
        """Check that the new state is δ and φ + δ, up to rounding."""
        phi, new = step.old.phi + delta, step.new
        away = float(max(np.abs(new.delta - delta).max(), np.abs(new.phi - phi).max()))
        if not away <= _unit(delta, phi) * size / 2:
            self._tell("aggregate", step.index, f"round {new.round}: off by up to {away:.3g}")

    def _mean(self, steps: Sequence[_Step]) -> None:
        """Check that pushes and pulls cancel out: a whole group makes DiLoCo's step."""
        if not steps:
            return
        wanted = sum(self._alpha * one.old.delta + self._beta * one.offer.sent[0] for one in steps)
        away = float(np.abs(sum(one.new.delta for one in steps) - wanted).max())
        if not away <= len(steps) * _unit(*(one.new.phi for one in steps), np.asarray(wanted)):
            detail = f"round {steps[-1].new.round}: {len(steps)} have moved their mean by {away:.3g} too much"
            self._tell("mean", steps[-1].index, detail)

    def _bound(self, step: _Step, group: _Group) -> None:
        """Check a step with members that may have sent anything: the screening limits their effect on our own step.

        The usual norm is at most our own longest norm, because the smaller of two counts; a vector within the limit of
        φ has two parts, which move δ by β and γ. Chunks that the peer owns itself are exempt: their limit is the median of
        the group, and a peer whose own vectors are zero uses those means, too.
        """
        index, old, sent = step.index, step.old, step.offer.sent
        size = len(group.entries) + (len(group.absent) if self._owned else 0)
        moved = step.new.delta - self._alpha * old.delta - self._beta * np.float32(1 / size) * sent[0]
        vectors = (False,) if self._how.slow is None else (False, True)
        for slow in vectors if self._owned else ():
            for part, owner in self._chunks(slow, old.phi.size, group):
                if owner is not None and self._honest.get(owner) == index:
                    moved[part] = 0
        away = float(np.linalg.norm(moved))
        own = float(np.hypot(np.linalg.norm(sent[0]), np.linalg.norm(sent[1] - old.phi)))
        own = own or float(np.linalg.norm(old.delta))  # A peer that has not trained compares others with its momentum.
        longest = self._longest[index] = max(self._longest.get(index, 0.0), own)
        limit = float(self._beta + self._gamma) * (size - 1) / size * (1 + NORM_LIMIT) * longest
        if not away <= limit:
            detail = f"round {group.round}: {away:.3g} from the step alone, the limit is {limit:.3g}"
            self._tell("bound", index, detail)


def _means(sent: Sequence[Floats], absent: Sequence[Sequence[Floats]]) -> list[Floats | None]:
    """Return the means of these vectors and of one or none of the vectors of each absent member.

    The first one has none of them. None: a single vector has no mean.
    """
    means: list[Floats | None] = []
    for chosen in product(*((None, *vectors) for vectors in absent)):
        vectors = [*sent, *(one for one in chosen if one is not None)]
        means.append(np.sum(vectors, axis=0) * np.float32(1 / len(vectors)) if len(vectors) > 1 else None)
    return means


def _possible(means: Sequence[Floats | None], owner: PeerId | None, group: _Group) -> Sequence[Floats | None]:
    """Return the means that a chunk may have. Without an owner, members use only what all of them have."""
    if owner is None:
        return means[:1]
    return [None] if owner in group.absent else means


def _halved(state: Floats) -> tuple[Floats, Floats]:
    """Return copies of φ and δ of a replica's state."""
    half = state.size // 2
    return state[:half].copy(), state[half:].copy()


def _hash(*vectors: Floats) -> bytes:
    """Return a hash of these vectors."""
    return blake3.blake3(b"".join(vector.tobytes() for vector in vectors)).digest(16)


def _unit(*values: Floats) -> float:
    """Return the rounding error of a sum with these terms and results."""
    return ROUNDING * float(np.finfo(np.float32).eps) * max(1e-3, *(float(np.abs(one).max()) for one in values))
