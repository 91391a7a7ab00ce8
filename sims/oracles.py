"""What must hold whenever a round is committed somewhere. What must hold at all times is in vitals.py.

The oracles know what was trained and what was announced, so they compute with the product's codec, rule and outer step what
the next state must be, and compare bits. They hold no opinion on who takes part: that is the protocol's to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from thinwire.collectives.aggregate import NORM_LIMIT, RULES
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounding import encode
from thinwire.collectives.shards import grid
from thinwire.compression import registry
from thinwire.compression.codec import Floats
from thinwire.compression.kernels import outer_step
from thinwire.node.methods import METHODS
from thinwire.node.parts import Part
from thinwire.sims.means import result, round_ring, sites_of
from thinwire.sims.pairs import Pairs
from thinwire.sims.samples import Draws, Samples
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import Commit, Digest, PeerId

ORACLES: Mapping[str, str] = {
    "agreement": "no two honest peers that live have different states after one round",
    "aggregate": "the new state is the outer step on the mean of what the contributors had announced, bit for bit where all "
    "have the same",
    "mean": "those that have met move the mean of their replicas as DiLoCo would: what one is pushed, the others are pulled",
    "bound": "with liars among the contributors, the aggregate is as near to the honest mean as the clipping promises",
    "weight": "a contribution counts with the tokens that went into it, and never with more than the manifest allows",
    "once": "where the swarm keeps book of its data, no sample is used twice in an epoch, and none is left out",
    "finite": "no honest peer has a parameter that is not finite",
    "twice": "a peer applies each round once, and the round after it next",
    "crash": "no honest process ends by an error of ours, and nothing is left unheeded",
    "banned": "no honest peer is banned by an honest one",
    "buried": "nobody is declared dead who could be reached all the time",
    "roster": "when all has been quiet for a while, every roster is the set of those who are there",
    "lockstep": "three rounds after the last fault all honest peers are in the same round",
    "progress": "when nothing is wrong, rounds go on, and who comes in gets in",
    "caps": "every queue and table is within its bound",
    "trace": "a rerun of the seed has the same trace",
}
"""Name -> what it asserts."""

KEPT = 6
"""Rounds whose states are kept for comparison; of digests all are."""

USUAL = 40
"""Rounds after which what was long once says nothing about the usual norm any more (aggregate.MEMORY to that power: 1.5 %)."""

SLACK = 0.02
"""Part of the longest contribution by which encodings may differ from what was encoded, at least."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was broken: `at` virtual seconds, by `peer` (index; -1: the swarm)."""

    at: float
    oracle: str
    peer: int
    detail: str


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


Tell = Callable[[str, int, str], None]
"""Reports a violation: oracle, peer, detail."""


class Oracles:
    """Fed by the world: `started` for each life, then `encoded`, `installed`, `committed` as they happen, `ended`.

    `honest`: peer id -> index of those that never lie.
    """

    def __init__(self, manifest: Manifest, honest: Mapping[PeerId, int], tell: Tell) -> None:
        self._manifest, self._honest, self._tell = manifest, honest, tell
        method = manifest.outer.method
        self._vectors = 1 if manifest.sparse else METHODS[method].replica.vectors
        # What a replica sends of its own memory nobody else can compute; that all compute the same of it is "agreement".
        self._single = method != "powersgd"
        self._known = method in ("diloco", "muloco", "merge", "noloco", "streaming") and not manifest.sparse
        self.samples = Samples(tell) if manifest.data.once else None
        self.parts: tuple[Part, ...] = ()
        """What rounds are about in turn; none: the whole model."""
        self._codec = registry.dense(manifest.exchange.codec if self._known else "fp32")
        self._rule = RULES[manifest.exchange.aggregation]
        self.pairs = Pairs(manifest, honest, tell) if manifest.outer.method == "noloco" else None
        self._claims: dict[int, dict[Digest, dict[int, None]]] = {}
        self._states: dict[Digest, _State] = {}
        self._at: dict[int, tuple[int, Digest]] = {}
        self._sent: dict[tuple[PeerId, int, int], _Sent] = {}
        self._longest: dict[int, NDArray[np.float64]] = {}
        self.frontier = 0
        """The latest round that an honest peer has applied."""

    turns = 1
    """What is counted as rounds, in one round of every fragment."""

    @property
    def together(self) -> bool:
        """Whether all are meant to be in one round with one state."""
        return self.pairs is None

    # --- what happens

    def encoded(
        self, peer: PeerId, round: int, attempt: int, theta: Floats, trained: int, draws: Draws | None = None
    ) -> None:
        """A peer is about to announce what is between the swarm's state and `theta`, trained on so many tokens.

        `draws`: which samples these were, where that is known.
        """
        if self.samples is not None and draws is not None:
            self.samples.encoded(peer, round, attempt, draws)
        if not np.isfinite(theta).all():
            return  # it must not be sent; what is sent in its place is not this
        self._sent[peer, round, attempt] = _Sent(theta.copy(), trained)
        if self.pairs is not None:
            self.pairs.encoded(peer, round, attempt, theta)

    def installed(self, index: int, round: int, digest: Digest, state: Floats) -> None:
        """A peer has a state that it did not compute: its first, or a fetched one."""
        self._drop_claims(index)
        self._at[index] = (round, digest)
        self._claim(index, round, digest)
        if self.samples is not None and not round:
            self.samples.first(digest)
        if self.pairs is not None:
            self.pairs.installed(index, state)
        cut = state.size // self._vectors
        self._states.setdefault(digest, _State(round, state[:cut].copy(), state[cut:].copy()))
        self.frontier = max(self.frontier, round)

    def ended(self, index: int) -> None:
        """A process is gone, and what it knew with it."""
        self._drop_claims(index)
        self._at.pop(index, None)
        if self.pairs is not None:
            self.pairs.ended(index)

    def committed(self, index: int, round: int, digest: Digest, state: Floats, outcome: Outcome) -> None:
        """An honest peer has applied a round."""
        before = self._at.get(index)
        if not np.isfinite(state).all():
            self._tell("finite", index, f"round {round}")
        # With powersgd a peer tells only of the second round of a step.
        if before is None or (round != before[0] + 1 if self._single else round <= before[0]):
            self._tell("twice", index, f"round {round} after {'nothing' if before is None else f'round {before[0]}'}")
        self._at[index] = (round, digest)
        self._claim(index, round, digest)
        cut = state.size // self._vectors
        new = self._states.setdefault(digest, _State(round, state[:cut].copy(), state[cut:].copy()))
        old = self._states.get(before[1]) if before is not None else None
        if old is not None and outcome.commit is not None and not new.checked and old.round + 1 == round:
            new.checked = True
            if self.samples is not None and before is not None:
                self.samples.committed(index, before[1], digest, outcome.commit)
            self._check(index, old, new, outcome.commit)
        if self.pairs is not None and outcome.commit is not None:
            self.pairs.committed(index, round, state, outcome.commit)
        if round > self.frontier:
            self.frontier = round
            self._forget(round - KEPT)

    # --- judgement

    def _claim(self, index: int, round: int, digest: Digest) -> None:
        if self.pairs is not None:
            return  # replicas differ, and should
        claims = self._claims.setdefault(round, {})
        claims.setdefault(digest, {})[index] = None
        others = [one for other, holders in claims.items() if other != digest for one in holders]
        if others and round and index in self._honest.values():
            self._tell("agreement", index, f"round {round}: peers {others[:5]} have another state")

    def _drop_claims(self, index: int) -> None:
        for claims in self._claims.values():
            for holders in claims.values():
                holders.pop(index, None)

    def _forget(self, oldest: int) -> None:
        self._states = {digest: state for digest, state in self._states.items() if state.round >= oldest}
        self._sent = {key: sent for key, sent in self._sent.items() if key[1] >= oldest}

    def _check(self, index: int, old: _State, new: _State, commit: Commit) -> None:
        entries = commit.opened.contributors
        sent = [self._sent.get((entry.peer, new.round, entry.attempt)) for entry in entries]
        most, method = self._manifest.max_weight, self._manifest.outer.method
        for entry, one in zip(entries, sent, strict=True):
            if entry.weight > most:
                self._tell("weight", index, f"round {new.round}: {entry.weight} tokens of at most {most}")
            elif (
                entry.peer in self._honest and one is not None and not self._fair(entry.weight, min(most, one.trained))
            ):
                if not one.trained and entry.weight == 1 and (self.samples is not None or method == "merge"):
                    continue  # so that a round gets on in which nobody trains
                detail = f"round {new.round}: {entry.weight} tokens, {one.trained} were trained"
                self._tell("weight", self._honest[entry.peer], detail)
        known = [one for one in sent if one is not None]
        weights = [entry.weight for entry in entries]
        if self.pairs is not None or not self._known:
            return
        if self.parts:
            part = self.parts[(new.round - 1) % len(self.parts)]
            self._rest(index, part, old, new)
            old, new = (_State(one.round, part.take(one.theta), part.take(one.momentum)) for one in (old, new))
            sent = [None if one is None else _Sent(part.take(one.theta), one.trained) for one in sent]
            known = [one for one in sent if one is not None]
        ours = [one for one, entry in zip(sent, entries, strict=True) if one is not None and entry.peer in self._honest]
        self._measure(old, new.round, ours)
        everyone = len(known) == len(entries) and all(entry.peer in self._honest for entry in entries)
        # Which ring it was is not in the verdict when another ballot's results were adopted.
        elsewhere = self._manifest.exchange.topology == "ring" and commit.opened.adopted is not None
        if everyone and not elsewhere:
            theta, momentum = self._next(old, known, commit)
            if theta.tobytes() != new.theta.tobytes() or momentum.tobytes() != new.momentum.tobytes():
                away = float(np.abs(theta - new.theta).max())
                self._tell("aggregate", index, f"round {new.round}: off by up to {away:.3g}")
        else:
            honest = [
                (one, entry.weight)
                for one, entry in zip(sent, entries, strict=True)
                if one is not None and entry.peer in self._honest
            ]
            self._bound(index, old, new, honest, sum(weights))

    def _rounding(self, delta: Floats) -> float:
        """How far what is encoded is from `delta`; coarse codecs are."""
        cut, square = grid(delta.size, self._codec), 0.0
        for chunk in range(len(cut)):
            start, stop = cut.span(chunk)
            payload, decoded = np.empty(self._codec.nbytes(stop - start), np.uint8), np.empty(stop - start, np.float32)
            encode(self._codec, delta[start:stop], payload)
            self._codec.decode(payload.data, decoded)
            square += float(np.sum(np.square(decoded - delta[start:stop])))
        return float(np.sqrt(square))

    def _fair(self, weight: int, trained: int) -> bool:
        # What goes on while an exchange is under way counts for the next; who was left out meanwhile forgoes some of it.
        if self._manifest.outer.method == "eager":
            return True  # what it was trained from nobody else knows
        return weight <= trained if self._manifest.overlap else weight == trained

    def _rest(self, index: int, part: Part, old: _State, new: _State) -> None:
        """What a round is not about it leaves alone."""
        for before, after in ((old.theta, new.theta), (old.momentum, new.momentum)):
            expected = before.copy()
            part.put(expected, part.take(after))
            if expected.tobytes() != after.tobytes():
                self._tell("aggregate", index, f"round {new.round}: has changed another part than its own")

    def _measure(self, old: _State, round: int, honest: Sequence[_Sent]) -> None:
        """How long the longest honest contribution to a round is, chunk by chunk."""
        cut = grid(old.theta.size, self._codec)
        starts = [cut.span(chunk)[0] for chunk in range(len(cut))]
        squares = [np.add.reduceat(np.square(old.theta - one.theta, dtype=np.float64), starts) for one in honest]
        if squares:
            self._longest[round] = np.sqrt(np.max(squares, axis=0))
            self._longest = {one: found for one, found in self._longest.items() if one > round - USUAL}

    def _next(self, old: _State, sent: Sequence[_Sent], commit: Commit) -> tuple[Floats, Floats]:
        """The state after the outer step on what the contributors sent, in peer-id order, or in that of the ring."""
        theta, momentum, outer = old.theta.copy(), old.momentum.copy(), self._manifest.outer
        cut = grid(theta.size, self._codec)
        weights, sites = [float(entry.weight) for entry in commit.opened.contributors], sites_of(commit)
        around = round_ring(self._codec, self._rule, commit.opened, len(cut)) if commit.opened.order else None
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
            outer_step(theta[start:stop], momentum[start:stop], delta, outer.lr, outer.momentum, outer.nesterov)
        return theta, momentum

    def _bound(self, index: int, old: _State, new: _State, honest: Sequence[tuple[_Sent, int]], total: int) -> None:
        """The aggregate may be away from the honest mean by what liars within the norm limit can do.

        Chunks are screened one by one, against a usual norm that is no longer than the longest honest one.
        """
        share = sum(weight for _, weight in honest)
        if not share or not total:
            return
        deltas = [(old.theta - one.theta, weight) for one, weight in honest]
        turns = max(1, len(self.parts))
        lately = [found for number, found in self._longest.items() if (new.round - number) % turns == 0]
        longest = float(np.linalg.norm(np.max(lately, axis=0)))
        mean = np.sum([delta * np.float32(weight / share) for delta, weight in deltas], axis=0)
        aggregate = new.momentum - np.float32(self._manifest.outer.momentum) * old.momentum
        away = float(np.linalg.norm(aggregate - mean))
        limit = (1 - share / total) * (1 + NORM_LIMIT) * longest
        rounding = max(SLACK * longest, *(self._rounding(delta) for delta, _ in deltas))
        # Of each contribution and of the result; of all sums on their way around a ring, or of a site.
        often = len(deltas) + 1 if self._manifest.exchange.topology == "ring" else 3
        slack = often * rounding + 1e-3 * limit
        if not away <= limit + slack:
            self._tell("bound", index, f"round {new.round}: {away:.3g} from the honest mean, the limit is {limit:.3g}")
