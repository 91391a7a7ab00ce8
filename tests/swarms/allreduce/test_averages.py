"""Averages outside of training rounds: values, types, codecs and weights."""

import asyncio

import numpy as np
import pytest
from kit.averages import Group, play, together
from thinwire.collectives.allreduce.element_arithmetic import EXACT, ElementError, elements, narrowed
from thinwire.collectives.allreduce.group_round import MAX_CALL_WEIGHT
from thinwire.compression.registry import dense

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
        owners = [operation.current.data_plane.owners for operation in begun]
        assert len(set(owners)) == 1 and len(owners[0]) > 4
        assert set(owners[0]) == {member.id for index, member in enumerate(group) if index != slow}

    play(scene)


def test_lone_caller_gets_its_own_values():
    async def scene():
        ended, out = await Group(1)[0].average(np.array([3.5]))
        assert out[0] == 3.5 and len(ended.outcome.contributors) == 1

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


def test_weight_above_the_bound_is_capped():
    async def scene():
        group = Group(3)
        weights = (1, MAX_CALL_WEIGHT, 2**53 - 1)
        calls = [m.average(np.array([float(i)]), weight=w) for i, (m, w) in enumerate(zip(group, weights, strict=True))]
        for _, out in await asyncio.gather(*calls):
            assert out[0] == 3 * MAX_CALL_WEIGHT / (1 + 2 * MAX_CALL_WEIGHT)

    play(scene)


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
