"""Averages outside of training rounds: numbers of operations, newcomers, and callers that gave up."""

import asyncio
from contextlib import nullcontext

import numpy as np
import pytest
from kit.averages import Group, Member, fail, plan_, play, together
from thinwire.collectives.allreduce.element_arithmetic import EXACT
from thinwire.collectives.allreduce.service import AT_ONCE
from thinwire.collectives.allreduce.signature import plan_of
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.messages.registry import Call, NextNumber


def test_newcomer_learns_next_operation_number():
    async def scene():
        group = Group(2)
        for _ in range(5):
            await together(group, [np.ones(2)] * 2, name="loss")
        newcomer = Member(group.net, 7)
        group.append(newcomer)
        for member in group:
            group.acquaint(member)
        calls = [asyncio.ensure_future(newcomer.average(np.full(2, 4.0), name="loss"))]
        await asyncio.sleep(0.7)
        calls += [asyncio.ensure_future(member.average(np.full(2, 1.0), name="loss")) for member in group[:2]]
        for ended, out in await asyncio.gather(*calls):
            assert len(ended.outcome.contributors) == 3
            np.testing.assert_array_equal(out, [2.0, 2.0])
        results = await together(group, [np.ones(2)] * 3, name="loss")
        assert {len(ended.outcome.contributors) for ended, _ in results} == {3}

    play(scene)


@pytest.mark.parametrize("first", [0, 2])
def test_restarted_peer_learns_next_operation_number(first):
    async def scene():
        group = Group(3)
        for _ in range(4):
            await together(group, [np.ones(2)] * 3, op="sum")
        group[2].kill()
        await asyncio.sleep(1.0)
        again = Member(group.net, 2, life=1)
        group[2] = again
        for member in group:
            group.acquaint(member)
        await asyncio.sleep(3.0)
        order = [group[first], *(member for member in group if member is not group[first])]
        calls = []
        for member in order:
            calls.append(asyncio.ensure_future(member.average(np.ones(2), op="sum", least=3, grace=10.0)))
            await asyncio.sleep(0.5)
        for ended, out in await asyncio.gather(*calls):
            assert len(ended.outcome.contributors) == 3 and out[0] == 3.0
        assert virtual_loop.current().time() < 10.0

    play(scene)


def test_newcomer_learns_operation_number_after_results_expired():
    async def scene():
        group = Group(6)
        for _ in range(5):
            await together(group[:2], [np.ones(2)] * 2, name="loss", grace=0.5)
        await asyncio.sleep(40.0)  # all results have expired
        calls = [asyncio.ensure_future(group[2].average(np.full(2, 4.0), name="loss", grace=20.0))]
        await asyncio.sleep(3.0)
        calls += [asyncio.ensure_future(m.average(np.full(2, 1.0), name="loss", grace=4.0)) for m in group[:2]]
        for ended, out in await asyncio.gather(*calls):
            assert len(ended.outcome.contributors) == 3
            np.testing.assert_array_equal(out, [2.0, 2.0])

    play(scene)


def test_concurrent_operations_of_one_and_many_names_finish():
    async def scene():
        group = Group(3)
        calls = []
        for i, member in enumerate(group):
            for turn in range(6):
                await asyncio.sleep(0.003 * i)
                name = ["", "", "", "a", "b", "a"][turn]
                calls.append(
                    asyncio.ensure_future(member.average(np.full(20_000, float(10**turn * i)), name=name, op="max"))
                )
        results = await asyncio.gather(*calls)
        for i in range(3):
            values = [float(out[0]) for _, out in results[6 * i : 6 * i + 6]]
            assert values == [2.0 * 10**turn for turn in range(6)]
        for turn in range(70):
            with pytest.raises(ValueError, match="64 averages") if turn >= AT_ONCE else nullcontext():
                group[0].begin(np.ones(1), name=str(turn))

    play(scene)


def test_refused_operation_counts_no_number():
    """Otherwise the peer would be ahead of the others by every call that it made too many."""

    async def scene():
        group = Group(1)
        begun = [group[0].begin(np.ones(1), least=2)[0] for _ in range(AT_ONCE)]
        for _ in range(3):
            with pytest.raises(ValueError, match="64 averages"):
                group[0].begin(np.ones(1), least=2)
        begun[-1].withdraw()
        await asyncio.sleep(0)
        assert [one.number for one in begun] == list(range(AT_ONCE))
        assert group[0].begin(np.ones(1), least=2)[0].number == AT_ONCE

    play(scene)


def test_operation_below_min_peers_fails_and_later_call_succeeds():
    async def scene():
        group = Group(3)
        ended, _ = await group[0].average(np.ones(2), least=3, grace=1.0)
        assert "1 of at least 3 peers have called" in ended.failure
        results = await together(group[1:], [np.ones(2)] * 2, least=3, grace=1.0)
        assert all("2 of at least 3" in ended.failure for ended, _ in results)
        results = await together(group, [np.ones(2)] * 3, least=3, grace=5.0)
        assert all(len(ended.outcome.contributors) == 3 for ended, _ in results)

    play(scene)


def test_finished_operation_counts_all_its_retained_bytes():
    async def scene():
        group = Group(2)
        begun = [member.begin(np.ones(50_000))[0] for member in group]
        await asyncio.gather(*(operation.wait() for operation in begun))
        assert [operation.nbytes for operation in begun] == [2 * 50_000 * 8] * 2

    play(scene)


def test_withdrawn_caller_is_not_waited_for():
    async def scene():
        group = Group(3)
        operation, _ = group[0].begin(np.ones(2))
        await asyncio.sleep(0.2)
        operation.withdraw()
        await asyncio.sleep(0.2)
        results = await together(group[1:], [np.ones(2)] * 2, grace=0.5)
        assert all(ended.missing == {group[0].id: "has not called"} for ended, _ in results)
        results = await together(group, [np.ones(2)] * 3)
        assert all(len(ended.outcome.contributors) == 3 for ended, _ in results)

    play(scene)


def test_stored_calls_are_bounded_and_results_expire():
    async def scene():
        group = Group(2)
        for turn in range(100):
            message = Call(f"n{turn}", turn, False, plan_of("sum", "int64", EXACT, 1, []), ())
            group[0].presence.send_queue.control(group[1].id, message)
        await asyncio.sleep(2.0)
        assert group[1].operations.sizes()["calls"] == (64, 64)
        await together(group, [np.ones(2)] * 2, name="kept")
        assert group[0].operations.sizes()["operations"][0] == 1
        await asyncio.sleep(40.0)
        assert group[0].operations.sizes()["operations"][0] == 0

    play(scene)


@pytest.mark.parametrize("least", ["all", 1])
@pytest.mark.parametrize(
    "failed", [(2, 0), (0, 5), (1, 1, 0), (0, 0, 2), (3, 1, 0), (2, 2, 0, 0), (0, 0, 3, 1), (0, 4, 2, 2, 9)]
)
def test_peers_with_different_failure_counts_meet_in_one_operation(failed, least):
    async def scene():
        group = Group(len(failed))
        await asyncio.sleep(0.5)
        least_ = len(group) if least == "all" else 1
        for member, times in zip(group, failed, strict=True):
            await fail(member, times, least_)
        for _ in range(2):
            arrays = [np.full(2, 2.0**i) for i in range(len(group))]
            for ended, out in await together(group, arrays, op="sum", least=least_, grace=2.0):
                assert ended.failure == "" and len(ended.outcome.contributors) == len(group)
                assert out[0] == 2 ** len(group) - 1

    play(scene)


@pytest.mark.parametrize("many", [1, AT_ONCE])
@pytest.mark.parametrize("pause", [0.0, 0.004, 0.008])
def test_caller_that_cancels_while_others_begin_meets_them_next_time(pause, many):
    """The others have it in their group already, and need the minimum: they cannot finish alone."""

    async def scene():
        group = Group(3)
        await asyncio.sleep(0.5)
        for _ in range(2):
            await together(group, [np.ones(2)] * 3, op="sum", name="x", least=3)
        began = virtual_loop.current().time()
        given_up = [group[0].begin(np.ones(2), op="sum", name="x", least=3)[0] for _ in range(many)]
        calls = [
            asyncio.ensure_future(m.average(np.full(2, 2.0), op="sum", name="x", least=3, grace=20.0))
            for m in group[1:]
        ]
        await asyncio.sleep(pause)
        for operation in given_up:
            operation.withdraw()
        calls.append(asyncio.ensure_future(group[0].average(np.full(2, 3.0), op="sum", name="x", least=3, grace=20.0)))
        for ended, out in await asyncio.gather(*calls):
            assert ended.failure == "" and out[0] == 7.0
        assert virtual_loop.current().time() < began + 1.0
        for _, out in await together(group, [np.ones(2)] * 3, op="sum", name="x", least=3):
            assert out[0] == 3.0

    play(scene)


def test_peer_that_calls_and_withdraws_repeatedly_disturbs_others_once():
    async def scene():
        group = Group(4)
        honest, liar = group[:3], group[3]
        await asyncio.sleep(1.0)
        calls = [asyncio.ensure_future(m.average(np.full(2, 4.0), grace=3.0)) for m in honest]
        for _ in range(400):
            for member in honest:
                liar.presence.send_queue.control(member.id, Call("", 0, False, plan_(2), ()))
            await asyncio.sleep(0.03)
            for member in honest:
                liar.presence.send_queue.control(member.id, NextNumber("", 1, True))
            await asyncio.sleep(0.01)
        for call in calls:
            assert call.done() and set(call.result()[0].outcome.contributors) == {m.id for m in honest}

    play(scene)


def test_withdrawn_operations_are_not_retained():
    async def scene():
        group = Group(2)
        await asyncio.sleep(0.5)
        for turn in range(3 * AT_ONCE):
            group[0].begin(np.ones(2), name=str(turn % 7), least=2)[0].withdraw()
            await asyncio.sleep(0)
            held, most = group[0].operations.sizes()["operations"]
            assert held <= 2 and held <= most
        for ended, _ in await together(group, [np.ones(2)] * 2, name="1", least=2):
            assert len(ended.outcome.contributors) == 2

    play(scene)


@pytest.mark.parametrize("pause", [-1.0, 0.0, 0.005, 0.011, 0.021, 0.031, 3.0])
def test_caller_that_gave_up_many_operations_is_found_in_the_next(pause):
    """In spite of messages in transit."""

    async def scene():
        group, calls = Group(3), []
        await asyncio.sleep(0.5)

        def call(member):
            calls.append(asyncio.ensure_future(member.average(np.ones(2), op="sum", least=3, grace=20.0)))

        given_up = [group[0].begin(np.ones(2), op="sum", least=3)[0] for _ in range(20)]
        call(group[1])
        if pause < 0:
            call(group[0])
        await asyncio.sleep(0.015)  # these two have each other's first call
        for operation in given_up:
            operation.withdraw()
        if pause >= 0:
            await asyncio.sleep(pause)
            call(group[0])
        await asyncio.sleep(0.1)
        call(group[2])
        for ended, out in await asyncio.gather(*calls):
            assert len(ended.outcome.contributors) == 3 and out[0] == 3.0

    play(scene)


def test_repeated_attempts_finally_succeed():
    async def scene():
        group = Group(2)
        await asyncio.sleep(0.5)

        async def attempts(member, pause):
            await asyncio.sleep(pause)
            for attempt in range(8):
                ended, _ = await member.average(np.ones(2), least=2, grace=3.0)
                if not ended.failure:
                    return attempt
            return 8

        assert max(await asyncio.gather(attempts(group[0], 0.0), attempts(group[1], 7.5))) < 8

    play(scene)


@pytest.mark.parametrize("wait", [0.0, 40.0])
@pytest.mark.parametrize(
    ("sides", "counts"), [((2, 2), (4, 1)), ((1, 3), (4, 1)), ((3, 1), (4, 1)), ((1, 1), (0, 3)), ((2, 3), (1, 3))]
)
def test_peers_meet_after_partition_with_separate_numbering(sides, counts, wait):
    async def scene():
        group = Group(sum(sides))
        await together(group, [np.ones(2)] * len(group), op="sum")
        parts = [group[: sides[0]], group[sides[0] :]]
        ids = [[member.id for member in part] for part in parts]
        group.net.partition(ids)

        async def alone(part, count):
            for _ in range(count):
                results = await together(part, [np.ones(2)] * len(part), op="sum", grace=1.0)
                assert all(len(ended.outcome.contributors) == len(part) for ended, _ in results)

        await asyncio.gather(*(alone(part, count) for part, count in zip(parts, counts, strict=True)))
        group.net.partition(ids, end=True)
        await asyncio.sleep(10.0 + wait)

        async def loop(member, value):
            for _ in range(1 + max(counts)):  # a late peer may get averages that the others made before
                ended, out = await member.average(np.full(2, value), op="sum", grace=5.0)
                assert not ended.failure
                if len(ended.outcome.contributors) == len(group):
                    return float(out[0])
            return 0.0

        values = [2.0**i for i in range(len(group))]
        met = await asyncio.gather(*(loop(member, value) for member, value in zip(group, values, strict=True)))
        assert met == [sum(values)] * len(group)

    play(scene)


def test_withdrawn_operation_counts_contributions_it_holds():
    async def scene():
        group = Group(3)
        await asyncio.sleep(0.5)
        begun = [member.begin(np.ones(500_000))[0] for member in group]
        while not any(operation.nbytes > 4_000_000 for operation in begun):
            await asyncio.sleep(0.001)
        first = max(begun, key=lambda operation: operation.nbytes)
        first.withdraw()
        assert first.ended.done() and first.nbytes >= 4_000_000 + first.current.nbytes > 4_000_000

    play(scene)
