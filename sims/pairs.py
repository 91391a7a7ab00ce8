"""What must hold whenever a round of pairs or groups (NoLoCo) is committed somewhere, with any codec. Fed by oracles.py.

The judge keeps its own books: what every honest replica is, and what the codec has left out of its steps so far. From these and
what was trained follows what each has sent, and from what all of a group have sent follows the next state of each. The step is
written out here a second time, after the paper and not after the product; only codecs and the chunk grid are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from thinwire.collectives.aggregate import NORM_LIMIT
from thinwire.collectives.halves import Halves, halves
from thinwire.collectives.shards import grid
from thinwire.compression.codec import Codec, Floats
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import Commit, Contribution, PeerId

KEPT = 4
"""Contributions of one peer that are remembered: those who meet are in the same round."""

ROUNDING = 16.0
"""Units in the last place of the largest value by which a sum of two may be off, and that of a group by so many more."""


@dataclass(frozen=True, slots=True)
class _Replica:
    """φ, δ, and what the codec has left out of Δ so far (None: not known). Never changed in place."""

    phi: Floats
    delta: Floats
    left: Floats | None


class _Offer:
    """What a replica that has trained to `theta` sends."""

    def __init__(self, replica: _Replica, theta: Floats, how: Halves) -> None:
        self.replica, self.theta, self._how = replica, theta, how

    @cached_property
    def sent(self) -> tuple[Floats, Floats] | None:
        """Δ and φ as the partner decodes them (where one vector is enough, what it means). None: not known."""
        phi, left = self.replica.phi, self.replica.left
        if self._how.exact or self._how.slow is None:
            return self.theta - phi, phi
        if left is None:
            return None
        return self._decoded(self._how.fast, self.theta - phi + left), self._decoded(self._how.slow, phi)

    @property
    def left(self) -> Floats | None:
        """What it leaves out, for the next one to bring."""
        if self._how.exact or self.sent is None or self.replica.left is None:
            return None
        return self.theta - self.replica.phi + self.replica.left - self.sent[0]

    def _decoded(self, codec: Codec, values: Floats) -> Floats:
        cut, out = grid(values.size, self._how), np.empty_like(values)
        for index in range(len(cut)):
            start, stop = cut.span(index)
            payload = np.empty(codec.nbytes(stop - start), np.uint8)
            codec.encode(np.ascontiguousarray(values[start:stop]), payload)
            codec.decode(payload.data, out[start:stop])
        return out


@dataclass(frozen=True, slots=True)
class _Side:
    """One of those that met: its new φ, δ before and after, and its Δ as sent."""

    phi: Floats
    before: Floats
    after: Floats
    moved: Floats


class Pairs:
    """The judge. `honest`: peer id -> index of those that never lie. `tell`: reports oracle, peer, detail.

    `met`: how many states that several have made were held against what they must be.
    """

    def __init__(self, manifest: Manifest, honest: Mapping[PeerId, int], tell: Callable[[str, int, str], None]) -> None:
        outer = manifest.outer
        self._how = halves(manifest.exchange.codec, lr=outer.lr, gamma=outer.gamma)
        self._alpha, self._beta, self._gamma = map(np.float32, (outer.momentum, outer.lr, outer.gamma))
        self._honest, self._tell = honest, tell
        self._at: dict[int, _Replica] = {}
        self._offers: dict[PeerId, dict[tuple[int, int], _Offer]] = {}
        self._sides: dict[tuple[int, tuple[Contribution, ...]], list[_Side]] = {}
        self._longest: dict[int, float] = {}
        self.met = 0

    def encoded(self, peer: PeerId, round: int, attempt: int, theta: Floats) -> None:
        """A peer is about to announce what is between its slow weights and `theta`, which is finite."""
        index = self._honest.get(peer)
        replica = self._at.get(index) if index is not None else None
        if replica is not None:
            offers = self._offers.setdefault(peer, {})
            offers[round, attempt] = _Offer(replica, theta.copy(), self._how)
            while len(offers) > KEPT:
                del offers[next(iter(offers))]

    def installed(self, index: int, state: Floats) -> None:
        """A peer has a state that it did not compute."""
        phi, delta = _halved(state)
        self._at[index] = _Replica(phi, delta, np.zeros_like(phi))

    def ended(self, index: int) -> None:
        """A process is gone, and what it knew with it."""
        self._at.pop(index, None)
        self._longest.pop(index, None)

    def committed(self, index: int, round: int, state: Floats, commit: Commit) -> None:
        """An honest peer has applied a round that it has made with others, or alone."""
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
            self._at[index] = _Replica(phi, delta, None)
            return
        new = self._at[index] = _Replica(phi, delta, mine.left if others else old.left)
        known = [sent for sent in others if sent is not None]
        if not others:
            self._equal(index, round, old, new, self._alpha * old.delta + self._beta * (mine.theta - old.phi), 2)
        elif mine.sent is not None and len(known) == len(others):
            self.met += 1
            self._equal(index, round, old, new, self._together(old, mine.sent, known), len(entries))
            self._mean(index, round, entries, _Side(new.phi, old.delta, new.delta, mine.sent[0]))
        elif mine.sent is not None:
            self._bound(index, round, old, new, mine.sent, len(entries))

    # --- judgement

    def _together(self, old: _Replica, mine: tuple[Floats, Floats], others: Sequence[tuple[Floats, Floats]]) -> Floats:
        share = np.float32(1 / (1 + len(others)))
        mean, middle = (np.sum([mine[i], *(one[i] for one in others)], axis=0) * share for i in (0, 1))
        return np.asarray(self._alpha * old.delta + self._beta * mean - self._gamma * (mine[1] - middle), np.float32)

    def _equal(self, index: int, round: int, old: _Replica, new: _Replica, delta: Floats, size: int) -> None:
        """Whether the new state is δ and φ + δ, up to rounding: no bit of a replica is anybody else's."""
        phi = old.phi + delta
        away = float(max(np.abs(new.delta - delta).max(), np.abs(new.phi - phi).max()))
        if not away <= _unit(delta, phi) * size / 2:
            self._tell("aggregate", index, f"round {round}: off by up to {away:.3g}")

    def _mean(self, index: int, round: int, entries: tuple[Contribution, ...], side: _Side) -> None:
        """What one is pushed, the others are pulled: all of a group together make the step of DiLoCo."""
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
        self, index: int, round: int, old: _Replica, new: _Replica, sent: tuple[Floats, Floats], size: int
    ) -> None:
        """With partners that lie: what they add to the step on our own part is as long as the screening lets through.

        The usual norm is at most our own longest, as of two the smaller counts; what is far from φ by less than the limit has
        two parts, which move δ by β and γ.
        """
        away = float(np.linalg.norm(new.delta - self._alpha * old.delta - self._beta * np.float32(1 / size) * sent[0]))
        own = float(np.hypot(np.linalg.norm(sent[0]), np.linalg.norm(sent[1] - old.phi)))
        own = own or float(np.linalg.norm(old.delta))  # who has not trained has its momentum to measure others by
        longest = self._longest[index] = max(self._longest.get(index, 0.0), own)
        limit = float(self._beta + self._gamma) * (size - 1) / size * (1 + NORM_LIMIT) * longest
        if not away <= limit:
            self._tell("bound", index, f"round {round}: {away:.3g} from the step alone, the limit is {limit:.3g}")


def _halved(state: Floats) -> tuple[Floats, Floats]:
    """φ and δ of a replica's state, copied."""
    half = state.size // 2
    return state[:half].copy(), state[half:].copy()


def _unit(*values: Floats) -> float:
    """By how much a sum may be off that has these among its terms or results."""
    return ROUNDING * float(np.finfo(np.float32).eps) * max(1e-3, *(float(np.abs(one).max()) for one in values))
