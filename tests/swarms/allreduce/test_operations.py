"""Averages outside of training rounds, in virtual time: peers, links, deaths and late callers."""

import asyncio
import random
import re
from contextlib import nullcontext

import blake3
import numpy as np
import pytest
from thinwire.collectives.allreduce.element_arithmetic import EXACT, ElementError, elements, narrowed, numpy_type
from thinwire.collectives.allreduce.group_round import MAX_CALL_WEIGHT
from thinwire.collectives.allreduce.service import AT_ONCE, LAST, AllreduceService, LocalPart, PeerContext
from thinwire.collectives.allreduce.signature import plan_of
from thinwire.collectives.topology.shards import grid
from thinwire.compression.registry import dense
from thinwire.node.membership.presence import Family, Presence
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network.network import SimNet
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.membership.presets import LOCAL
from thinwire.swarm.membership.roster import Roster
from thinwire.swarm.messages.registry import Call, Over, Welcome

RUN = bytes(range(32))


class Member:
    """Peer with links and a roster, without training."""

    def __init__(self, net, index, life=0, address=""):
        self.identity = Identity.generate(bytes([index]) * 32)
        self.id, self.net, loop = self.identity.peer_id, net, virtual_loop.current()
        self.link = (0, 0)
        address = address or f"10.0.0.{index}:7000"
        self.transport = net.transport(self.identity, RUN, self._admit, address)
        sequence = 1 + int(loop.time() * 1000)
        self.record = PeerRecord.create(
            self.identity, run_id=RUN, addresses=(address,), sequence=sequence, issued=net.wall()
        )
        self.transport.learn(self.record)
        rng = random.Random(100 * index + life)
        self.roster = Roster(
            self.identity, self.record, run_id=RUN, preset=LOCAL, rng=rng, now=loop.time(), wall=net.wall
        )
        self.presence = Presence(self.transport, self.roster, now=loop.time, emit=lambda kind, fields: None)
        gone = set()
        place = PeerContext(
            self.identity,
            RUN,
            self.presence.send_queue,
            loop.time,
            self.presence.live,
            gone,
            lambda: self.roster.view.peers,
            lambda peer: record.public_key if (record := self.roster.record_of(peer)) else None,
            sequence,
            lambda: self.link,
        )
        self.operations = AllreduceService(place, gone=gone, patience=1.0)
        self.presence.attach(Family.OPERATIONS, self.operations)
        self.task = loop.create_task(self.presence.run())

    def _admit(self, hello, record):
        self.roster.learn(record, virtual_loop.current().time())
        return Welcome(self.record.wire, b"", bytes(32), bytes(64), (), "", "", bytes(32))

    def begin(self, array, *, name="", op="mean", codec=EXACT, element="", least=1, weight=1, grace=5.0):
        element = element or str(array.dtype)
        parts = elements(element, op, codec, dense)
        cut = grid(array.size, parts)
        flat = array.reshape(-1)
        payloads = [parts.encode(flat[slice(*cut.span(i))]) for i in range(len(cut))]
        hashes = b"".join(blake3.blake3(payload).digest() for payload in payloads)
        share = LocalPart(payloads, hashes, weight, cut, parts)
        plan = plan_of(op, element, codec, least, [("", array.shape)])
        return self.operations.begin(name, plan, share, grace=grace), array

    async def average(self, array, **options):
        operation, array = self.begin(array, **options)
        ended = await operation.wait()
        if ended.failure:
            return ended, None
        out = np.empty(array.size, numpy_type(options.get("element") or str(array.dtype)))
        for i, payload in enumerate(ended.outcome.results):
            operation._share.elements.decode(payload, out[slice(*operation._share.grid.span(i))])
        return ended, out.reshape(array.shape)

    def kill(self):
        self.net.kill(self.id)
        self.task.cancel()


def enrol(group, known):
    """Add a member that the members at these indices know, and that knows them."""
    newcomer = Member(group.net, len(group))
    for index in known:
        for one, other in ((group[index], newcomer), (newcomer, group[index])):
            one.roster.learn(other.record, virtual_loop.current().time())
            one.transport.learn(other.record)
    group.append(newcomer)


class Group(list):
    def __init__(self, count, seed=3, **options):
        self.net = SimNet(seed, latency=0.01, bandwidth=50e6, **options)
        super().__init__(Member(self.net, index) for index in range(count))
        for member in self:
            self.acquaint(member)

    def acquaint(self, member):
        for other in self:
            if other is not member:
                member.roster.learn(other.record, virtual_loop.current().time())
                member.transport.learn(other.record)


def play(scene, seed=1):
    return virtual_loop.run(scene(), seed=seed)


def together(members, arrays, **options):
    return asyncio.gather(*(member.average(array, **options) for member, array in zip(members, arrays, strict=True)))


SIZES = (0, 1, 2, 3, 41, 4096, 203_530)


@pytest.mark.parametrize("size", SIZES)
def test_integer_sums_are_exact_and_equal_on_all_peers(size):
    async def scene():
        group = Group(3)
        arrays = [np.random.default_rng(i).integers(-(2**40), 2**40, size) for i in range(3)]
        before = [array.copy() for array in arrays]
        results = await together(group, arrays, op="sum")
        for (ended, out), array, old in zip(results, arrays, before, strict=True):
            assert len(ended.outcome.contributors) == 3 and not ended.missing
            np.testing.assert_array_equal(out, sum(arrays))
            np.testing.assert_array_equal(array, old)

    play(scene)


TOLERANCE = {"float64": 1e-15, "float32": 1e-7, "float16": 1e-3, "bfloat16": 8e-3}


def bfloat(values):
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("op", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("element", ["float64", "float32", "float16", "bfloat16", "int32", "uint8", "bool"])
def test_every_op_gives_the_right_result_for_every_type(element, op):
    async def scene():
        group = Group(3)
        arrays = [np.random.default_rng(i).uniform(-9, 9, (7, 601)) for i in range(3)]
        if element == "bfloat16":
            arrays = [bfloat(array) for array in arrays]
            true = [(array.astype(np.uint32) << 16).view(np.float32) for array in arrays]
        elif element == "bool":
            true = arrays = [array > 0 for array in arrays]
        else:
            true = arrays = [(array + 9).astype(element) for array in arrays]
        wide = np.stack(true).astype(np.float64)
        exact = {"mean": wide.mean(0), "sum": wide.sum(0), "min": wide.min(0), "max": wide.max(0)}[op]
        results = await together(group, arrays, op=op, element=element)
        for ended, out in results:
            assert not ended.failure
            np.testing.assert_array_equal(out, results[0][1])
            seen = (out.astype(np.uint32) << 16).view(np.float32) if element == "bfloat16" else out
            if element in TOLERANCE:
                np.testing.assert_allclose(seen, exact, rtol=TOLERANCE[element])
            else:
                np.testing.assert_array_equal(seen, exact)

    if (element, op) in [("int32", "mean"), ("uint8", "mean"), ("bool", "mean"), ("bool", "sum")]:
        with pytest.raises(ElementError, match=f"op='{op}' is not supported for ({element}|bool)"):
            play(scene)
    else:
        play(scene)


@pytest.mark.parametrize(("element", "codec", "reason"), [
    ("complex64", EXACT, "complex64"), ("int64", "int8", "int64 only supports"), ("float64", "fp16", "float64 only supports"),
    ("float32", "int7", "int7"), ("float32", "topk", "topk"),
])  # fmt: skip
def test_unknown_element_type_or_codec_is_named(element, codec, reason):
    with pytest.raises(ValueError, match=reason):
        elements(element, "sum", codec, dense)
    with pytest.raises(ValueError, match="'product'"):
        elements("float32", "product", EXACT, dense)


@pytest.mark.parametrize("op", ["mean", "sum", "max"])
def test_lossy_codec_gives_the_same_result_on_all_peers(op):
    async def scene():
        group = Group(3)
        arrays = [np.random.default_rng(i).standard_normal(9001).astype(np.float32) for i in range(3)]
        wide = np.stack(arrays)
        exact = {"mean": wide.mean(0), "sum": wide.sum(0), "max": wide.max(0)}[op]
        results = await together(group, arrays, op=op, codec="int8(block=64)")
        for _, out in results:
            np.testing.assert_array_equal(out, results[0][1])
            np.testing.assert_allclose(out, exact, atol=0.15)
        assert not np.array_equal(results[0][1], exact)

    play(scene)


def test_bfloat16_result_is_rounded_once():
    def bits(value):
        return narrowed(np.array([value], np.float64), "bfloat16").tolist()[0]

    # In float32 these values are halfway between two bfloat16 already, so the nearer one is undefined.
    assert [bits(1 + 2.0**-8 + 2.0**-40), bits(-1 - 2.0**-8 - 2.0**-40)] == [0x3F81, 0xBF81]
    assert [bits(1 + 3 * 2.0**-8 - 2.0**-40), bits(1 + 2.0**-8), bits(1 + 3 * 2.0**-8)] == [0x3F81, 0x3F80, 0x3F82]
    assert [bits(1e300), bits(-1e300), bits(np.inf), bits(1e-300), bits(-0.0)] == [0x7F80, 0xFF80, 0x7F80, 0, 0x8000]
    assert bits(np.nan) & 0x7FC0 == 0x7FC0
    rng = np.random.default_rng(1)
    values = rng.standard_normal(20_000) * 2.0 ** rng.integers(-140, 130, 20_000)
    made = (narrowed(values, "bfloat16").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    steps = np.spacing(np.abs(made).astype(np.float32)).astype(np.float64) * 2**16
    finite = np.isfinite(made)
    assert finite.mean() > 0.9 and (np.abs(made - values)[finite] <= steps[finite] / 2).all()


def test_values_of_any_size_and_non_finite_values_pass():
    async def scene():
        group = Group(3)
        arrays = [np.array([1e-9 * 1e9**i, i, i], np.float32) for i in range(3)]
        arrays[1][1], arrays[2][2] = np.nan, np.inf
        for ended, out in await together(group, arrays, op="sum"):
            assert len(ended.outcome.contributors) == 3
            np.testing.assert_array_equal(out, np.array([1e9 + 1, np.nan, np.inf], np.float32))

    play(scene)


def test_mean_is_weighted():
    async def scene():
        group = Group(3)
        calls = [
            m.average(np.array([float(i)]), weight=w) for i, (m, w) in enumerate(zip(group, (1, 2, 5), strict=True))
        ]
        for _, out in await asyncio.gather(*calls):
            assert out[0] == 12 / 8

    play(scene)


@pytest.mark.parametrize("slow", [None, 0, 2])
def test_chunk_ownership_follows_link_speeds(slow):
    async def scene():
        group = Group(4)
        for index, member in enumerate(group):
            member.link = (0, 0) if slow is None else (10**5, 10**5) if index == slow else (10**7, 10**7)
        arrays = [np.random.default_rng(i).integers(-(2**40), 2**40, 150_000) for i in range(4)]
        begun = [member.begin(array, op="sum")[0] for member, array in zip(group, arrays, strict=True)]
        for ended in await asyncio.gather(*(operation.wait() for operation in begun)):
            results = [np.frombuffer(chunk, np.int64) for chunk in ended.outcome.results]
            np.testing.assert_array_equal(np.concatenate(results), sum(arrays))
        owners = [operation.fly.exchange.owners for operation in begun]
        assert len(set(owners)) == 1 and len(owners[0]) > 4
        assert set(owners[0]) == {member.id for index, member in enumerate(group) if index != slow}

    play(scene)


def test_lone_caller_gets_its_own_values():
    async def scene():
        ended, out = await Group(1)[0].average(np.array([3.5]))
        assert out[0] == 3.5 and len(ended.outcome.contributors) == 1

    play(scene)


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
            liar.presence.send_queue.control(member.id, Over("", 2**31 - 1 - i, False))
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
        group[3].presence.send_queue.control(group[0].id, Over("", 1000, False))
        await asyncio.sleep(2.5)
        results = await together(group[1:3], [np.ones(2)] * 2, grace=1.0, least=2)
        results.append(await call)
        assert {len(ended.outcome.contributors) for ended, _ in results} == {3}

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


def plan_(length):
    return plan_of("mean", "float64", EXACT, 1, [("", (length,))])


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


def test_error_in_one_operation_ends_only_that_operation(caplog):
    async def scene():
        group = Group(2)
        await asyncio.sleep(1.0)
        bad, _ = group[0].begin(np.ones(2), name="bad", weight=np.int64(2), least=2)
        other = asyncio.ensure_future(group[1].average(np.ones(2), name="bad", least=2))
        assert "internal error: TypeError" in (await bad.wait()).failure
        other.cancel()
        with pytest.raises(UnicodeEncodeError):
            group[0].begin(np.ones(2), name="\ud800")
        assert not group[0].operations.sizes()["names"][0] > 1
        await asyncio.sleep(1.0)
        for ended, _ in await together(group, [np.ones(2)] * 2, name="good", least=2):
            assert len(ended.outcome.contributors) == 2

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


async def fail(member, times, least):
    """Make this number of calls that fail: each uses a number that no other peer has."""
    for _ in range(times):
        operation, _ = member.begin(np.ones(2), op="sum", least=least, grace=0.2)
        await asyncio.sleep(0.1 if least == 1 else 0.3)  # a single caller would be enough
        operation.withdraw()
        assert operation.ended.result().failure


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
                liar.presence.send_queue.control(member.id, Over("", 1, True))
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
                number = min((o.number for o in other.operations._running()), default=0)
                liar.presence.send_queue.control(peer.id, Over("", number, False))
        for ended, out in await asyncio.gather(*calls):
            assert set(ended.outcome.contributors) == {ahead.id, behind.id} and out[0] == 4.0

    play(scene)


def test_weight_above_the_bound_is_capped():
    async def scene():
        group = Group(3)
        weights = (1, MAX_CALL_WEIGHT, 2**53 - 1)
        calls = [m.average(np.array([float(i)]), weight=w) for i, (m, w) in enumerate(zip(group, weights, strict=True))]
        for _, out in await asyncio.gather(*calls):
            assert out[0] == 3 * MAX_CALL_WEIGHT / (1 + 2 * MAX_CALL_WEIGHT)

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
        held = first.fly.exchange._contributions
        assert first.ended.done() and len(held) and first.nbytes >= 4_000_000 + held.nbytes > 4_000_000

    play(scene)


# --- faults of other libraries' collectives (docs/scenarios.md has the list); inputs 2^rank show the contributors of
# each sum


def is_sum_of_those_named(members, ended, out):
    """Return True if the value is the sum of the named contributors, or lacks only missing ones."""
    inside = set(ended.outcome.contributors)
    assert not ended.failure and not inside & ended.missing.keys()
    assert out[0] == sum(2.0**i for i, member in enumerate(members) if member.id in inside)
    return inside


SMALL = (0, 1, 2, 3, 41, 1009)


@pytest.mark.parametrize("sizes", [SMALL, pytest.param((4096, 203_530), marks=pytest.mark.trial)])
@pytest.mark.parametrize("element", ["float64", "float32", "float16", "bfloat16", "int64", "int8", "bool"])
def test_every_size_type_and_op_gives_exact_result(element, sizes):
    """Fewer elements than peers, a prime, and none: all at once, each with a separate name."""
    ops = ["min", "max"] if element == "bool" else ["sum", "min", "max"] + ["mean"] * (element not in ("int64", "int8"))

    async def scene():
        group = Group(3)
        await asyncio.sleep(0.5)
        for op in ops:
            drawn = [[np.random.default_rng(10 * size + i).integers(0, 30, size) for i in range(3)] for size in sizes]
            given = [[bfloat(a) if element == "bfloat16" else a.astype(element) for a in arrays] for arrays in drawn]
            calls = [
                group[i].average(arrays[i], name=f"{op} {len(arrays[0])}", op=op, element=element)
                for arrays in given
                for i in range(3)
            ]
            results = await asyncio.gather(*calls)
            for at, arrays in enumerate(drawn):
                values = np.stack(arrays).astype(bool if element == "bool" else np.float64)
                exact = {"sum": np.sum, "min": np.min, "max": np.max, "mean": np.mean}[op](values, axis=0)
                for ended, out in results[3 * at : 3 * at + 3]:
                    assert len(ended.outcome.contributors) == 3 and out.shape == arrays[0].shape
                    np.testing.assert_array_equal(out, results[3 * at][1])
                    seen = (out.astype(np.uint32) << 16).view(np.float32) if element == "bfloat16" else out
                    np.testing.assert_allclose(seen.astype(float), exact.astype(float), rtol=TOLERANCE.get(element, 0))

    play(scene)


LATER = pytest.mark.trial


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
            for operation, ended in zip(begun, ends, strict=True):
                out = np.empty(size)
                operation._share.elements.decode(ended.outcome.results[0], out[slice(*operation._share.grid.span(0))])
                is_sum_of_those_named(group, ended, out)
        assert whole
        assert all(set(member.roster.view.peers) == everybody for member in group)  # no peer is excluded from the swarm

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


@pytest.mark.parametrize(
    "seconds",
    [pytest.param(20.0, marks=LATER), pytest.param(3600.0, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])],
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

    play(scene)


SEEDS = [0, pytest.param(1, marks=LATER)]
SEEDS += [pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 200)]
"""Seeds of each of the scenes below, where the seed draws peers, times, counts and sizes."""


async def rejoin(group, tries=60):
    """Let each peer call until a result has all; a peer that was away first gets the results that it missed."""

    async def loop(member, value):
        for _ in range(tries):
            ended, out = await member.average(np.full(2, value), op="sum", grace=5.0)
            if len(is_sum_of_those_named(group, ended, out)) == len(group):
                return
        raise AssertionError(f"never with all {len(group)} in {tries} averages")

    await asyncio.gather(*(loop(member, 2.0**i) for i, member in enumerate(group)))


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


@pytest.mark.parametrize("seed", SEEDS)
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
            group[2].presence.send_queue.control(group[0].id, Over("", LAST - 1, False))
        await call
        group[2].kill()
        await asyncio.sleep(20)
        for _ in range(2):
            ends = await together(group[:2], [one, one], grace=5.0)
            await asyncio.sleep(5)
        assert [len(ended.outcome.contributors) for ended, _ in ends] == [2, 2]

    play(scene)
