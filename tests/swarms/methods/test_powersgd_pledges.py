"""Swarms of powersgd with a peer that abandons steps it has begun."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from thinwire.compression.powersgd import LowRank, PowerSGD
from thinwire.node.methods.sparse.replica import chunks_of
from thinwire.sims.engine import virtual_loop

SIZE = 12_000
PLAIN = "lr = 1.0\nmomentum = 0.0\nnesterov = false\n"


@pytest.fixture
def factors(swarm):
    def make(founders, *, outer="", **rest):
        outer = f'method = "powersgd"\n{outer}'
        return swarm(founders, codec="powersgd(rank=4)", outer=outer, size=SIZE, **rest)

    return make


def steps_of(node):
    """Round -> True if it made a step; filled in as the node commits."""
    found, commit = {}, node.replica.commit

    def noted(*given, **rest):
        stepped = commit(*given, **rest)
        found[node.replica.round] = stepped
        return stepped

    node.replica.commit = noted
    return found


def change(node, how):
    """Let `how` change a node's announcement for the second round of a step: (source, weight) -> the same."""
    average = node.session.average

    async def changed(source, *, weight, summary=None, **rest):
        if node.replica.phase:
            source, weight = how(source, weight)
        return await average(source, weight=weight, **rest)

    node.session.average = changed


def test_peer_silent_in_second_rounds_stops_nobody(factors):
    async def main():
        s = factors(4, rounds=20)
        change(s.nodes[3], lambda source, weight: ((), 0))
        made = steps_of(s.nodes[0])
        s.start()
        await s.finish([0, 1, 2])
        s.check([0, 1, 2])
        made = [made[number] for number in range(2, 21, 2)]
        # It rests for 1, 2, 4, … steps, and spoils the next one.
        assert made == [False, True, False, True, True, False, True, True, True, True]

    virtual_loop.run(main(), seed=1)


@pytest.mark.parametrize("other", [1, 99, 101, 10**9])
def test_weight_is_fixed_in_the_first_round(factors, other):
    async def main():
        s = factors(3, rounds=6, outer=PLAIN)
        change(s.nodes[1], lambda source, weight: (source, other if source else 0))
        made = steps_of(s.nodes[0])
        s.start()
        await s.finish()
        s.check()
        assert [made[number] for number in range(1, 7)] == [False, True] * 3
        assert all(len(node.contributors[6]) == 3 for node in s.nodes.values())

    virtual_loop.run(main(), seed=1)


def test_peer_missing_in_first_round_is_not_in_second(factors):
    async def main():
        s = factors(4, rounds=8)
        liar = s.nodes[3]
        average = liar.session.average

        async def changed(source, *, weight, summary=None, **rest):
            if liar.replica.phase:
                grid = liar.session.grid
                source = [np.zeros(4 * grid.size(index), np.uint8).data for index in range(len(grid))]
                return await average(source, weight=100, **rest)
            return await average((), weight=0, **rest)

        liar.session.average = changed
        made = steps_of(s.nodes[0])
        s.start()
        await s.finish()
        s.check()
        assert [made[number] for number in (2, 4, 6, 8)] == [True] * 4
        assert liar.id not in s.nodes[0].contributors[8]

    virtual_loop.run(main(), seed=1)


def test_abandoned_second_round_resumes_with_first_round_contributions(factors):
    """Two of three: their training while the second round is missing is not in the step, and not lost."""

    async def main():
        s = factors(3, rounds=6, outer=PLAIN, straggler_timeout=20.0)
        weights, after, made = [], {}, steps_of(s.nodes[0])
        node = s.nodes[0]
        average, advance = node.session.average, node.session.advance

        async def left(source, *, weight, give_up, **rest):
            weights.append((node.session.current.round, weight))
            first = node.session.current.round == 2 and [number for number, _ in weights].count(2) == 1
            if first:  # announced, and given up at once
                give_up = 0.0
            return await average(source, weight=weight, give_up=give_up, **rest)

        def noted():
            after[node.replica.round] = node.replica.theta.copy()
            advance()

        node.session.average, node.session.advance = left, noted
        slow = s.nodes[1].session.average

        async def waits(source, **rest):  # the round must not end before node 0 is back
            if s.nodes[1].session.current.round == 2:
                await asyncio.sleep(4.0)
            return await slow(source, **rest)

        s.nodes[1].session.average = waits
        s.start()
        await s.finish()
        s.check()
        assert [number for number, _ in weights].count(2) == 2, weights
        assert made == {1: False, 2: True, 3: False, 4: True, 5: False, 6: True}
        # Node 0 trained for round 2 too, after its contribution to round 1: that is in the step of rounds 3 and 4.
        assert dict(weights)[3] == 200
        power, chunks = PowerSGD(4), chunks_of(s.layout)
        order = [n.index for n in sorted(s.nodes.values(), key=lambda n: n.id)]
        memory = {index: LowRank(power, chunks, 0) for index in order}
        theta = np.random.default_rng(7).standard_normal(SIZE).astype(np.float32)
        extra = trained(0, 2)
        for number, more in ((1, None), (3, extra)):
            deltas = {i: trained(i, number) + (extra if more is not None and i == 0 else 0) for i in order}
            tokens = np.array([200 if more is not None and i == 0 else 100 for i in order], np.float64)
            ps = [memory[i].prepare(deltas[i]) for i in order]
            qs = [memory[i].second_vector(mean(ps, tokens)) for i in order]
            theta -= [memory[i].commit(mean(qs, tokens)) for i in order][0]
            np.testing.assert_allclose(after[number + 1], theta, rtol=0, atol=1e-5)

    virtual_loop.run(main(), seed=1)


def trained(index, number):
    return (np.random.default_rng((index, number)).standard_normal(SIZE) * 0.01).astype(np.float32)


def mean(vectors, tokens):
    return np.average(np.stack(vectors), axis=0, weights=tokens).astype(np.float32)


def test_second_round_without_first_round_contributors_ends_empty(factors):
    """If all restart from a checkpoint between the two rounds, the first contributions are lost."""

    async def main():
        s = factors(2, rounds=8)
        for node in s.nodes.values():
            change(node, lambda source, weight, node=node: ((), 0) if node.replica.round == 1 else (source, weight))
        made = steps_of(s.nodes[0])
        s.start()
        await s.finish()
        s.check()
        assert [made[number] for number in (2, 4, 6, 8)] == [False, True, True, True]

    virtual_loop.run(main(), seed=1)
