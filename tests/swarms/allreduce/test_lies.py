"""Averages outside of training rounds: false signatures, groups and numbers of a liar."""

import asyncio
import re

import numpy as np
import pytest
from kit.averages import Group, fail, plan_, play, together
from thinwire.collectives.allreduce.element_arithmetic import EXACT
from thinwire.collectives.allreduce.service import MAX_NUMBER
from thinwire.collectives.allreduce.signature import plan_of
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.messages.registry import Call, NextNumber


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"op": "sum"}, "op: peer .* has 'sum', here it is 'mean'"),
        ({"array": np.zeros((3, 5))}, r"shape of tensor number 0: peer .* has 3×5, here it is 3×4"),
        ({"array": np.zeros((3, 4), np.float32)}, "element type: peer .* has 'float32', here it is 'float64'"),
        ({"least": 2}, "least number of peers: peer .* has 2, here it is 1"),
        ({"array": np.zeros(12)}, "shape of tensor number 0: peer .* has 12, here it is 3×4"),
    ],
)
def test_caller_with_different_signature_is_told_at_once_and_left_out(other, says):
    async def scene():
        group, began = Group(4), virtual_loop.current().time()
        arrays = [np.full((3, 4), float(i)) for i in range(4)]
        calls = [asyncio.ensure_future(group[i].average(arrays[i])) for i in (0, 2)]
        await asyncio.sleep(1.0)
        alien, _ = await group[1].average(**{"array": arrays[1], **other})
        assert virtual_loop.current().time() < began + 1.5
        backwards = says.split("here it is")[0].split("has")[0]
        assert re.search(backwards, alien.failure)
        calls.append(asyncio.ensure_future(group[3].average(arrays[3])))
        for ended, out in await asyncio.gather(*calls):
            assert virtual_loop.current().time() < began + 2.0
            np.testing.assert_array_equal(out, np.full((3, 4), 5 / 3))
            assert ended.missing.keys() == {group[1].id}
            assert re.search(says, ended.missing[group[1].id])
        for i in range(4):
            np.testing.assert_array_equal(arrays[i], np.full((3, 4), float(i)))
        results = await together(group, arrays)  # the next call is correct again
        assert all(len(ended.outcome.contributors) == 4 for ended, _ in results)

    play(scene)


@pytest.mark.parametrize("ops", [("sum", "mean"), ("sum", "sum", "mean", "mean"), ("sum", "mean", "max")])
def test_callers_without_majority_signature_all_fail_at_once(ops):
    async def scene():
        group, began = Group(len(ops)), virtual_loop.current().time()
        calls = [m.average(np.ones(2), op=op) for m, op in zip(group, ops, strict=True)]
        for ended, _ in await asyncio.gather(*calls):
            assert re.search("op: peer .* has '.*', here it is '", ended.failure)
        assert virtual_loop.current().time() < began + 1.0
        results = await together(group, [np.ones(2)] * len(group))
        assert all(len(ended.outcome.contributors) == len(group) for ended, _ in results)

    play(scene)


@pytest.mark.parametrize("early", [False, True])
def test_invented_signature_of_one_liar_fails_nobody(early):
    async def scene():
        group = Group(4)
        honest, liar = group[:3], group[3]
        await asyncio.sleep(1.0)
        wrong = Call("", 0, False, plan_of("su\x1bm", "float64", EXACT, 1, [("", (2,))]), ())
        calls = [] if early else [asyncio.ensure_future(m.average(np.full(2, 4.0))) for m in honest]
        for member in honest:
            liar.presence.send_queue.control(member.id, wrong)
        await asyncio.sleep(0.2 if early else 0.001)
        calls = calls or [asyncio.ensure_future(m.average(np.full(2, 4.0))) for m in honest]
        for ended, _ in await asyncio.gather(*calls):
            assert set(ended.outcome.contributors) == {m.id for m in honest}
            assert r"'su\x1bm'" in ended.missing[liar.id]

    play(scene)


@pytest.mark.parametrize("finished", [0, 2])
@pytest.mark.parametrize("wait", [0.0, 3.0])
def test_liar_that_says_a_number_is_over_moves_nobody(finished, wait):
    async def scene():
        group = Group(4)
        honest, liar = group[:3], group[3]
        await asyncio.sleep(1.0)
        for _ in range(finished):
            await together(group, [np.ones(2)] * 4)
        calls = [asyncio.ensure_future(m.average(np.full(2, 4.0))) for m in honest]
        for i, member in enumerate(honest):
            liar.presence.send_queue.control(member.id, NextNumber("", 2**31 - 1 - i, False))
        for ended, _ in await asyncio.gather(*calls):
            assert set(ended.outcome.contributors) == {m.id for m in honest}
        await asyncio.sleep(wait)
        for ended, _ in await together(honest, [np.ones(2)] * 3, grace=1.0):
            assert set(ended.outcome.contributors) == {m.id for m in honest}

    play(scene)


def test_member_waits_rather_than_believe_one_false_number():
    async def scene():
        group = Group(4)
        await together(group, [np.ones(2)] * 4)
        call = asyncio.ensure_future(group[0].average(np.ones(2), grace=4.0, least=2))
        await asyncio.sleep(1.0)
        group[3].presence.send_queue.control(group[0].id, NextNumber("", 1000, False))
        await asyncio.sleep(2.5)
        results = await together(group[1:3], [np.ones(2)] * 2, grace=1.0, least=2)
        results.append(await call)
        assert {len(ended.outcome.contributors) for ended, _ in results} == {3}

    play(scene)


def says(liar, peer, group):
    named = tuple(group) if isinstance(group, list) else tuple(sorted(group))
    liar.presence.send_queue.control(peer.id, Call("", 0, False, plan_(2), named))


STRANGERS = [bytes([255 - i]) * 32 for i in range(5)]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    "lie",
    ["alone", "in pairs", "with strangers", "with all", "without itself", "one by one", "itself twice", "backwards"],
)
def test_invented_group_of_one_liar_does_not_bind_the_others(lie, early):
    async def scene():
        group = Group(4)
        honest, liar = group[:3], group[3]
        await asyncio.sleep(1.0)

        def tell():
            for peer in honest:
                ids = {p.id for p in honest}
                said = {
                    "alone": [{liar.id}],
                    "in pairs": [{liar.id, peer.id}],
                    "with strangers": [{liar.id, peer.id, *(s[: len(peer.id)] for s in STRANGERS)}],
                    "with all": [{liar.id, *ids, *(s[: len(peer.id)] for s in STRANGERS)}],
                    "without itself": [{peer.id}],
                    "one by one": [{liar.id, one} for one in ids],
                    "itself twice": [[liar.id, liar.id], sorted([*ids, liar.id, liar.id])],
                    "backwards": [sorted([*ids, liar.id], reverse=True)],
                }[lie]
                for named in said:
                    says(liar, peer, named)

        if early:
            tell()
            await asyncio.sleep(0.2)
        calls = [asyncio.ensure_future(m.average(np.full(2, float(i)))) for i, m in enumerate(honest)]
        await asyncio.sleep(0.001)
        if not early:
            tell()
        for ended, out in await asyncio.gather(*calls):
            assert set(ended.outcome.contributors) == {m.id for m in honest}
            np.testing.assert_array_equal(out, [1.0, 1.0])
            assert set(ended.missing) == {liar.id}

    play(scene)


def test_liar_about_numbers_does_not_keep_two_peers_apart():
    async def scene():
        group = Group(3)
        ahead, behind, liar = group
        await asyncio.sleep(0.5)
        await fail(ahead, 3, 2)
        calls = [
            asyncio.ensure_future(m.average(np.full(2, 2.0), least=2, grace=10.0, op="sum")) for m in (ahead, behind)
        ]
        for _ in range(90):
            await asyncio.sleep(0.1)
            for peer, other in ((ahead, behind), (behind, ahead)):
                number = min((o.number for o in other.operations.running()), default=0)
                liar.presence.send_queue.control(peer.id, NextNumber("", number, False))
        for ended, out in await asyncio.gather(*calls):
            assert set(ended.outcome.contributors) == {ahead.id, behind.id} and out[0] == 4.0

    play(scene)


def test_caller_with_other_codec_is_told():
    async def scene():
        group = Group(3)
        arrays = [np.full(9, float(i), np.float32) for i in range(3)]
        codecs = (EXACT, "fp16", EXACT)
        calls = [m.average(a, codec=c) for m, a, c in zip(group, arrays, codecs, strict=True)]
        (one, _), (alien, _), (two, _) = await asyncio.gather(*calls)
        assert re.search("codec: peer .* has 'exact', here it is 'fp16'", alien.failure)
        for ended in (one, two):
            assert re.search("codec: peer .* has 'fp16', here it is 'exact'", ended.missing[group[1].id])

    play(scene)


def test_lie_about_last_number_leaves_name_usable():
    async def scene():
        group = Group(3)
        one = np.ones(4, np.float32)
        await asyncio.sleep(1)
        call = asyncio.ensure_future(group[0].average(one, grace=4.0))
        for _ in range(8):
            await asyncio.sleep(0.5)
            group[2].presence.send_queue.control(group[0].id, NextNumber("", MAX_NUMBER - 1, False))
        await call
        group[2].kill()
        await asyncio.sleep(20)
        for _ in range(2):
            ends = await together(group[:2], [one, one], grace=5.0)
            await asyncio.sleep(5)
        assert [len(ended.outcome.contributors) for ended, _ in ends] == [2, 2]

    play(scene)
