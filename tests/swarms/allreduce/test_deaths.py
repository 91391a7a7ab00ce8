"""Averages outside of training rounds: deaths, cuts and replaced peers."""

import asyncio
import random

import numpy as np
import pytest
from kit.averages import LATER, SEEDS, Group, Member, is_sum_of_those_named, play, rejoin, seeds, together
from thinwire.sims.engine import virtual_loop


def enrol(group, known):
    """Add a member that the members at these indices know, and that knows them."""
    newcomer = Member(group.net, len(group))
    for index in known:
        for one, other in ((group[index], newcomer), (newcomer, group[index])):
            one.roster.learn(other.record, virtual_loop.current().time())
            one.transport.learn(other.record)
    group.append(newcomer)


def check_survivors(results, victim):
    """Inputs are 2**index, so a sum shows its contributors; equal contributors give equal sums, as here."""
    for ended, out in results:
        assert not ended.failure
        inside = set(ended.outcome.contributors)
        assert out[0] == sum(2.0**i for i, who in victim["ids"].items() if who in inside)
        np.testing.assert_array_equal(out, results[0][1])
        assert inside | ended.missing.keys() >= set(victim["ids"].values())
        assert not inside & ended.missing.keys()


@pytest.mark.parametrize("size", [3, pytest.param(400_000, marks=pytest.mark.trial)])
@pytest.mark.parametrize("delay", [0.0, 0.009, 0.011, 0.021, 0.031, 0.045, 0.06, 0.08, 0.12])
@pytest.mark.parametrize("victim", [0, 1, *(pytest.param(index, marks=pytest.mark.trial) for index in (2, 3))])
def test_peer_killed_at_any_moment_is_left_out_and_others_finish(delay, victim, size):
    async def scene():
        group = Group(4, seed=victim)
        await asyncio.sleep(1.0)
        arrays = [np.full(size, 2.0**i) for i in range(4)]
        calls = {i: asyncio.ensure_future(group[i].average(arrays[i], op="sum")) for i in range(4)}
        await asyncio.sleep(delay)
        group[victim].kill()
        calls.pop(victim).cancel()
        results = await asyncio.gather(*calls.values())
        check_survivors(results, {"ids": {i: group[i].id for i in range(4)}})
        assert all(set(results[0][0].outcome.contributors) >= {group[i].id for i in calls} for i in calls)
        again = await together([group[i] for i in calls], [arrays[i] for i in calls], op="sum")
        assert all(len(ended.outcome.contributors) == 3 for ended, _ in again)

    play(scene, seed=victim)


def test_survivor_of_two_finishes():
    async def scene():
        group = Group(2)
        await asyncio.sleep(1.0)
        calls = [asyncio.ensure_future(member.average(np.full(300_000, 5.0))) for member in group]
        await asyncio.sleep(0.05)
        group[1].kill()
        calls[1].cancel()
        ended, out = await calls[0]
        assert out is not None and out[0] == 5.0 and ended.outcome.contributors[0] in (group[0].id, group[1].id)

    play(scene)


@pytest.mark.parametrize("delay", [0.02, *(pytest.param(d, marks=LATER) for d in (0.0, 0.011, 0.035, 0.06, 0.1))])
@pytest.mark.parametrize("count", [2, 32, pytest.param(8, marks=LATER)])
def test_operations_in_flight_finish_when_a_peer_dies(count, delay):
    async def scene():
        group = Group(4)
        await asyncio.sleep(1.0)
        calls = {
            i: [
                asyncio.ensure_future(member.average(np.full(3000, 2.0**i), name=f"n{n}", op="sum"))
                for n in range(count)
            ]
            for i, member in enumerate(group)
        }
        await asyncio.sleep(delay)
        group[3].kill()
        for call in calls.pop(3):
            call.cancel()
        survivors = {member.id for member in group[:3]}
        for n in range(count):
            results = [await calls[i][n] for i in range(3)]
            inside = [is_sum_of_those_named(group, ended, out) for ended, out in results]
            assert inside[0] == inside[1] == inside[2] and inside[0] >= survivors
            assert all(np.array_equal(out, results[0][1]) for _, out in results)

    play(scene)


@pytest.mark.parametrize("delay", [0.0, 0.015, 0.03, 0.06])
def test_last_survivor_fails_or_finishes_and_continues_alone(delay):
    async def scene():
        group = Group(4)
        await asyncio.sleep(1.0)
        calls = [
            asyncio.ensure_future(member.average(np.full(30_000, 2.0**i), op="sum")) for i, member in enumerate(group)
        ]
        await asyncio.sleep(delay)
        for member, call in zip(group[1:], calls[1:], strict=True):
            member.kill()
            call.cancel()
        ended, out = await calls[0]  # A quorum of the group is dead, so it may fail.
        assert "no majority" in ended.failure or group[0].id in is_sum_of_those_named(group, ended, out)
        ended, out = await group[0].average(np.full(2, 1.0), op="sum", grace=5.0)
        assert is_sum_of_those_named(group, ended, out) == {group[0].id}

    play(scene)


@pytest.mark.parametrize(
    "seconds",
    [pytest.param(20.0, marks=LATER), pytest.param(1200.0, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])],
)
def test_sums_are_right_while_swarm_halves_and_doubles(seconds):
    """A peer dies or joins every 0.5 to 2 s; each sum is that of its named contributors."""

    async def scene():
        rng, group, loops, met = random.Random(7), Group(6), {}, []

        async def loop(member, index):
            while True:
                value = np.full(2, 2.0 ** (index % 50))
                ended, out = await member.average(value, op="sum", grace=2.0)
                if not ended.failure:
                    inside = set(ended.outcome.contributors)
                    assert out[0] == sum(2.0 ** (i % 50) for i, one in enumerate(group) if one.id in inside)
                    met.append(len(inside))
                await asyncio.sleep(0.2)

        def start(index):
            loops[index] = asyncio.ensure_future(loop(group[index], index))

        for index in range(6):
            start(index)
        end = virtual_loop.current().time() + seconds
        while virtual_loop.current().time() < end:
            await asyncio.sleep(rng.uniform(0.5, 2.0))
            if len(loops) > 3 and (len(loops) >= 12 or rng.random() < 0.5):
                index = rng.choice(sorted(loops))
                group[index].kill()
                loops.pop(index).cancel()
            else:
                enrol(group, loops)
                start(len(group) - 1)
            for task in loops.values():
                assert not task.done(), task.exception()
        assert len(met) > seconds and max(met) >= 6
        for task in loops.values():
            task.cancel()

    play(scene, limit=seconds + 60.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_are_equal_under_random_kills(seed):
    """Peers die at random times during several averages: survivors get equal results, or all fail without a quorum."""
    rng = random.Random(f"kill/{seed}")

    async def scene():
        group = Group(rng.randint(3, 7), seed=seed)
        await asyncio.sleep(1.0)
        names, size = [f"n{n}" for n in range(rng.choice((1, 1, 3, 8)))], rng.choice((2, 3_000, 60_000))
        calls = {
            i: [asyncio.ensure_future(m.average(np.full(size, 2.0**i), name=name, op="sum")) for name in names]
            for i, m in enumerate(group)
        }
        doomed = rng.sample(range(len(group)), rng.randint(1, len(group) - 1))
        for victim, pause in zip(doomed, [rng.expovariate(20.0) for _ in doomed], strict=True):
            await asyncio.sleep(pause)
            group[victim].kill()
            for call in calls.pop(victim):
                call.cancel()
        survivors = {group[i].id for i in calls}
        for n in range(len(names)):
            results = [await calls[i][n] for i in calls]
            if any("no majority" in ended.failure for ended, _ in results):
                assert 2 * len(doomed) >= len(group) and all(ended.failure for ended, _ in results)
                continue
            inside = [is_sum_of_those_named(group, ended, out) for ended, out in results]
            assert all(one == inside[0] and one >= survivors for one in inside)
            assert all(np.array_equal(out, results[0][1]) for _, out in results)
        left = [(group[i], np.full(2, 2.0**i)) for i in calls]
        for ended, out in await together(*zip(*left, strict=True), op="sum"):
            assert is_sum_of_those_named(group, ended, out) == survivors

    play(scene, seed)


@pytest.mark.parametrize("seed", seeds(59))
def test_sums_are_right_under_random_cuts(seed):
    """Peers are cut off for a while, at once or by pairs: each result is the sum of its named contributors."""
    rng = random.Random(f"cut/{seed}")

    async def scene():
        group, over = Group(rng.randint(3, 6), seed=seed), False
        await asyncio.sleep(1.0)

        async def loop(member, value):
            while not over:
                ended, out = await member.average(np.full(2, value), op="sum", grace=1.0)
                if not ended.failure:
                    is_sum_of_those_named(group, ended, out)
                await asyncio.sleep(0.2)

        tasks = [asyncio.ensure_future(loop(member, 2.0**i)) for i, member in enumerate(group)]
        for _ in range(rng.randint(1, 2)):
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            order, at = rng.sample(group, len(group)), rng.randint(1, len(group) - 1)
            sides = [[one.id for one in order[:at]], [one.id for one in order[at:]]]
            pairs = [(one, other) for one in sides[0] for other in sides[1] if rng.random() < 0.5]
            whole = rng.random() < 0.5
            group.net.partition(sides) if whole else [group.net.cut(*pair) for pair in pairs]
            await asyncio.sleep(rng.uniform(0.5, 6.0))
            group.net.partition(sides, end=True) if whole else [group.net.mend(*pair) for pair in pairs]
        over = True
        await asyncio.gather(*tasks)
        await asyncio.sleep(10.0)
        await rejoin(group)

    play(scene, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_are_right_when_half_the_swarm_is_replaced(seed):
    """Half of the peers die at once, then as many join: there are always averages, all correct."""
    rng = random.Random(f"halves/{seed}")

    async def scene():
        group, loops, met = Group(4, seed=seed), {}, []

        async def loop(member, index):
            while True:
                ended, out = await member.average(np.full(2, 2.0**index), op="sum", grace=2.0)
                if not ended.failure:
                    inside = is_sum_of_those_named(group, ended, out)
                    met.append((virtual_loop.current().time(), len(inside)))
                await asyncio.sleep(0.5)

        def start(index):
            loops[index] = asyncio.ensure_future(loop(group[index], index))

        for index in range(len(group)):
            start(index)
        for _ in range(2):
            await asyncio.sleep(rng.uniform(0.0, 2.0))
            for index in rng.sample(sorted(loops), len(loops) // 2):
                group[index].kill()
                loops.pop(index).cancel()
                await asyncio.sleep(rng.expovariate(20.0))
            await asyncio.sleep(rng.uniform(0.0, 3.0))
            for _ in range(len(loops)):
                enrol(group, loops)
                start(len(group) - 1)
                await asyncio.sleep(rng.expovariate(20.0))
        await asyncio.sleep(8.0)
        for task in loops.values():
            assert not task.done(), task.exception()
            task.cancel()
        assert max(many for at, many in met if at > virtual_loop.current().time() - 3.0) == len(loops)

    play(scene, seed)
