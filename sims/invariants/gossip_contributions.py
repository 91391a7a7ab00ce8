"""Contributions of honest replicas in gossip runs, from their states and trained parameters.

They are computed a second time here, from the paper and not from the product; only codecs and the chunk grid are shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from thinwire.collectives.gossip.pair_codec import PairCodec, payload_of
from thinwire.collectives.topology.shards import grid
from thinwire.compression.core.codec import Codec
from thinwire.compression.core.types import Floats
from thinwire.compression.sparse.flat import FlatSparse
from thinwire.sims.invariants.sparse_mean import Marks, marks

KEPT = 4
"""Number of stored states and of stored contributions of one peer: partners are in the same round."""


Vectors = tuple[Sequence[Floats], Sequence[Floats]]
"""Decoded vectors of a peer in a round: those after its inner steps, and its slow weights."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """φ, δ and the residual of a replica after a round; the arrays never change.

    `left`: the residual, empty if the codec loses nothing.
    """

    round: int
    phi: Floats
    delta: Floats
    left: Floats


class Offer:
    """Contribution of a replica that was trained to `theta`.

    `decay`: part of the residual that is carried over.
    """

    def __init__(self, replica: ReplicaState, theta: Floats, how: PairCodec, decay: float) -> None:
        self.replica, self.theta, self._how, self._decay = replica, theta, how, np.float32(decay)

    @cached_property
    def sent(self) -> tuple[Floats, Floats]:
        """Return Δ and φ as partners decode them, also if they travel as one vector θ."""
        phi = self.replica.phi
        if self._how.exact or self._how.slow is None:
            return self.theta - phi, phi
        return encoded(self._how.fast, self._how, self._total), encoded(self._how.slow, self._how, phi)

    @cached_property
    def marks(self) -> Marks | None:
        """Return which elements a sparse Δ has values of; None if it is dense."""
        fast = self._how.fast
        if not isinstance(fast, FlatSparse):
            return None
        total = self._total
        cut = grid(total.size, self._how)
        pieces = [np.ascontiguousarray(total[slice(*cut.span(index))]) for index in range(len(cut))]
        return np.concatenate([marks(fast, payload_of(fast, piece), piece.size) for piece in pieces])

    @property
    def vector(self) -> Floats:
        """Return the vector that travels after the inner steps, decoded: Δ, or θ if it is the only one."""
        return self.theta if self._how.slow is None else self.sent[0]

    @property
    def left(self) -> Floats:
        """Return the residual after a step with the mean of contributions."""
        if self._how.exact:
            return self.replica.left
        return np.asarray(self._decay * (self._total - self.sent[0]), np.float32)

    @property
    def _total(self) -> Floats:
        return self.theta - self.replica.phi + self.replica.left


class OfferHistory:
    """The latest states and contributions of each honest peer, by index.

    They remain after the end of a process, because others may use them later.
    """

    def __init__(self, how: PairCodec, decay: float) -> None:
        self._how, self._decay = how, decay
        self._states: dict[int, list[ReplicaState]] = {}
        self._offers: dict[int, dict[tuple[int, int], Offer]] = {}
        self._dropped: dict[int, int] = {}
        """Latest round of the contributions that were dropped."""

    def begin(self, index: int, state: ReplicaState) -> None:
        """Store the state with which a peer begins its next round."""
        states = self._states.setdefault(index, [])
        states.append(state)
        if len(states) > KEPT:
            self._drop(index, states.pop(0).round + 1)

    def announce(self, index: int, attempt: int, state: ReplicaState, theta: Floats) -> None:
        """Store the contribution of a peer that has trained to `theta`, to the round after `state`."""
        offers = self._offers.setdefault(index, {})
        offers[state.round + 1, attempt] = Offer(state, theta, self._how, self._decay)
        if len(offers) > KEPT:
            oldest = next(iter(offers))
            del offers[oldest]
            self._drop(index, oldest[0])

    def _drop(self, index: int, round: int) -> None:
        self._dropped[index] = max(round, self._dropped.get(index, 0))

    def find(self, index: int | None, round: int, attempt: int) -> Offer | None:
        """Return a contribution; None if it is unknown, as those of liars."""
        return self._offers.get(-1 if index is None else index, {}).get((round, attempt))

    def vectors(self, index: int | None, round: int) -> Vectors | None:
        """Return all vectors that a peer may have sent in a round; None if they are unknown.

        There are several if it has restarted in the round, and none if it has not come so far.
        """
        if index is None or round <= self._dropped.get(index, 0):
            return None
        fast = [offer.vector for (number, _), offer in self._offers.get(index, {}).items() if number == round]
        slow = [state.phi for state in self._states.get(index, ()) if state.round + 1 == round]
        if self._how.slow is None:
            slow = []
        elif not self._how.exact:
            slow = [encoded(self._how.slow, self._how, phi) for phi in slow]
        return _unique(fast), _unique(slow)


def _unique(vectors: Sequence[Floats]) -> list[Floats]:
    return list({vector.tobytes(): vector for vector in vectors}.values())


def encoded(codec: Codec | FlatSparse, how: PairCodec, values: Floats) -> Floats:
    """Return a vector after encoding and decoding of its chunks."""
    cut, out = grid(values.size, how), np.empty_like(values)
    for index in range(len(cut)):
        start, stop = cut.span(index)
        out[start:stop] = decoded(codec, values[start:stop])
    return out


def decoded(codec: Codec | FlatSparse, values: Floats) -> Floats:
    """Return the values of a chunk after encoding and decoding."""
    out = np.empty_like(values)
    codec.decode(payload_of(codec, np.ascontiguousarray(values)), out)
    return out
