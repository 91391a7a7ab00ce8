"""Averages outside of training rounds: late callers, graces and links."""

import asyncio
import random

import numpy as np
import pytest
from kit.averages import LATER, Group, Member, is_sum_of_those_named, play, rejoin, seeds, together
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.messages.registry import Ask, Call


def test_late_caller_gets_result_without_contributing():
    async def scene():
        group = Group(3)
        first = await together(group[:2], [np.full(9, 1.0), np.full(9, 3.0)], grace=0.5)
        late, out = await group[2].average(np.full(9, 100.0))
        assert [ended.missing for ended, _ in first] == [{group[2].id: "has not called"}] * 2
        np.testing.assert_array_equal(out, np.full(9, 2.0))
        assert set(late.outcome.contributors) == {group[0].id, group[1].id}
        assert group[2].id in late.missing

    play(scene)


def test_peer_that_changes_its_group_asks_for_the_data_again(monkeypatch):
    """It may return to a group that it had left, without the data that it had received there."""

    async def scene():
        group = Group(5)
        await asyncio.sleep(1.0)
        operation, _ = group[0].begin(np.full(2, 1.0))
        sent, queue = [], group[0].presence.send_queue
        monkeypatch.setattr(queue, "control", lambda to, message: sent.append((to, message)))
        for count in (4, 5):
            members = tuple(sorted(member.id for member in group[:count]))
            for member in group[1:4]:
                operation.on_call(member.id, Call("", operation.number, False, operation.plan, members))
            assert operation.group == members
        found = [message for to, message in sent if to == group[1].id and isinstance(message, Ask)]
        assert found == [Ask(*operation.key, again=True)]
        operation.withdraw()

    play(scene)


@pytest.mark.parametrize("ahead", [0.0, 0.1, 3.0])
def test_caller_without_grace_begins_alone_and_others_still_wait(ahead):
    async def scene():
        group = Group(4)
        await asyncio.sleep(1.0)
        hasty = asyncio.ensure_future(group[3].average(np.full(2, 9.0), grace=0.0))
        await asyncio.sleep(ahead)
        results = await together(group[:3], [np.full(2, float(i)) for i in range(3)], grace=30.0)
        for ended, out in results:
            assert set(ended.outcome.contributors) == {m.id for m in group[:3]}
            np.testing.assert_array_equal(out, [1.0, 1.0])
            assert ended.missing == {group[3].id: "began without us"}
        assert set((await hasty)[0].outcome.contributors) == {group[3].id}

    play(scene)


def test_caller_with_long_grace_starts_with_the_majority():
    async def scene():
        group = Group(5)
        await asyncio.sleep(1.0)
        graces = (2.0, 2.0, 2.0, 60.0)
        calls = [
            m.average(np.full(2, float(i)), grace=g) for i, (m, g) in enumerate(zip(group[:4], graces, strict=True))
        ]
        results = await asyncio.gather(*calls)
        assert {ended.outcome.contributors for ended, _ in results} == {tuple(sorted(m.id for m in group[:4]))}
        assert virtual_loop.current().time() < 20.0

    play(scene)


@pytest.mark.parametrize("delay", [0.0, 0.03])
def test_peer_stopped_for_a_minute_delays_nobody(delay):
    async def scene():
        group = Group(4)
        await asyncio.sleep(1.0)
        calls = [
            asyncio.ensure_future(member.average(np.full(30_000, 2.0**i), op="sum", grace=5.0))
            for i, member in enumerate(group)
        ]
        await asyncio.sleep(delay)
        group.net.pause(group[3].id)
        began, others = virtual_loop.current().time(), {member.id for member in group[:3]}
        for call in calls[:3]:
            assert is_sum_of_those_named(group, *await call) >= others
        assert virtual_loop.current().time() < began + 20.0
        for _ in range(2):
            for ended, out in await together(group[:3], [np.full(2, 2.0**i) for i in range(3)], op="sum", grace=1.0):
                assert is_sum_of_those_named(group, ended, out) == others
        await asyncio.sleep(max(0.0, began + 60.0 - virtual_loop.current().time()))
        group.net.resume(group[3].id)
        ended, out = await calls[3]  # its result is correct, or an error
        assert ended.failure or is_sum_of_those_named(group, ended, out)
        await asyncio.sleep(5.0)
        for _ in range(4):  # it may first get results that it has missed
            results = await together(group, [np.full(2, 2.0**i) for i in range(4)], op="sum", grace=5.0)
            inside = [is_sum_of_those_named(group, ended, out) for ended, out in results]
        assert all(len(names) == 4 for names in inside)

    play(scene)


@pytest.mark.parametrize(("grace", "waits"), [(2.0, False), (8.0, True)])
def test_straggler_of_five_seconds_is_in_only_with_enough_grace(grace, waits):
    async def scene():
        group = Group(3)
        await asyncio.sleep(1.0)
        calls = [
            asyncio.ensure_future(member.average(np.full(2, 2.0**i), op="sum", grace=grace))
            for i, member in enumerate(group[:2])
        ]
        await asyncio.sleep(5.0)
        calls.append(asyncio.ensure_future(group[2].average(np.full(2, 4.0), op="sum", grace=grace)))
        for call in calls:
            assert len(is_sum_of_those_named(group, *await call)) == (3 if waits else 2)

    play(scene)


@pytest.mark.parametrize("callers", [2, 3])
def test_first_caller_waits_for_the_graces_of_the_others(callers):
    """Its own ends 12 patiences earlier. The others then still wait for an absent peer, so its round could not begin."""

    async def scene():
        group = Group(4)
        await asyncio.sleep(1.0)
        first = asyncio.ensure_future(group[0].average(np.full(2, 1.0), op="sum", grace=15.0))
        await asyncio.sleep(12.0)
        arrays = [np.full(2, 2.0**i) for i in range(1, callers)]
        results = await together(group[1:callers], arrays, op="sum", grace=15.0)
        for ended, out in (await first, *results):
            assert is_sum_of_those_named(group, ended, out) == {member.id for member in group[:callers]}
        assert virtual_loop.current().time() < 1.0 + 12.0 + 15.0 + 3.0

    play(scene)


@pytest.mark.parametrize("stalled", [0, 1])
def test_one_of_two_waits_for_the_other_that_stalls_after_its_call(stalled):
    """The first in the leader order is a quorum alone, and would return its own array after one patience."""

    async def scene():
        group = Group(2)
        await asyncio.sleep(1.0)
        arrays = [np.full(2, 2.0**i) for i in range(2)]
        calls = [asyncio.ensure_future(one.average(array, op="sum")) for one, array in zip(group, arrays, strict=True)]
        await asyncio.sleep(0.012)  # Each has the call of the other.
        group.net.pause(group[stalled].id)
        await asyncio.sleep(1.5)
        group.net.resume(group[stalled].id)
        for call in calls:
            assert len(is_sum_of_those_named(group, *await call)) == 2

    play(scene)


@pytest.mark.parametrize("count", [3, 5])
def test_two_peers_without_link_both_contribute(count):
    """If one of the two leads, the other cannot reach it: it is excluded, and gets the result nevertheless."""

    async def scene():
        group = Group(count)
        two, everybody = {group[0].id, group[1].id}, {member.id for member in group}
        group.net.cut(group[0].id, group[1].id)
        await asyncio.sleep(3.0)
        whole = 0
        for size in (2, 3, 4, 5, 50_000, 6):
            begun = [m.begin(np.full(size, 2.0**i), op="sum", grace=3.0)[0] for i, m in enumerate(group)]
            ends = [await operation.wait() for operation in begun]
            assert len({ended.outcome.contributors for ended in ends}) == 1
            inside = set(ends[0].outcome.contributors)
            assert inside >= everybody - two and inside & two
            whole += inside == everybody
            for member, operation, ended in zip(group, begun, ends, strict=True):
                out = np.empty(size)
                member.decode(operation, ended, out)
                is_sum_of_those_named(group, ended, out)
        assert whole
        assert all(
            set(member.roster.peers.view.peers) == everybody for member in group
        )  # no peer is excluded from the swarm

    play(scene)


def test_members_of_groups_beside_each_other_do_not_wait_for_each_other():
    """Four peers whose links are a ring begin several groups, none of which can finish; the next average has all."""

    async def scene():
        group = Group(4)
        await asyncio.sleep(1.0)
        for one, other in ((0, 2), (1, 3)):
            group.net.cut(group[one].id, group[other].id)
        calls = [
            asyncio.ensure_future(member.average(np.full(2, 2.0**i), op="sum", grace=1.0))
            for i, member in enumerate(group)
        ]
        await asyncio.sleep(4.0)
        for one, other in ((0, 2), (1, 3)):
            group.net.mend(group[one].id, group[other].id)
        for call in calls:
            is_sum_of_those_named(group, *await call)
        assert virtual_loop.current().time() < 1.0 + 4.0 + 4.0
        for ended, out in await together(group, [np.full(2, 2.0**i) for i in range(4)], op="sum"):
            assert len(is_sum_of_those_named(group, ended, out)) == 4

    play(scene)


def test_two_peers_behind_one_address_both_contribute():
    async def scene():
        group = Group(2)
        for index in (2, 3):
            group.append(Member(group.net, index, address=f"10.0.0.77:{7000 + index}"))
        for member in group:
            group.acquaint(member)
        await asyncio.sleep(1.0)
        arrays = [np.full(30_000, 2.0**i) for i in range(4)]
        for _ in range(2):
            for ended, out in await together(group, arrays, op="sum"):
                assert len(is_sum_of_those_named(group, ended, out)) == 4

    play(scene)


@pytest.mark.parametrize("deaths", [6, pytest.param(60, marks=LATER)])
def test_newcomers_killed_while_joining_disturb_nobody(deaths):
    """Killed 0 to 250 ms after their start, while the others average without a pause."""

    async def scene():
        group = Group(3)
        await asyncio.sleep(1.0)
        ids, over = {member.id for member in group}, False

        async def loop(member, value):
            while not over:
                ended, out = await member.average(np.full(2, value), op="sum", grace=0.5)
                assert is_sum_of_those_named(group, ended, out) >= ids

        tasks = [asyncio.ensure_future(loop(member, 2.0**i)) for i, member in enumerate(group)]
        for death in range(deaths):
            newcomer = Member(group.net, 10 + death)
            for member in group:
                for one, other in ((member, newcomer), (newcomer, member)):
                    one.roster.learn(other.record, virtual_loop.current().time())
                    one.transport.learn(other.record)
            call = asyncio.ensure_future(newcomer.average(np.full(2, 0.0), op="sum", grace=5.0))
            await asyncio.sleep(0.25 * death / deaths)
            newcomer.kill()
            call.cancel()
        over = True
        await asyncio.gather(*tasks)

    play(scene)


@pytest.mark.parametrize("seed", seeds(155))
def test_stragglers_are_in_if_and_only_if_within_grace(seed):
    """A caller is in the average if it comes well before the end of the grace, and out if well after.

    Late callers get an average too. The grace of each peer begins with its call, so that the last punctual one decides.
    """
    rng = random.Random(f"straggler/{seed}")

    async def scene():
        group = Group(rng.randint(3, 6), seed=seed)
        await asyncio.sleep(1.0)
        grace, size = rng.uniform(2.0, 8.0), rng.choice((2, 3_000, 60_000))
        slow = rng.sample(range(len(group)), rng.randint(1, len(group) - 1))
        delays = {i: rng.choice((rng.uniform(0.0, 0.4), rng.uniform(2.0, 3.0))) * grace for i in slow}

        async def call(i, member):
            await asyncio.sleep(delays.get(i, 0.0))
            return await member.average(np.full(size, 2.0**i), op="sum", grace=grace)

        results = await asyncio.gather(*(call(i, member) for i, member in enumerate(group)))
        punctual = {member.id for i, member in enumerate(group) if delays.get(i, 0.0) < grace}
        for i, (ended, out) in enumerate(results):
            inside = is_sum_of_those_named(group, ended, out)
            assert inside == punctual if group[i].id in punctual else inside
        await rejoin(group)

    play(scene, seed)
