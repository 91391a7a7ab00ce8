"""Swarms that exchange momenta (demo) or thin factors (powersgd)."""

from __future__ import annotations

import numpy as np
import pytest
from thinwire.compression.kernels.common import outer_step
from thinwire.compression.powersgd import LowRank, PowerSGD
from thinwire.compression.sparse import demo
from thinwire.compression.sparse.error_feedback import ErrorFeedback, stored
from thinwire.node.methods.sparse.replica import chunks_of
from thinwire.sims.engine import virtual_loop

SIZE = 12_000


@pytest.fixture
def swarms(swarm):
    def make(founders, method, codec, *, outer="", **rest):
        return swarm(founders, codec=codec, outer=f'method = "{method}"\n{outer}', size=SIZE, **rest)

    return make


@pytest.fixture
def momenta(swarms):
    return lambda founders, **rest: swarms(founders, "demo", "demo(k=32,chunk=4096)|2bit|rice", **rest)


@pytest.fixture
def factors(swarms):
    return lambda founders, **rest: swarms(founders, "powersgd", "powersgd(rank=4)", **rest)


def first():
    return np.random.default_rng(7).standard_normal(SIZE).astype(np.float32)


def moved(theta, index, number):
    """Return the training of a node in a round."""
    local = theta.copy()
    local -= (np.random.default_rng((index, number)).standard_normal(SIZE) * 0.01).astype(np.float32)
    return theta - local


def by_id(s):
    return [node.index for node in sorted(s.nodes.values(), key=lambda node: node.id)]


def test_demo_step_equals_reference_on_sent_payloads(momenta):
    async def main():
        s = momenta(3, rounds=4, outer="lr = 0.01\n")
        s.start()
        await s.finish()
        s.check()
        codec = s.nodes[0].replica.codec.codec
        theta, chunks = first(), chunks_of(s.layout)
        memory = {index: ErrorFeedback(codec, chunks, 0.999) for index in s.nodes}
        for number in range(1, 5):
            sent = []
            for index in by_id(s):
                delta = stored(moved(theta, index, number))
                sent.append(codec.decode(memory[index].prepare(delta), chunks))
                memory[index].commit()
            demo.step(theta, demo.means(sent, [100.0] * 3, chunks), 0.01, 0.1)
        for node in s.nodes.values():
            np.testing.assert_array_equal(node.replica.theta, theta)

    virtual_loop.run(main(), seed=1)


@pytest.mark.parametrize("phase", ["announce", "open", "vote", "commit"])
def test_demo_swarm_continues_after_kill_and_join(momenta, phase):
    async def main():
        s = momenta(4, rounds=6)
        s.fail_at(1, 3, phase)
        s.fail_at(2, 2, "announce", lambda node: s.join(7))
        s.start()
        await s.finish([0, 2, 3])
        await s.finish([7])
        s.check([0, 2, 3, 7])

    virtual_loop.run(main(), seed=2)


def test_powersgd_step_equals_two_averages(factors):
    async def main():
        s = factors(3, rounds=6)
        s.start()
        await s.finish()
        s.check()
        power, chunks = PowerSGD(4), chunks_of(s.layout)
        theta, momentum = first(), np.zeros(SIZE, np.float32)
        memory = {index: LowRank(power, chunks, 0) for index in s.nodes}
        for number in (1, 3, 5):
            ps = [memory[index].prepare(moved(theta, index, number)) for index in by_id(s)]
            qs = [memory[index].second_vector(mean(ps)) for index in by_id(s)]
            step = [memory[index].commit(mean(qs)) for index in by_id(s)][0]
            outer_step(theta, momentum, step, 0.7, 0.9, True)
        assert power.second_size(chunks) > 0 and all(len(node.contributors) == 3 for node in s.nodes.values())
        for node in s.nodes.values():
            np.testing.assert_allclose(node.replica.theta, theta, rtol=0, atol=1e-5)
            assert node.replica.phase == 0 and not node.replica.first.any()

    virtual_loop.run(main(), seed=1)


def mean(vectors):
    return np.mean(np.stack(vectors), axis=0, dtype=np.float64).astype(np.float32)


@pytest.mark.parametrize(
    ("number", "phase", "aborted"),
    [
        (3, "announce", False),
        (3, "vote", None),
        (3, "commit", True),
        (4, "announce", True),
        (4, "vote", None),
        (4, "commit", False),
    ],
)
def test_powersgd_death_between_averages_aborts_both(factors, number, phase, aborted):
    """Parameters after rounds 3 and 4 are the old ones or those of a whole step."""

    async def main():
        s = factors(4, rounds=10)
        s.fail_at(1, number, phase)
        seen = {}
        for node in s.nodes.values():
            commit = node.replica.commit

            def noted(*given, node=node, commit=commit, **rest):
                before = node.replica.theta.copy(), node.replica.momentum.copy(), node.replica.q.copy()
                stepped = commit(*given, **rest)
                after = node.replica.theta, node.replica.momentum, node.replica.q
                same = [bool(np.array_equal(a, b)) for a, b in zip(before, after, strict=True)]
                assert same == [not stepped] * 3
                seen.setdefault(node.replica.round, set()).add(stepped)
                return stepped

            node.replica.commit = noted
        s.start()
        rest = [0, 2, 3]
        await s.finish(rest)
        s.check(rest)
        assert all(len(found) == 1 for found in seen.values()), seen
        assert True not in seen[3] and seen[2] == seen[6] == seen[10] == {True}
        assert aborted is None or seen[4] == {not aborted}
        for index in rest:
            assert s.nodes[index].replica.round == 10 and not s.nodes[index].replica.memory.pending

    virtual_loop.run(main(), seed=1)


def test_powersgd_aborted_step_keeps_trained_values(factors):
    """Two of three continue: their training before the abort is in the next step."""

    async def main():
        s = factors(3, rounds=6, outer="lr = 1.0\nmomentum = 0.0\nnesterov = false\n")
        s.fail_at(1, 2, "announce")
        weights, after = [], {}
        commit = s.nodes[0].replica.commit

        def committed(*given, **rest):
            stepped = commit(*given, **rest)
            after[s.nodes[0].replica.round] = s.nodes[0].replica.theta.copy()
            return stepped

        s.nodes[0].replica.commit = committed
        average = s.nodes[0].session.average

        async def noted(source, *, weight, **rest):
            weights.append((s.nodes[0].session.current.round, weight))
            return await average(source, weight=weight, **rest)

        s.nodes[0].session.average = noted
        s.start()
        await s.finish([0, 2])
        s.check([0, 2])
        assert dict(weights)[1] == 100 and dict(weights)[3] == dict(weights)[4] == 200
        # In round 3 each of the two sends what it trained in rounds 1 and 3.
        power, chunks, theta = PowerSGD(4), chunks_of(s.layout), first()
        memory = {index: LowRank(power, chunks, 0) for index in (0, 2)}
        order = [index for index in by_id(s) if index != 1]
        ps = [memory[i].prepare(moved(theta, i, 1) + moved(theta, i, 3)) for i in order]
        qs = [memory[i].second_vector(mean(ps)) for i in order]
        theta -= [memory[i].commit(mean(qs)) for i in order][0]
        np.testing.assert_allclose(after[4], theta, rtol=0, atol=1e-5)

    virtual_loop.run(main(), seed=1)


@pytest.mark.parametrize("number", [3, 4])
def test_powersgd_joiner_between_averages_gets_state(factors, number):
    async def main():
        s = factors(3, rounds=12)
        s.fail_at(0, number, "open", lambda node: s.join(7))
        s.start()
        await s.finish()
        await s.finish([7])
        s.check()
        assert s.nodes[7].id in s.nodes[0].contributors[12]
        np.testing.assert_array_equal(s.nodes[7].replica.memory.q, s.nodes[0].replica.memory.q)

    virtual_loop.run(main(), seed=3)
