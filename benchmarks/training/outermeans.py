"""Outer steps on common parameters with the product's codecs, rules and residuals; only the network is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from thinwire.collectives.aggregation.rule_factory import RULES
from thinwire.collectives.rounds.data_planes.sparse_butterfly import parts
from thinwire.collectives.topology.shards import grid
from thinwire.compression import registry
from thinwire.compression.core.parameter_chunks import Chunks
from thinwire.compression.core.types import Denominator, Floats, OnExclusion
from thinwire.compression.kernels.common import outer_step
from thinwire.compression.powersgd import LowRank, PowerSGD
from thinwire.compression.sparse import demo
from thinwire.compression.sparse import mean as sparsemean
from thinwire.compression.sparse.error_feedback import ErrorFeedback, stored
from thinwire.compression.sparse.portions import PortionCodecs, portion_chunks
from thinwire.compression.sparse.topk import Selected, Sparse
from thinwire.node.methods.registry import WIDE
from thinwire.node.methods.sparse.replica import chunks_of
from thinwire.node.state.layout import Layout
from thinwire.node.training.inner_optimizer import learning_rate

from benchmarks.training.toy import Make, Step, Toy, train


def mean_of(vectors: Sequence[Floats]) -> Floats:
    """Return the mean of vectors with equal weights, exactly as the product computes it with the codec fp32."""
    codec, out = registry.dense("fp32"), np.empty_like(vectors[0])
    RULES["mean"](codec, [vector.view(np.uint8).data for vector in vectors], [1.0] * len(vectors), out)
    return out


def dense(spec: str, lr: float = 1.0, momentum: float = 0.0) -> Make:
    """DiLoCo: chunks are encoded, averaged in fp32, encoded once more, and every peer applies the decoded result.

    A plain average was the best outer step on this toy, of (lr, momentum) (1, 0), (0.7, 0.5), (0.4, 0.8) and (0.7, 0.9).
    """

    def make(toy: Toy, layout: Layout) -> Step:
        codec = registry.dense(spec)
        cut, velocity = grid(layout.total, codec), np.zeros(layout.total, np.float32)

        def step(theta: Floats, deltas: Sequence[Floats], round: int) -> None:
            for index in range(len(cut)):
                start, stop = cut.span(index)
                payloads = [np.empty(codec.nbytes(stop - start), np.uint8) for _ in deltas]
                for delta, payload in zip(deltas, payloads, strict=True):
                    codec.encode(delta[start:stop], payload)
                mean, result = np.empty(stop - start, np.float32), np.empty(codec.nbytes(stop - start), np.uint8)
                RULES["mean"](codec, [payload.data for payload in payloads], [1.0] * len(payloads), mean)
                codec.encode(mean, result)
                codec.decode(result.data, mean)
                outer_step(theta[start:stop], velocity[start:stop], mean, lr, momentum, True)

        return step

    return make


def sparse(
    spec: str = "topk(k=64,chunk=4096)|2bit|rice",
    *,
    beta: float = 0.95,
    lr: float = 1.0,
    denominator: Denominator = "bounded_contributor_mean",
    excluded: float = 0.0,
    on_exclusion: OnExclusion = "drop",
) -> Make:
    """SparseLoCo. `excluded`: the part of all contributions that rounds leave out."""

    def make(toy: Toy, layout: Layout) -> Step:
        codec = registry.parse(spec)
        assert isinstance(codec, Sparse)
        chunks = chunks_of(layout, codec.chunk)
        memories = [ErrorFeedback(codec, chunks, beta, on_exclusion) for _ in toy.peers]
        draw = np.random.default_rng(toy.seed)

        def step(theta: Floats, deltas: Sequence[Floats], round: int) -> None:
            out = draw.random(len(deltas)) < excluded
            if out.all():
                out[int(draw.integers(len(deltas)))] = False
            payloads = [memory.prepare(stored(delta)) for memory, delta in zip(memories, deltas, strict=True)]
            selected = [
                memory.codec.decode(p, chunks)
                for memory, p, left in zip(memories, payloads, out, strict=True)
                if not left
            ]
            mean = sparsemean.mean(selected, [1.0] * len(selected), chunks, denominator)
            theta -= np.float32(lr) * mean
            for memory, left in zip(memories, out, strict=True):
                memory.commit(excluded=bool(left))

        return step

    return make


def sparse_butterfly(
    spec: str = "topk(k=64,chunk=4096)|2bit|rice",
    *,
    keep: float = 0.5,
    wide: int = WIDE,
    beta: float = 0.95,
    denominator: Denominator = "bounded_contributor_mean",
) -> Make:
    """SparseLoCo with chunk owners, each of which sends a part of its sums, as in the product."""

    def make(toy: Toy, layout: Layout) -> Step:
        codec = registry.parse(spec)
        assert isinstance(codec, Sparse)
        portions = PortionCodecs(codec, replace(codec, k=min(codec.chunk, wide * codec.k)), keep, denominator)
        cut = parts(layout.total, portions, codec.chunk)
        chunks = portion_chunks(layout.total, cut.chunk, codec.chunk)
        memories = [ErrorFeedback(codec, chunks, beta) for _ in toy.peers]
        kept: dict[int, Floats] = {}

        def step(theta: Floats, deltas: Sequence[Floats], round: int) -> None:
            sent = []
            for memory, delta in zip(memories, deltas, strict=True):
                payload = memory.prepare(stored(delta))
                assert isinstance(memory.choice, Selected)
                sent.append(list(portions.split(payload, memory.choice)))
                memory.commit()
            for index in range(len(cut)):
                start, stop = cut.span(index)
                weights = [1.0] * len(sent)
                result, kept[index] = portions.reduce(
                    [one[index] for one in sent], weights, kept.get(index), stop - start
                )
                portions.wide.decode(result, portion_chunks(stop - start, stop - start, codec.chunk)).scatter(
                    theta[start:stop], -1.0
                )

        return step

    return make


def low_rank(rank: int, lr: float = 1.0, momentum: float = 0.0) -> Make:
    """DiLoCo with PowerSGD: two averages a round."""

    def make(toy: Toy, layout: Layout) -> Step:
        chunks = Chunks(tuple((piece.name, piece.shape) for piece in layout.pieces))
        states = [LowRank(PowerSGD(rank), chunks, toy.seed) for _ in toy.peers]
        velocity = np.zeros(layout.total, np.float32)

        def step(theta: Floats, deltas: Sequence[Floats], round: int) -> None:
            first = mean_of([state.prepare(delta) for state, delta in zip(states, deltas, strict=True)])
            second = mean_of([state.second_vector(first) for state in states])
            mean = [state.commit(second) for state in states][0]
            outer_step(theta, velocity, mean, lr, momentum, True)

        return step

    return make


def demo_run(spec: str, beta: float = 0.999, lr: float = 3e-3) -> Callable[[Toy], float]:
    """DeMo: every gradient goes into the replica's momentum, and its strongest coefficients are exchanged in every step."""

    def make(toy: Toy, layout: Layout) -> Step:
        codec = registry.parse(spec)
        assert isinstance(codec, demo.Demo)
        chunks = chunks_of(layout, codec.chunk)
        momenta = [np.zeros(layout.total, np.float32) for _ in toy.peers]
        schedule = toy.config(lr=lr)

        def step(theta: Floats, deltas: Sequence[Floats], round: int) -> None:
            selected = []
            for momentum, gradient in zip(momenta, deltas, strict=True):
                momentum *= np.float32(beta)
                momentum += np.float32(lr) * gradient
                selected.append(codec.select(momentum, chunks))
                selected[-1].scatter(momentum, -1.0)
            means = demo.means(selected, [1.0] * len(selected), chunks)
            demo.step(theta, means, learning_rate(schedule, round), 0.1)

        return step

    def run(toy: Toy) -> float:
        plain = toy.config(optimizer="sgd", lr=1.0, betas=(0.0, 0.0), weight_decay=0.0, warmup=0, schedule="constant")
        return train(toy, make, plain, steps=1)

    return run
