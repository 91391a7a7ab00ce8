"""Invariants of committed rounds of pairs or groups (NoLoCo), for any codec.

The checker keeps its own state of every honest replica, and of what the codec has left out of its steps so far. From
this and from the trained parameters it computes what each replica has sent, and from that the next state of each. The
step is implemented a second time here, from the paper and not from the product; only codecs and the chunk grid are
shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import blake3
import numpy as np
from thinwire.collectives.aggregation.screening import NORM_LIMIT
from thinwire.collectives.gossip.owner_group import MESH
from thinwire.collectives.gossip.pair_codec import PairCodec, halves, payload_of
from thinwire.collectives.topology.shards import grid, shares
from thinwire.compression.core.codec import Codec
from thinwire.compression.core.types import Floats
from thinwire.compression.sparse.flat import FlatSparse
from thinwire.sims.invariants.sparse_mean import Marks, marks, sparse_mean
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import Commit, Contribution, PeerId
from thinwire.swarm.method_specs.noloco import NoLoCo

KEPT = 4
"""Number of stored contributions of one peer: partners are in the same round."""

STEPS = 2
"""Number of stored steps for each honest peer whose group has not reported in full yet."""

PAST = 32
"""Number of past states of one peer that a checkpoint may have."""

ROUNDING = 16.0
"""Tolerance of a sum of two values, in ULPs of the larger one; larger for a group."""


@dataclass(frozen=True, slots=True)
class _Replica:
    """φ, δ, and the decayed part of Δ that the codec has left out. Never changed in place.

    `left`: None if unknown.
    """

    phi: Floats
    delta: Floats
    left: Floats | None


@dataclass(frozen=True, slots=True)
class _Sent:
    """Δ and φ that a replica has sent. `marks`: the elements that a sparse Δ has, else None."""

    fast: Floats
    slow: Floats
    marks: Marks | None = None


class _Offer:
    """Data that a replica trained to `theta` sends.

    `decay`: part of the rest of Δ that is carried over.
    """

    def __init__(self, replica: _Replica, round: int, theta: Floats, how: PairCodec, decay: float) -> None:
        self.replica, self.round, self.theta, self._how, self._decay = replica, round, theta, how, np.float32(decay)

    @cached_property
    def sent(self) -> _Sent | None:
        """Return what the partner decodes (or its meaning, with one vector). None: unknown."""
        phi, left = self.replica.phi, self.replica.left
        if self._how.exact or self._how.slow is None:
            return _Sent(self.theta - phi, phi)
        if left is None:
            return None
        delta, cut, fast = self.theta - phi + left, grid(phi.size, self._how), self._how.fast
        pieces = [delta[slice(*cut.span(index))] for index in range(len(cut))]
        marked = (
            [marks(fast, payload_of(fast, one), one.size) for one in pieces] if isinstance(fast, FlatSparse) else []
        )
        slow = [_decoded(self._how.slow, phi[slice(*cut.span(index))]) for index in range(len(cut))]
        moved = np.concatenate([_decoded(fast, one) for one in pieces])
        return _Sent(moved, np.concatenate(slow), np.concatenate(marked) if marked else None)

    @property
    def left(self) -> Floats | None:
        """Return the part that is left out, and carried over to the next contribution."""
        if self._how.exact or self.sent is None or self.replica.left is None:
            return None
        return np.asarray(
            self._decay * (self.theta - self.replica.phi + self.replica.left - self.sent.fast), np.float32
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """A peer's round in a group whose chunks have owners."""

    index: int
    old: _Replica
    new: _Replica
    offer: _Offer


_Span = tuple[int, int, PeerId | None]
"""A chunk: its first element, the one behind its last, and its owner, None for a chunk that has none."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One partner: its new φ, δ before and after, and its Δ as sent."""

    phi: Floats
    before: Floats
    after: Floats
    moved: Floats


class GossipInvariants:
    """Checker of gossip rounds. `honest`: peer id -> index. `tell`: reports oracle, peer, detail.

    `met`: number of checked states that several peers have made.
    """

    def __init__(self, manifest: Manifest, honest: Mapping[PeerId, int], tell: Callable[[str, int, str], None]) -> None:
        outer = manifest.method(NoLoCo)
        self._how = halves(manifest.exchange.codec, lr=outer.lr, gamma=outer.gamma, parts=outer.slow_weight_parts)
        self._parts, self._decay = outer.slow_weight_parts, outer.residual_decay
        self._alpha, self._beta, self._gamma = map(np.float32, (outer.momentum, outer.lr, outer.gamma))
        self._honest, self._tell = honest, tell
        self._owned = manifest.exchange.gossip_group_size > MESH
        self._at: dict[int, _Replica] = {}
        self._past: dict[int, dict[bytes, Floats | None]] = {}
        self._offers: dict[PeerId, dict[tuple[int, int], _Offer]] = {}
        self._sides: dict[tuple[int, tuple[Contribution, ...]], list[_Side]] = {}
        self._longest: dict[int, float] = {}
        self._groups: dict[tuple[int, tuple[Contribution, ...], frozenset[PeerId]], list[_Step]] = {}
        self.met = 0

    def encoded(self, peer: PeerId, round: int, attempt: int, theta: Floats) -> None:
        """Record that a peer is about to announce its slow weights minus `theta`, which is finite."""
        index = self._honest.get(peer)
        replica = self._at.get(index) if index is not None else None
        if replica is not None:
            offers = self._offers.setdefault(peer, {})
            offers[round, attempt] = _Offer(replica, round, theta.copy(), self._how, self._decay)
            while len(offers) > KEPT:
                del offers[next(iter(offers))]

    def installed(self, index: int, state: Floats) -> None:
        """Record a state that a peer did not compute."""
        phi, delta = _halved(state)
        left = self._past.get(index, {}).get(_name(phi, delta), np.zeros_like(phi))  # A checkpoint has what is left.
        self._at[index] = _Replica(phi, delta, left)

    def ended(self, index: int) -> None:
        """Record that a process ended."""
        self._at.pop(index, None)
        self._longest.pop(index, None)

    def committed(self, index: int, round: int, state: Floats, commit: Commit) -> None:
        """Check a round that an honest peer has made with others, or alone."""
        entries, old = commit.opened.contributors, self._at.get(index)
        phi, delta = _halved(state)
        mine, others = None, []
        for entry in entries:
            offer = self._offers.get(entry.peer, {}).get((round, entry.attempt))
            if self._honest.get(entry.peer) == index:
                mine = offer
            else:
                others.append(None if offer is None else offer.sent)
        if old is None or mine is None or mine.replica is not old:
            self._moved(index, _Replica(phi, delta, None))
            return
        known = [sent for sent in others if sent is not None]
        absent = frozenset(one.peer for one in commit.opened.excluded)
        if self._owned and (others or absent):
            new = self._moved(index, _Replica(phi, delta, self._left(old, mine, entries, absent)))
            if mine.sent is not None and len(known) == len(others):
                self._group(index, round, entries, absent, _Step(index, old, new, mine))
            elif mine.sent is not None:
                self._bound(index, round, old, new, mine.sent, entries, absent)
            return
        new = self._moved(index, _Replica(phi, delta, mine.left if others else old.left))
        if not others:
            self._equal(index, round, old, new, self._alpha * old.delta + self._beta * (mine.theta - old.phi), 2)
        elif mine.sent is not None and len(known) == len(others):
            self.met += 1
            self._equal(index, round, old, new, self._together(round, old, mine.sent, known), len(entries))
            fast = mine.sent.fast if mine.sent.marks is None else self._means([mine.sent, *known])[0]
            self._mean(index, round, entries, _Side(new.phi, old.delta, new.delta, fast))
        elif mine.sent is not None:
            self._bound(index, round, old, new, mine.sent, entries, absent)

    def _moved(self, index: int, new: _Replica) -> _Replica:
        """Record the state after a round, to which a restart may return."""
        self._at[index] = new
        past = self._past.setdefault(index, {})
        past[_name(new.phi, new.delta)] = new.left
        while len(past) > PAST:
            del past[next(iter(past))]
        return new

    # Groups whose chunks have owners

    def _chunks(
        self, slow: bool, round: int, entries: tuple[Contribution, ...], absent: frozenset[PeerId]
    ) -> Iterator[_Span]:
        """Yield the chunks of Δ, or those of the slow weights that travel in the round."""
        members = sorted(absent.union(entry.peer for entry in entries))
        cut = grid(next(iter(self._at.values())).phi.size, self._how)
        chunks = [chunk for chunk in range(len(cut)) if not slow or chunk % self._parts == round % self._parts]
        owned = slow or not isinstance(self._how.fast, FlatSparse)
        for chunk, owner in zip(chunks, shares(len(chunks), members, fragment=round), strict=True):
            yield *cut.span(chunk), owner if owned else None

    def _left(
        self, old: _Replica, mine: _Offer, entries: tuple[Contribution, ...], absent: frozenset[PeerId]
    ) -> Floats | None:
        """Return what is left out after a round; None if it is unknown.

        An owner whose pairs have all failed may have had contributions to its chunks before.
        """
        if self._how.exact:
            return np.zeros_like(old.phi)
        after = mine.left
        if len(entries) == 1 or after is None or old.left is None:
            return None
        left = after.copy()
        for start, stop, owner in self._chunks(False, mine.round, entries, absent):
            if owner in absent:
                left[start:stop] = old.left[start:stop]
        return left

    def _group(
        self, index: int, round: int, entries: tuple[Contribution, ...], absent: frozenset[PeerId], step: _Step
    ) -> None:
        """Check all members once each of them has reported the same members.

        A pair that failed on one side would show in a report. Slow weights travel early, so those of an absent member may
        be in their mean.
        """
        if absent and self._how.slow is not None:
            assert step.offer.sent is not None
            return self._bound(index, round, step.old, step.new, step.offer.sent, entries, absent)
        steps = self._groups.setdefault((round, entries, absent), [])
        steps.append(step)
        if len(steps) < len(entries) or len(entries) == 1:
            while sum(map(len, self._groups.values())) > STEPS * len(self._honest):
                del self._groups[next(iter(self._groups))]
            return
        del self._groups[round, entries, absent]
        sent = {one.index: one.offer.sent for one in steps}
        in_order = [sent[self._honest[entry.peer]] for entry in entries]
        vectors = [one for one in in_order if one is not None]
        if len(vectors) < len(entries):
            return
        self.met += len(steps)
        fast, slow = self._means(vectors)
        for one in steps:
            moved, drawn = (list(self._chunks(which, round, entries, absent)) for which in (False, True))
            wanted = self._owner_step(one, fast, slow, moved, drawn, absent)
            self._equal(one.index, round, one.old, one.new, wanted, len(entries))

    def _owner_step(
        self,
        step: _Step,
        fast: Floats,
        slow: Floats,
        moved: Sequence[_Span],
        drawn: Sequence[_Span],
        absent: frozenset[PeerId],
    ) -> Floats:
        """Return δ after the step with these means, which owners encode, unless they are absent.

        `moved`, `drawn`: chunks of Δ and of φ.
        """
        sent, old, how = step.offer.sent, step.old, self._how
        assert sent is not None
        delta, pull = self._alpha * old.delta + self._beta * (step.offer.theta - old.phi), slow - sent.slow
        for start, stop, owner in moved:
            part = fast[start:stop]
            if how.slow is None:  # One vector, θ = Δ + φ, whose mean has both.
                part = part + pull[start:stop]
            elif not how.exact and not isinstance(how.fast, FlatSparse):
                part = _decoded(how.means, part)
            if owner not in absent:
                delta[start:stop] = self._alpha * old.delta[start:stop] + self._beta * part
        for start, stop, owner in drawn if how.slow is not None else ():
            part = pull[start:stop] if how.exact else _decoded(how.means, pull[start:stop])
            if owner not in absent:
                delta[start:stop] += self._gamma * part
        return delta

    # Checks

    def _means(self, group: Sequence[_Sent]) -> tuple[Floats, Floats]:
        """Return the means of Δ and φ of a group."""
        share = np.float32(1 / len(group))
        fast, slow = (np.sum(vectors, axis=0) * share for vectors in ([o.fast for o in group], [o.slow for o in group]))
        given = [one.marks for one in group if one.marks is not None]
        if given:
            for index in range(len(cut := grid(fast.size, self._how))):
                here = slice(*cut.span(index))
                fast[here] = sparse_mean([one.fast[here] for one in group], [one[here] for one in given])
        return fast, slow

    def _together(self, round: int, old: _Replica, mine: _Sent, others: Sequence[_Sent]) -> Floats:
        mean, middle = self._means([mine, *others])
        chunks = np.arange(mean.size) // grid(mean.size, self._how).chunk
        pull = np.where(chunks % self._parts == round % self._parts, mine.slow - middle, np.float32(0))
        return np.asarray(self._alpha * old.delta + self._beta * mean - self._gamma * pull, np.float32)

    def _equal(self, index: int, round: int, old: _Replica, new: _Replica, delta: Floats, size: int) -> None:
        """Check that the new state is δ and φ + δ, up to rounding."""
        phi = old.phi + delta
        away = float(max(np.abs(new.delta - delta).max(), np.abs(new.phi - phi).max()))
        if not away <= _unit(delta, phi) * size / 2:
            self._tell("aggregate", index, f"round {round}: off by up to {away:.3g}")

    def _mean(self, index: int, round: int, entries: tuple[Contribution, ...], side: _Side) -> None:
        """Check that pushes and pulls cancel out: a whole group makes DiLoCo's step."""
        sides = self._sides.setdefault((round, entries), [])
        sides.append(side)
        if len(sides) < len(entries):
            while len(self._sides) > KEPT * len(self._honest):
                del self._sides[next(iter(self._sides))]
            return
        del self._sides[round, entries]
        wanted = sum(self._alpha * side.before + self._beta * side.moved for side in sides)
        found = sum(side.after for side in sides)
        away = float(np.abs(found - wanted).max())
        if not away <= len(sides) * _unit(*(side.phi for side in sides), np.asarray(wanted)):
            self._tell("mean", index, f"round {round}: {len(sides)} have moved their mean by {away:.3g} too much")

    def _bound(
        self,
        index: int,
        round: int,
        old: _Replica,
        new: _Replica,
        sent: _Sent,
        entries: tuple[Contribution, ...],
        absent: frozenset[PeerId],
    ) -> None:
        """Check a step with lying partners: their effect on our own step is limited by the screening.

        The usual norm is at most our own longest norm, because the smaller of two counts; a vector within the limit of
        φ has two parts, which move δ by β and γ. Chunks that the peer owns itself are exempt: their limit is the median of
        the group, and a peer whose own vectors are zero uses those means, too.
        """
        size = len(entries) + (len(absent) if self._owned else 0)
        moved = new.delta - self._alpha * old.delta - self._beta * np.float32(1 / size) * sent.fast
        vectors = (False,) if self._how.slow is None else (False, True)
        for slow in vectors if self._owned else ():
            for start, stop, owner in self._chunks(slow, round, entries, absent):
                if owner is not None and self._honest.get(owner) == index:
                    moved[start:stop] = 0
        away = float(np.linalg.norm(moved))
        own = float(np.hypot(np.linalg.norm(sent.fast), np.linalg.norm(sent.slow - old.phi)))
        own = own or float(np.linalg.norm(old.delta))  # A peer that has not trained compares others with its momentum.
        longest = self._longest[index] = max(self._longest.get(index, 0.0), own)
        # A value of a sparse Δ that no other member has sent may count in full.
        share = self._beta / (1 if sent.marks is not None else size) + self._gamma / size
        limit = float(share) * (size - 1) * (1 + NORM_LIMIT) * longest
        if not away <= limit:
            self._tell("bound", index, f"round {round}: {away:.3g} from the step alone, the limit is {limit:.3g}")


def _halved(state: Floats) -> tuple[Floats, Floats]:
    """Return copies of φ and δ of a replica's state."""
    half = state.size // 2
    return state[:half].copy(), state[half:].copy()


def _name(phi: Floats, delta: Floats) -> bytes:
    """Return a hash of a state."""
    return blake3.blake3(phi.tobytes() + delta.tobytes()).digest()


def _decoded(codec: Codec | FlatSparse, values: Floats) -> Floats:
    """Return the values of a chunk after encoding and decoding."""
    out = np.empty_like(values)
    codec.decode(payload_of(codec, np.ascontiguousarray(values)), out)
    return out


def _unit(*values: Floats) -> float:
    """Return the rounding error of a sum with these terms and results."""
    return ROUNDING * float(np.finfo(np.float32).eps) * max(1e-3, *(float(np.abs(one).max()) for one in values))
