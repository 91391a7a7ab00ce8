"""Invariants of committed rounds. Those that hold at all times are in always.py.

The checker knows what was trained and announced, so it computes the next state with the product's codec, rule and outer
step, and compares bits. It does not judge the choice of contributors: that is up to the protocol.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from thinwire.collectives.aggregation.rule_factory import dense_rule
from thinwire.collectives.aggregation.screening import NORM_LIMIT
from thinwire.collectives.deterministic_rounding import encode
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.topology.shards import grid
from thinwire.compression import registry
from thinwire.compression.core.norm_clip import CLIP_FROM
from thinwire.compression.core.types import Floats
from thinwire.compression.kernels.common import outer_step
from thinwire.node.methods.registry import METHODS
from thinwire.sims.invariants.data_once import DataOnceInvariant, Draws
from thinwire.sims.invariants.noloco import GossipInvariants
from thinwire.sims.invariants.oracles import OnViolation
from thinwire.sims.invariants.reference_mean import result, round_ring, sites_of
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import Commit, Digest, PeerId

KEPT = 6
"""Rounds with stored states; all digests are stored."""

USUAL = 40
"""Rounds after which a long contribution hardly affects the usual norm (MEMORY to that power: 1.5 %)."""

SLACK = 0.02
"""Least tolerance of an encoding, as a fraction of the longest contribution."""


@dataclass(slots=True)
class _State:
    round: int
    theta: Floats
    momentum: Floats
    checked: bool = False


@dataclass(slots=True)
class _Sent:
    theta: NDArray[np.float32]
    trained: int
    merged: int
    """Tokens of earlier rounds in another lineage, which may count again."""


NONE: Floats = np.empty(0, np.float32)
"""No vector."""


class CommitInvariants:
    """Checker of committed rounds. `honest`: peer id -> index of honest peers.

    `forgetful`: returns True for a peer whose disk has lost a synced vote. A value is no longer decided once a voter has
    forgotten it, see "Medium" in docs/design/agreement.md.

    Called by the world: `started` for each process, then `encoded`, `installed`, `committed` as they occur, `ended`.
    """

    def __init__(
        self,
        manifest: Manifest,
        honest: Mapping[PeerId, int],
        on_violation: OnViolation,
        forgetful: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        self._manifest, self._honest, self._on_violation = manifest, honest, on_violation
        self._forgetful = forgetful
        self._commits: dict[Digest, Commit] = {}
        self._vectors = 1 if manifest.sparse else METHODS[manifest.outer.method].replica.vectors
        self._single = manifest.outer.rounds_per_step == 1
        self.pairs = GossipInvariants(manifest, honest, on_violation) if manifest.outer.gossip else None
        # Sparse codecs have a private residual; "agreement" checks that all compute the same from their contributions.
        self._known = manifest.outer.computable and not manifest.sparse and self.pairs is None
        self.samples = DataOnceInvariant(on_violation) if manifest.data.exactly_once else None
        self._codec = registry.dense(manifest.exchange.codec if self._known else "fp32")
        self._rule = dense_rule(manifest.exchange.rule)
        # A cluster or a ring clips fewer contributions than there are in all.
        self._clips = manifest.exchange.aggregation == "clip" and manifest.exchange.topology == "butterfly"
        self._claims: dict[tuple[str, int], dict[Digest, dict[int, None]]] = {}
        self._states: dict[Digest, _State] = {}
        self._at: dict[int, tuple[int, Digest]] = {}
        self._peers_in: Counter[int] = Counter()
        """Number of peers in each round."""
        self._sent: dict[tuple[PeerId, int, int], _Sent] = {}
        self._longest: dict[int, NDArray[np.float64]] = {}
        self._given: dict[int, tuple[str, int]] = {}
        self._merged: dict[int, int] = {}
        self._oldest = -KEPT

    turns = 1
    """Number of rounds that `frontier` counts in one round of every fragment."""

    @property
    def frontier(self) -> int:
        """Latest round of an honest peer that runs."""
        return max(self._peers_in, default=0)

    @property
    def together(self) -> bool:
        """True if all peers are meant to be in one round with one state."""
        return self.pairs is None

    # Events

    def encoded(
        self, peer: PeerId, round: int, attempt: int, theta: Floats, trained: int, draws: Draws | None = None
    ) -> None:
        """Record that a peer is about to announce the swarm's state minus `theta`, trained on these tokens.

        `draws`: the samples, if known.
        """
        if self.samples is not None and draws is not None:
            self.samples.encoded(peer, round, attempt, draws)
        if self.pairs is not None:
            self.pairs.encoded(peer, attempt, theta.copy())
        if not np.isfinite(theta).all():
            return  # The peer must not send it. Another contribution, which is recorded, takes its place.
        merged = self._merged.get(self._honest.get(peer, -1), 0)
        self._sent[peer, round, attempt] = _Sent(theta.copy() if self._known else NONE, trained, merged)

    def installed(
        self,
        index: int,
        round: int,
        digest: Digest,
        state: Floats,
        lineage: str = "",
        *,
        residual: Floats = NONE,
        lost: bool = False,
    ) -> None:
        """Record a state that a peer did not compute: its first, a fetched one, or the first one of a lineage.

        `residual`: that of gossip. `lost`: it may be lost.
        """
        self._move(index, (round, digest))
        self._claim(index, round, digest, lineage)
        before, given = self._given.get(index, (lineage, 0))
        if before != lineage and self._manifest.exchange.on_split == "merge":
            self._merged[index] = self._merged.get(index, 0) + given
            self._given[index] = lineage, 0
        if self.samples is not None and not round:
            self.samples.first(digest)
        if self.pairs is not None:
            self.pairs.installed(index, round, state, residual, lost=lost)
        self._state(round, digest, state)

    def founded(self, index: int, round: int, digest: Digest, state: Floats, lineage: str) -> None:
        """Record that a peer continues in a lineage, unless it has yet to report the round of its state."""
        self._given[index] = lineage, 0  # The new lineage contains its rounds.
        if index in self._at and self._at[index][0] == round:
            self.installed(index, round, digest, state, lineage)

    def ended(self, index: int) -> None:
        """Record that a process ended."""
        self._move(index, None)
        self._given.pop(index, None)
        self._merged.pop(index, None)
        if self.pairs is not None:
            self.pairs.ended(index)

    def committed(
        self,
        index: int,
        round: int,
        digest: Digest,
        state: Floats,
        outcome: Outcome,
        lineage: str = "",
        *,
        residual: Floats = NONE,
    ) -> None:
        """Check a round of a lineage (hexadecimal; "" is the first one) that an honest peer has applied.

        `residual`: that of gossip.
        """
        before = self._at.get(index)
        if not np.isfinite(state).all():
            self._on_violation("finite", index, f"round {round}")
        # With powersgd a peer reports only the second round of a step.
        if before is None or (round != before[0] + 1 if self._single else round <= before[0]):
            self._on_violation(
                "round-order", index, f"round {round} after {'nothing' if before is None else f'round {before[0]}'}"
            )
        self._move(index, (round, digest))
        if outcome.commit is not None:
            self._commits.setdefault(digest, outcome.commit)
        self._claim(index, round, digest, lineage)
        if outcome.commit is not None:
            ours = [one.weight for one in outcome.commit.proposal.contributors if self._honest.get(one.peer) == index]
            parent, given = self._given.get(index, (lineage, 0))
            self._given[index] = lineage, sum(ours) + (given if parent == lineage else 0)
        self._merged.pop(index, None)  # The model begins with the new state.
        new = self._state(round, digest, state)
        old = self._states.get(before[1]) if before is not None else None
        if old is not None and outcome.commit is not None and not new.checked and old.round + 1 == round:
            new.checked = True
            if self.samples is not None and before is not None:
                self.samples.committed(index, before[1], digest, outcome.commit)
            self._check(index, old, new, outcome.commit)
        if self.pairs is not None and outcome.commit is not None:
            self.pairs.committed(index, round, state, residual, outcome.commit)
        oldest = self.frontier - KEPT
        if oldest != self._oldest or round < oldest:
            self._forget(oldest)

    def _state(self, round: int, digest: Digest, state: Floats) -> _State:
        """Return what is stored of a state: the vectors only if the step is computed from them."""
        cut, parts = state.size // self._vectors, (state if self._known else NONE)
        return self._states.setdefault(digest, _State(round, parts[:cut].copy(), parts[cut:].copy()))

    def _move(self, index: int, place: tuple[int, Digest] | None) -> None:
        """Note the round and state of a peer; None: its process has ended."""
        if (before := self._at.pop(index, None)) is not None:
            self._peers_in -= Counter({before[0]: 1})
        if place is not None:
            self._at[index] = place
            self._peers_in[place[0]] += 1

    # Checks

    def _claim(self, index: int, round: int, digest: Digest, lineage: str) -> None:
        if self.pairs is not None or index not in self._honest.values():
            return  # Replicas of gossip runs differ.
        claims = self._claims.setdefault((lineage, round), {})
        claims.setdefault(digest, {})[index] = None
        order = list(claims)
        others = [
            one
            for other, holders in claims.items()
            if other != digest and not self._forgotten(*sorted((digest, other), key=order.index))
            for one in holders
        ]
        if others and round:
            place = f"round {round}" + (f" of lineage {lineage[:8]}" if lineage else "")
            self._on_violation("agreement", index, f"{place}: peers {others[:5]} had another state")

    def _forgotten(self, older: Digest, newer: Digest) -> bool:
        """Return True if the states have different commits, and a voter of the older has forgotten its vote."""
        first, second = self._commits.get(older), self._commits.get(newer)
        if first is None or second is None:
            return False
        same = (first.digest, first.proposal.contributors) == (second.digest, second.proposal.contributors)
        return not same and any(self._forgetful(vote.peer) for vote in first.votes)

    def _forget(self, oldest: int) -> None:
        self._oldest = oldest
        self._states = {digest: state for digest, state in self._states.items() if state.round >= oldest}
        self._sent = {key: sent for key, sent in self._sent.items() if key[1] >= oldest}

    def _check(self, index: int, old: _State, new: _State, commit: Commit) -> None:
        entries = commit.proposal.contributors
        sent = [self._sent.get((entry.peer, new.round, entry.attempt)) for entry in entries]
        most, gathers = self._manifest.max_weight, self._manifest.outer.gathers_first
        for entry, one in zip(entries, sent, strict=True):
            if entry.weight > most:
                self._on_violation("weight", index, f"round {new.round}: {entry.weight} tokens of at most {most}")
            elif (
                entry.peer in self._honest
                and one is not None
                and not any(
                    self._fair(entry.weight, min(most, trained)) for trained in (one.trained, one.trained + one.merged)
                )
            ):
                if not one.trained and entry.weight == 1 and (self.samples is not None or gathers):
                    continue  # A round in which no peer trains needs one token.
                detail = f"round {new.round}: {entry.weight} tokens, {one.trained} were trained"
                self._on_violation("weight", self._honest[entry.peer], detail)
        known = [one for one in sent if one is not None]
        weights = [entry.weight for entry in entries]
        if not self._known:
            return
        ours = [one for one, entry in zip(sent, entries, strict=True) if one is not None and entry.peer in self._honest]
        self._measure(old, new.round, ours)
        everyone = len(known) == len(entries) and all(entry.peer in self._honest for entry in entries)
        # The certificate does not name the ring if another ballot's results were adopted.
        elsewhere = self._manifest.exchange.topology == "ring" and commit.proposal.adopted is not None
        if everyone and not elsewhere:
            theta, momentum = self._next(old, known, commit)
            if theta.tobytes() != new.theta.tobytes() or momentum.tobytes() != new.momentum.tobytes():
                away = float(np.abs(theta - new.theta).max())
                self._on_violation("aggregate", index, f"round {new.round}: off by up to {away:.3g}")
        else:
            honest = [
                (one, entry.weight)
                for one, entry in zip(sent, entries, strict=True)
                if one is not None and entry.peer in self._honest
            ]
            self._bound(index, old, new, honest, len(weights), sum(weights))

    def _rounding(self, delta: Floats) -> float:
        """Return the distance of the encoding from `delta`, which is large for coarse codecs."""
        cut, square = grid(delta.size, self._codec), 0.0
        for chunk in range(len(cut)):
            start, stop = cut.span(chunk)
            payload, decoded = np.empty(self._codec.nbytes(stop - start), np.uint8), np.empty(stop - start, np.float32)
            encode(self._codec, delta[start:stop], payload)
            self._codec.decode(payload.data, decoded)
            square += float(np.sum(np.square(decoded - delta[start:stop])))
        return float(np.sqrt(square))

    def _fair(self, weight: int, trained: int) -> bool:
        # Steps during an exchange count for the next contribution; a peer that was left out meanwhile forfeits some of
        # them.
        if self._manifest.outer.private_start:
            return True  # no other peer knows the parameters that the steps started from
        return weight <= trained if self._manifest.overlap else weight == trained

    def _measure(self, old: _State, round: int, honest: Sequence[_Sent]) -> None:
        """Return the length of the longest honest contribution to a round, by chunk."""
        cut = grid(old.theta.size, self._codec)
        starts = [cut.span(chunk)[0] for chunk in range(len(cut))]
        squares = [np.add.reduceat(np.square(old.theta - one.theta, dtype=np.float64), starts) for one in honest]
        if squares:
            self._longest[round] = np.sqrt(np.max(squares, axis=0))
            self._longest = {one: found for one, found in self._longest.items() if one > round - USUAL}

    def _next(self, old: _State, sent: Sequence[_Sent], commit: Commit) -> tuple[Floats, Floats]:
        """Return the state after the outer step on the contributions, in peer-id order or in ring order."""
        theta, momentum, outer = old.theta.copy(), old.momentum.copy(), self._manifest.outer
        cut = grid(theta.size, self._codec)
        weights, sites = [float(entry.weight) for entry in commit.proposal.contributors], sites_of(commit)
        around = round_ring(self._codec, commit.proposal, len(cut)) if commit.proposal.order else None
        for chunk in range(len(cut)):
            start, stop = cut.span(chunk)
            payloads = []
            for one in sent:
                payload = np.empty(self._codec.nbytes(stop - start), np.uint8)
                encode(self._codec, np.subtract(old.theta[start:stop], one.theta[start:stop]), payload)
                payloads.append(payload.data)
            delta = np.empty(stop - start, np.float32)
            if around is not None:
                made = around(chunk, payloads, delta.size)
            else:
                made = result(self._codec, self._rule, payloads, weights, sites, delta.size)
            self._codec.decode(made, delta)
            outer_step(theta[start:stop], momentum[start:stop], delta, *outer.sgd)
        return theta, momentum

    def _bound(
        self, index: int, old: _State, new: _State, honest: Sequence[tuple[_Sent, int]], count: int, total: int
    ) -> None:
        """Check that the aggregate is as near to the honest mean as the rule guarantees.

        count: number of contributions. Chunks are screened one by one, against a usual norm that is at most the longest
        honest one.
        """
        share = sum(weight for _, weight in honest)
        if not share or not total:
            return
        deltas = [(old.theta - one.theta, weight) for one, weight in honest]
        longest = float(np.linalg.norm(np.max(list(self._longest.values()), axis=0)))
        mean = np.sum([delta * np.float32(weight / share) for delta, weight in deltas], axis=0)
        aggregate = new.momentum - np.float32(self._manifest.outer.sgd.momentum) * old.momentum
        away = float(np.linalg.norm(aggregate - mean))
        limit = (1 - share / total) * (1 + NORM_LIMIT) * longest
        if self._clips and CLIP_FROM <= count < 2 * len(honest) and self._manifest.outer.step_ratio == 1.0:
            # Each chunk of the aggregate and of the honest mean is at most as long as the longest honest one.
            limit = min(limit, 2 * longest)
        rounding = max(SLACK * longest, *(self._rounding(delta) for delta, _ in deltas))
        # Rounding of each contribution and of the result; of all partial sums of a ring or a site.
        often = len(deltas) + 1 if self._manifest.exchange.topology == "ring" else 3
        slack = often * rounding + 1e-3 * limit
        if not away <= limit + slack:
            self._on_violation(
                "bound", index, f"round {new.round}: {away:.3g} from the honest mean, the limit is {limit:.3g}"
            )
