"""Swarms whose sparse payloads have owners that add them up and send a part of the sum, in virtual time."""

from __future__ import annotations

import numpy as np
import pytest
from thinwire.compression import sparsemean
from thinwire.compression.feedback import ErrorFeedback
from thinwire.compression.portions import layout
from thinwire.compression.sparse import HEADER
from thinwire.sims import clock
from thinwire.swarm.protocol import Chunk, Result

TOPK = "topk(k=16,chunk=256)|2bit|rice"
SIZE = 20_000
PHASES = ["announce", "open", "record", "vote", "commit"]


@pytest.fixture
def sieve(swarm):
    def make(founders, *, outer="", size=SIZE, codec=TOPK, **rest):
        more = f'method = "sparseloco"\n{outer}'
        return swarm(founders, codec=codec, outer=more, size=size, collective="sparse-butterfly", **rest)

    return make


def kept(s, indices=None):
    """What all owners together have kept."""
    whole = np.zeros(s.size)
    for index in s.nodes if indices is None else indices:
        node = s.nodes[index]
        for chunk in range(len(node.session.grid)):
            rest = node.session._series.kept.of(chunk)
            if rest is not None:
                whole[slice(*node.session.grid.span(chunk))] += rest
    return whole


def expected(s, rounds):
    """What rounds without faults come to, from codecs and rule alone, on the whole vector; the rest, and the sum of the means."""
    portions, cut, outer = s.nodes[0].replica.codec.portions, s.nodes[0].session.grid, s.manifest.outer
    chunks = layout(s.size, cut.chunk, portions.codec.chunk)
    theta = np.random.default_rng(7).standard_normal(s.size).astype(np.float32)
    order = sorted(s.nodes.values(), key=lambda node: node.id)
    memory = {node.index: ErrorFeedback(portions.codec, chunks, outer.beta) for node in order}
    rest, means = np.zeros(s.size, np.float32), np.zeros(s.size)
    for number in range(1, rounds + 1):
        said = []
        for node in order:
            local = theta.copy()
            local -= (np.random.default_rng((node.index, number)).standard_normal(s.size) * 0.01).astype(np.float32)
            said.append(portions.codec.decode(memory[node.index].prepare(theta - local), chunks))
            memory[node.index].commit()
        mean = sparsemean.mean(said, [100.0] * len(said), chunks, outer.denominator)
        means += mean
        rest = mean + np.float32(outer.beta) * rest
        sent = portions.wide.select(rest, chunks)
        sent.scatter(rest, -1.0)
        moved = np.zeros_like(theta)
        sent.scatter(moved)
        theta -= np.float32(outer.lr) * moved
    return theta, rest, means


@pytest.mark.parametrize("outer", ["", 'lr = 0.9\nbeta = 1\ndenominator = "mean"\n'])
def test_what_is_applied_and_what_is_kept_are_the_sum_of_the_means(sieve, outer):
    async def main():
        s = sieve(5, rounds=4, outer=outer)
        s.start()
        await s.finish()
        s.check()
        theta, rest, means = expected(s, 4)
        for node in s.nodes.values():
            np.testing.assert_array_equal(node.replica.theta, theta)
            assert not any(node.missing.values()) and node.replica.state.size == SIZE
            assert 0 < sum(node.session._series.kept.of(i) is not None for i in range(79)) <= 79 // 5 + 1
        np.testing.assert_array_equal(kept(s), rest)
        if "beta = 1" in outer:
            first = np.random.default_rng(7).standard_normal(s.size).astype(np.float32)
            np.testing.assert_allclose((first - theta) / 0.9 + kept(s), means, atol=2e-6)
            assert np.linalg.norm(rest) > 0.1 * np.linalg.norm(means)  # and something was kept

    clock.run(main(), seed=1)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", range(2))
def test_kill_one_of_six(sieve, phase, victim):
    async def main():
        s = sieve(6, seed=victim)
        s.fail_at(victim, 3, phase)
        s.start()
        rest = [i for i in range(6) if i != victim]
        await s.finish(rest)
        s.check(rest)
        normal = s.nodes[rest[0]].committed_at[2] - s.nodes[rest[0]].committed_at[1]
        for i in rest:
            times = s.nodes[i].committed_at
            assert times[4] - times[3] < 3 * normal
        # Every chunk has one owner that keeps something of it, and what the dead one owned others begin anew.
        cut = s.nodes[rest[0]].session.grid
        holders = [
            sum(s.nodes[i].session._series.kept.of(chunk) is not None for i in rest) for chunk in range(len(cut))
        ]
        assert holders == [1] * len(cut)

    clock.run(main(), seed=victim)
