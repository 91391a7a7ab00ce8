"""Accuracy of a swarm with liars, by aggregation rule and attack: the table of docs/security.md.

    python -m benchmarks.training.robustness                 # three and six liars of sixteen, every rule and attack
    python -m benchmarks.training.robustness --liars 3 --rules clip flag --attacks sign*10 mimic

Sixteen peers train a small classifier of ten classes. In each round each makes some steps on its own data, and the product's
codec, screening, rule and outer step do the rest. Liars see all honest contributions of the round before they send theirs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from thinwire.collectives.aggregation.rule_factory import dense_rule, sparse_rule
from thinwire.collectives.aggregation.screening import NotEnoughPeers, outliers
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.parameter_chunks import Chunks
from thinwire.compression.core.types import Floats
from thinwire.compression.dense.floats import Fp32
from thinwire.compression.kernels.common import outer_step
from thinwire.compression.sparse.mean import flat, norm
from thinwire.compression.sparse.topk import Sparse
from thinwire.node.outer.verification.score_book import Falls
from thinwire.swarm.aggregation_spec import ITERATED, NEEDS, AggregationSpec
from thinwire.swarm.choices import Aggregation, Denominator

PEERS, CLASSES, INPUTS, HIDDEN = 16, 10, 24, 32
SHAPES = ((INPUTS, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))
SIZE = sum(math.prod(shape) for shape in SHAPES)
STEPS, BATCH, RATE, ROUNDS, STALE = 4, 32, 0.2, 60, 10
OUTER_RATE, UNSEEN = 0.7, 128
LAYOUT = Chunks((("model", (-(-SIZE // 16), 16)),), 256)
"""Layout of sparse payloads: the parameters, padded, as one matrix."""

Doubles = NDArray[np.float64]


class Task:
    """The data of all peers, which differ in their share of the classes a little, and held-out data."""

    def __init__(self, seed: int = 0, peers: int = PEERS) -> None:
        rng = np.random.default_rng(seed)
        centres = 0.67 * rng.standard_normal((CLASSES, INPUTS))

        def draw(count: int) -> tuple[Doubles, NDArray[np.int64]]:
            labels = rng.integers(0, CLASSES, count)
            return centres[labels] + 0.7 * rng.standard_normal((count, INPUTS)), labels

        own = [draw(256) for _ in range(peers)]
        self.x, self.y = np.stack([x for x, _ in own]), np.stack([y for _, y in own])
        self.test = draw(2000)
        self.unseen = draw(2000)
        """Data for scores, on which no peer trains."""
        scales = [1 / math.sqrt(INPUTS), 0.0, 1 / math.sqrt(HIDDEN), 0.0]
        first = [scale * rng.standard_normal(shape) for scale, shape in zip(scales, SHAPES, strict=True)]
        self.first = np.concatenate([part.ravel() for part in first]).astype(np.float32)

    def updates(self, theta: Floats, rng: np.random.Generator, flipped: int = 0) -> Floats:
        """Return the pseudo-gradient of each peer; the last `flipped` ones train on reversed labels."""
        peers = len(self.x)
        w1, b1, w2, b2 = (np.repeat(part[None], peers, axis=0) for part in _split(theta.astype(np.float64)))
        rows = np.arange(peers)[:, None]
        for _ in range(STEPS):
            at = rng.integers(0, self.x.shape[1], (peers, BATCH))
            x, y = self.x[rows, at], self.y[rows, at]
            y = np.where(rows >= peers - flipped, CLASSES - 1 - y, y)
            hidden = np.maximum(0.0, x @ w1 + b1[:, None])
            slope = _softmax(hidden @ w2 + b2[:, None])
            slope[rows, np.arange(BATCH)[None], y] -= 1.0
            slope /= BATCH
            back = (slope @ w2.transpose(0, 2, 1)) * (hidden > 0)
            parts = [x.transpose(0, 2, 1) @ back, back.sum(1), hidden.transpose(0, 2, 1) @ slope, slope.sum(1)]
            length = np.sqrt(sum(np.square(part).reshape(peers, -1).sum(1) for part in parts))
            step = RATE * np.minimum(1.0, 1.0 / np.maximum(length, 1e-30))  # inner.clip = 1
            for value, part in zip((w1, b1, w2, b2), parts, strict=True):
                value -= step.reshape(-1, *[1] * (part.ndim - 1)) * part
        now = np.concatenate([part.reshape(peers, -1) for part in (w1, b1, w2, b2)], axis=1)
        delta: Floats = (theta - now).astype(np.float32)
        return delta

    def falls(self, base: Floats, step: Floats, rng: np.random.Generator) -> Falls:
        """Return how much the loss falls by a step, on two batches of unseen data."""
        found = []
        for _ in range(2):
            at = rng.integers(0, len(self.unseen[0]), UNSEEN)
            x, y = self.unseen[0][at], self.unseen[1][at]
            losses = []
            for theta in (base, base - step):
                w1, b1, w2, b2 = _split(theta.astype(np.float64))
                share = _softmax(np.maximum(0.0, x @ w1 + b1) @ w2 + b2)[np.arange(UNSEEN), y]
                losses.append(-float(np.mean(np.log(np.maximum(share, 1e-30)))))
            found.append(losses[0] - losses[1])
        return found[0], found[1]

    def accuracy(self, theta: Floats) -> float:
        """Return the held-out accuracy in per cent; 0 for parameters that are not finite."""
        if not np.isfinite(theta).all():
            return 0.0
        w1, b1, w2, b2 = _split(theta.astype(np.float64))
        x, y = self.test
        with np.errstate(over="ignore", invalid="ignore"):
            found = np.argmax(np.maximum(0.0, x @ w1 + b1) @ w2 + b2, axis=1)
        return 100.0 * float(np.mean(found == y))


def _split(theta: Doubles) -> list[Doubles]:
    cuts = np.cumsum([math.prod(shape) for shape in SHAPES])[:-1]
    return [part.reshape(shape) for part, shape in zip(np.split(theta, cuts), SHAPES, strict=True)]


def _softmax(logits: Doubles) -> Doubles:
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    scaled: Doubles = shifted / shifted.sum(-1, keepdims=True)
    return scaled


@dataclass
class View:
    """Knowledge of the liars in a round: honest contributions, their own ones, earlier ones, the round."""

    honest: Floats
    own: Floats
    past: list[Floats]
    rng: np.random.Generator

    @property
    def mean(self) -> Floats:
        """Mean of the honest contributions."""
        mean: Floats = self.honest.mean(0)
        return mean

    @property
    def length(self) -> float:
        """Median norm of the honest contributions."""
        return float(np.median(np.linalg.norm(self.honest.astype(np.float64), axis=1)))

    def all(self, row: Floats) -> Floats:
        """Return the row for every liar."""
        return np.repeat(row[None].astype(np.float32), len(self.own), axis=0)

    def long(self, rows: Floats, factor: float) -> Floats:
        """Return rows with the given multiple of the honest length."""
        long = rows.astype(np.float64)
        scaled: Floats = (long * (factor * self.length / np.linalg.norm(long, axis=1, keepdims=True))).astype(
            np.float32
        )
        return scaled


@dataclass(frozen=True)
class Attack:
    """Behaviour of the liars. `labels`: they train on false labels. `lie`: their contributions. `weight`: claimed tokens."""

    lie: Callable[[View], Floats] = field(default=lambda view: view.own)
    labels: bool = False
    weight: float = 1.0


def _alie(view: View, z: float | None = None) -> Floats:
    """A Little Is Enough (Baruch et al., arXiv 1902.06156): within the spread of the honest ones, all to one side."""
    honest, liars = len(view.honest), len(view.own)
    if z is None:
        needed = (honest + liars) // 2 + 1 - liars
        z = NormalDist().inv_cdf((honest - needed) / honest)
    return view.all(view.mean - z * view.honest.std(0))


def _filled(value: float) -> Callable[[View], Floats]:
    return lambda view: np.full_like(view.own, value)


def _rare(view: View) -> Floats:
    """The coordinates that the honest ones send least, with as much length as a contribution may have."""
    rare = np.argsort(np.abs(view.honest).max(0))[: SIZE // 8]
    row = np.zeros(SIZE, np.float32)
    row[rare] = -1.0
    return view.long(view.all(row), 1.0)


def _scaled(factor: float) -> Callable[[View], Floats]:
    return lambda view: (factor * view.own.astype(np.float64)).astype(np.float32)


def _inner(epsilon: float) -> Callable[[View], Floats]:
    """Inner-product manipulation (Xie et al., arXiv 1903.03936)."""
    return lambda view: view.all(-epsilon * view.mean)


ATTACKS: Mapping[str, Attack] = {
    "labels": Attack(labels=True),
    "sign*1": Attack(_scaled(-1)),
    "sign*10": Attack(_scaled(-10)),
    "sign*1000": Attack(_scaled(-1000)),
    "scale*900": Attack(_scaled(900)),
    "constant*1": Attack(lambda view: view.long(np.ones_like(view.own), 1.0)),
    "constant*1000": Attack(lambda view: view.long(np.ones_like(view.own), 1000.0)),
    "noise*10": Attack(lambda view: view.long(view.rng.standard_normal(view.own.shape).astype(np.float32), 10.0)),
    "inner .1": Attack(_inner(0.1)),
    "inner .6": Attack(_inner(0.6)),
    "reversed mean": Attack(lambda view: view.all(-2.0 * len(view.honest) / len(view.own) * view.mean)),
    "alie": Attack(_alie),
    "alie 1.5": Attack(lambda view: _alie(view, 1.5)),
    "zero": Attack(lambda view: np.zeros_like(view.own)),
    "mimic": Attack(lambda view: view.all(view.honest[0])),
    "copycat": Attack(lambda view: view.honest[: len(view.own)].copy()),
    "delay": Attack(lambda view: view.past[-STALE] if len(view.past) >= STALE else view.own),
    "nan": Attack(_filled(math.nan)),
    "inf": Attack(_filled(math.inf)),
    "1e30": Attack(_filled(1e30)),
    "weight 1e30": Attack(_scaled(-1), weight=1e30),
    "rare index": Attack(_rare),
}
"""Name -> attack. A stale base and a repeated index are no contributions: a round refuses them before aggregation."""

STRONG = ("sign*10", "sign*1000", "constant*1000", "reversed mean", "1e30")
"""Attacks with which the plain mean learns nothing."""


Aggregate = Callable[[list[Floats], list[float]], Floats]
"""Function (contributions, weights) that returns the pseudo-gradient of the round."""


def dense(spec: AggregationSpec, *, screened: bool = True) -> Callable[[], Aggregate]:
    """Return a maker of aggregators of fp32 payloads. screened: outliers are rejected, as in a round."""

    def make() -> Aggregate:
        codec, rule, usual = Fp32(), dense_rule(spec), 0.0

        def aggregate(rows: list[Floats], weights: list[float]) -> Floats:
            nonlocal usual
            norms = {}
            for at, row in enumerate(rows):
                try:
                    norms[bytes([at])] = math.sqrt(codec.check(row.tobytes(), row.size))
                except CodecError:
                    continue
            far, usual = outliers(norms, usual)
            kept = [at for at in range(len(rows)) if bytes([at]) in norms and not (screened and bytes([at]) in far)]
            out = np.zeros(rows[0].size, np.float32)
            rule(codec, [rows[at].tobytes() for at in kept], [weights[at] for at in kept], out)
            return out

        return aggregate

    return make


def sparse(spec: AggregationSpec, denominator: Denominator = "bounded_contributor_mean") -> Callable[[], Aggregate]:
    """Return a maker of aggregators of top-k payloads with error feedback of the honest peers."""

    def make() -> Aggregate:
        codec, rule, usual = Sparse(32, 256), sparse_rule(spec), 0.0
        left: dict[int, Floats] = {}

        def aggregate(rows: list[Floats], weights: list[float]) -> Floats:
            nonlocal usual
            sent, norms = {}, {}
            for at, row in enumerate(rows):
                whole = left.get(at, np.zeros(LAYOUT.total, np.float32)).copy() * np.float32(0.95)
                whole[: row.size] += row
                try:
                    sent[at] = codec.decode(codec.encode(codec.select(whole, LAYOUT)), LAYOUT)
                except CodecError:
                    continue
                sent[at].scatter(whole, -1.0)
                left[at] = whole
                norms[bytes([at])] = norm(sent[at], sent[at].parts[0])
            far, usual = outliers(norms, usual)
            kept = [at for at in sent if bytes([at]) not in far]
            means = rule([sent[at] for at in kept], [weights[at] for at in kept], LAYOUT, denominator)
            return flat(means, LAYOUT)[: rows[0].size]

        return aggregate

    return make


class Scores(Protocol):
    """Scores of the contributions, see gauntlet.py."""

    def counted(self, round: int) -> Sequence[int]:
        """Return the peers whose contributions count in a round."""
        ...

    def score(self, theta: Floats, rows: Sequence[Floats]) -> None:
        """Score the contributions to a round that began with `theta`."""
        ...


def run(
    task: Task,
    make: Callable[[], Aggregate],
    attack: str = "",
    liars: int = 0,
    *,
    rounds: int = ROUNDS,
    scores: Scores | None = None,
    honest: int = 0,
) -> float:
    """Return the accuracy in per cent after training with `liars` liars, the last peers.

    They are honest for the first `honest` rounds. scores: leave out the contributions of distrusted peers.
    """
    rng, theta, aggregate = np.random.default_rng(1), task.first.copy(), make()
    momentum, lie = np.zeros_like(theta), ATTACKS[attack] if attack else Attack()
    past: list[Floats] = []
    peers = len(task.x)
    for round in range(rounds):
        lying = liars if round >= honest else 0
        rows = task.updates(theta, rng, lying if lie.labels else 0)
        view = View(rows[: peers - liars], rows[peers - liars :], past, rng)
        past.append(view.own)
        sent = [*view.honest, *(lie.lie(view) if lying else view.own)]
        sent = [np.ascontiguousarray(row, np.float32) for row in sent]
        # The manifest bounds the weight of a contribution: exchange.max_weight.
        weights = [1.0] * (peers - liars) + [min(1.0, lie.weight)] * liars
        counted = range(peers) if scores is None else scores.counted(round)
        if scores is not None:
            scores.score(theta, sent)
        try:
            delta = aggregate([sent[at] for at in counted], [weights[at] for at in counted])
        except NotEnoughPeers:
            continue  # the round does not count: the previous parameters stay
        with np.errstate(over="ignore", invalid="ignore"):
            outer_step(theta, momentum, np.ascontiguousarray(delta), OUTER_RATE, 0.5)
        if not np.isfinite(theta).all():
            return 0.0
    return task.accuracy(theta)


def rules(liars: int) -> dict[str, Callable[[], Aggregate]]:
    """Return the rows of the table; rules that cannot withstand so many liars of PEERS assume as many as they can."""

    def spec(rule: Aggregation) -> AggregationSpec:
        fits = [f for f in range(1, liars + 1) if AggregationSpec(rule, f).needs <= PEERS]
        return AggregationSpec(rule, max(fits))

    return {
        "mean, unscreened": dense(AggregationSpec("mean"), screened=False),
        **{rule: dense(AggregationSpec(rule)) for rule in ("mean", "rda", "clip")},
        **{rule: dense(spec(rule)) for rule in (*ITERATED, *(rule for rule in NEEDS if rule not in ITERATED))},
        "sparse mean": sparse(AggregationSpec("mean")),
        "sparse clip": sparse(AggregationSpec("clip")),
        "sparse clip, mean": sparse(AggregationSpec("clip"), "mean"),
        "sparse centered-clip": sparse(spec("centered-clip")),
    }


def table(liars: int, names: Sequence[str] = (), attacks: Sequence[str] = ()) -> None:
    """Print the accuracy of each rule against each attack."""
    task, shown = Task(), [name for name in rules(liars) if not names or name in names]
    print(f"{liars} liars of {PEERS}, accuracy in per cent\n")
    print(f"| attack | {' | '.join(shown)} |\n|---|{'---|' * len(shown)}")
    makers = rules(liars)
    print(f"| none | {' | '.join(f'{run(task, makers[name]):.0f}' for name in shown)} |", flush=True)
    for attack in attacks or ATTACKS:
        found = [run(task, makers[name], attack, liars) for name in shown]
        print(f"| {attack} | {' | '.join(f'{one:.0f}' for one in found)} |", flush=True)
    print()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--liars", type=int, nargs="+", default=[3, 6])
    parser.add_argument("--rules", nargs="+", default=[])
    parser.add_argument("--attacks", nargs="+", default=[])
    options = parser.parse_args()
    for liars in options.liars:
        table(liars, options.rules, options.attacks)


if __name__ == "__main__":
    main()
