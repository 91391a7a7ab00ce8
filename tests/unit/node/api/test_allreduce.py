"""Averages of user tensors in real swarms over loopback, and the accepted forms of tensors."""

import asyncio
import concurrent.futures
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import thinwire
import torch
from thinwire.collectives.allreduce.service import AT_ONCE
from thinwire.node.api.allreduce import Package, Pending, prepare
from torch import nn

MANIFEST = """
[run]
name = "mine"
rounds = 3
[model]
kind = "custom"
[outer]
sync_every = 2
[exchange]
codec = "fp32"
straggler_timeout = 0.5
"""


@pytest.fixture(scope="module")
def trio(tmp_path_factory):
    """Three peers of a run, in one process."""
    home = tmp_path_factory.mktemp("homes")
    (home / "run.toml").write_text(MANIFEST)
    with thinwire.join(home / "run.toml", home=home / "1", host="127.0.0.1") as first:
        with (
            thinwire.join(first.invite, home=home / "2", host="127.0.0.1") as second,
            thinwire.join(first.invite, home=home / "3", host="127.0.0.1") as third,
        ):
            swarms = (first, second, third)
            # A peer that does not know all others yet would form a smaller group.
            run(swarms, [0.0] * 3, least=3, name="met")
            yield swarms


def run(swarms, values, **options):
    with ThreadPoolExecutor(len(swarms)) as pool:
        calls = [
            pool.submit(swarm.average, value, **{"grace": 60, "least": len(swarms), **options})
            for swarm, value in zip(swarms, values, strict=True)
        ]
        return [call.result(timeout=240) for call in calls]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        *(({"grace": grace}, ValueError) for grace in (float("nan"), -1, "9")),
        *(({"weight": weight}, ValueError) for weight in (0, 2.5, "2", 2**31 + 1)),
        *(({"least": least}, ValueError) for least in (0, 1.5, "2")),
        ({"name": 5}, TypeError),
        ({"codec": 5}, TypeError),
    ],
)
def test_average_names_the_argument_that_is_wrong(trio, options, error):
    with pytest.raises(error, match=f"^{next(iter(options))} must be "):
        trio[0].average(1.0, **options)


def test_average_accepts_tensor_list_and_dict(trio):
    single = run(trio, [torch.full((2, 3), float(i)) for i in range(3)])
    assert all(torch.equal(one.value, torch.ones(2, 3)) for one in single)
    assert all(len(one.contributors) == 3 and not one.missing and one.seconds > 0 for one in single)
    several = run(
        trio,
        [[torch.tensor([i, 7]), torch.zeros(0, 4, dtype=torch.int64), torch.tensor(i)] for i in range(3)],
        op="sum",
    )
    for one in several:
        assert isinstance(one.value, list) and [tuple(t.shape) for t in one.value] == [(2,), (0, 4), ()]
        assert one.value[0].tolist() == [3, 21] and one.value[2].item() == 3
    keyed = run(trio, [{"b": np.float32([i, -i]), "a": np.float32(i)} for i in range(3)], op="max")
    for one in keyed:
        assert list(one.value) == ["b", "a"] and one.value["b"].tolist() == [2.0, 0.0] and one.value["a"] == 2.0
    assert [one.value for one in run(trio, [1.0, 2.0, 6.0])] == [3.0] * 3
    assert [one.value for one in run(trio, [1.0, 2.0, 6.0], weight=5, name="weighted")] == [3.0] * 3


def test_average_of_millions_of_elements_leaves_input_unchanged(trio):
    rng = torch.Generator().manual_seed(1)
    given = [torch.randn(2_000_003, generator=rng) for _ in range(3)]
    before = [tensor.clone() for tensor in given]
    exact = torch.stack(given).double().mean(0)
    results = run(trio, given)
    for one, tensor, old in zip(results, given, before, strict=True):
        assert torch.equal(one.value, results[0].value) and torch.equal(tensor, old)
        assert (one.value - exact).abs().max() < 1e-6
    short = run(trio, [tensor[:203_530] for tensor in given], codec="int8(block=256)")
    assert all(torch.equal(one.value, short[0].value) for one in short)
    assert 1e-6 < (short[0].value - exact[:203_530]).abs().max() < 0.1


def test_average_tells_a_differing_caller_the_difference(trio):
    given = [torch.ones(2, 3), torch.ones(3, 2), torch.ones(2, 3)]
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(s.average, t, name="wrong", grace=60) for s, t in zip(trio, given, strict=True)]
        with pytest.raises(thinwire.AverageError, match="shape of tensor number 0: peer .* has 2×3, here it is 3×2"):
            calls[1].result(timeout=240)
        for one in (calls[0].result(timeout=240), calls[2].result(timeout=90)):
            assert torch.equal(one.value, given[0]) and len(one.contributors) == 2
            assert any("has 3×2, here it is 2×3" in reason for reason in one.missing.values())
    assert all(one.value == 1.0 for one in run(trio, [1.0] * 3, name="wrong"))


def test_averages_run_beside_training_rounds(tmp_path):
    torch.manual_seed(0)
    models = [nn.Linear(4, 2) for _ in range(2)]
    (tmp_path / "run.toml").write_text(MANIFEST)

    def train(swarm, model, optimizer, index):
        begin = partial(swarm.start_average, op="sum", grace=60, least=2)
        handles = [begin(torch.full((100_000,), step * index)) for step in range(4)]
        while not swarm.done:
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
        handles += [begin(torch.full((100_000,), step * index)) for step in range(4, 8)]
        assert handles[-1].wait(60) and handles[-1].done
        return [handle.result(60).value for handle in handles]

    with (
        thinwire.join(tmp_path / "run.toml", home=tmp_path / "1", host="127.0.0.1") as first,
        thinwire.join(first.invite, home=tmp_path / "2", host="127.0.0.1") as second,
        ThreadPoolExecutor(2) as pool,
    ):
        two = (first, second)
        wrapped = [s.wrap(m, torch.optim.SGD(m.parameters(), lr=0.1)) for s, m in zip(two, models, strict=True)]
        calls = [pool.submit(train, *each) for each in zip(two, models, wrapped, (1, 2), strict=True)]
        results = [call.result(timeout=240) for call in calls]
        assert first.digest == second.digest and first.round == 3
    for result in results:
        assert [one.unique().tolist() for one in result] == [[3 * step] for step in range(8)]


def test_average_can_be_awaited_and_cancelled(trio):
    async def three():
        return await asyncio.gather(
            *map(wait, [s.start_average(i, op="max", grace=60, least=3) for i, s in enumerate(trio)])
        )

    async def wait(handle):
        return (await handle).value

    assert asyncio.run(three()) == [2, 2, 2]
    handle = trio[0].start_average(1.0, name="alone", least=3, grace=60)
    assert not handle.wait(0.05) and not handle.done
    with pytest.raises(TimeoutError):
        handle.result(0.01)
    handle.cancel()
    with pytest.raises(thinwire.AverageError, match="cancelled"):
        handle.result()
    with pytest.raises(thinwire.AverageError, match="1 of at least 3 peers have called within 0.2 s"):
        trio[0].average(1.0, name="too few", least=3, grace=0.2)


def test_interrupted_average_withdraws(trio, monkeypatch):
    def interrupted(pending, timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Pending, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trio[0].average(100.0, name="interrupted", least=3, grace=60)
    # The loop's thread ends it a moment later, before it can answer this; otherwise the next call would meet it.
    run(trio, [0.0] * 3, name="meanwhile")
    assert [one.value for one in run(trio, [1.0, 2.0, 6.0], name="interrupted")] == [3.0] * 3


def test_average_above_the_limit_is_refused_at_once(trio):
    handles = [trio[0].start_average(1.0, name="many", least=3, grace=60) for _ in range(AT_ONCE)]
    try:
        with pytest.raises(ValueError, match="64 averages are in progress"):
            trio[0].start_average(1.0, name="many", least=3, grace=60)
    finally:
        for handle in handles:
            handle.cancel()
    for name in ("many", "one of few"):
        assert [one.value for one in run(trio, [1.0, 2.0, 6.0], name=name)] == [3.0] * 3


def test_average_cancelled_before_start_never_begins():
    """Otherwise it would count, until the loop cancels it, against the next call."""
    begun, works = [], []

    class Held:
        def start(self, work):
            works.append(work)
            return concurrent.futures.Future()

    prepared = prepare(1.0, op="mean", codec=None, weight=1, least=1)
    pending = Pending(Held(), lambda: begun.append(1), prepared, lambda: 0.0)
    pending.cancel()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(works[0])
    assert begun == []


@pytest.mark.parametrize(
    ("tensors", "options", "reason"),
    [
        (torch.ones(2, dtype=torch.int32), {}, "op='mean' is not supported for int32"),
        ([torch.ones(2), torch.ones(2).double()], {}, "tensor number 0 is float32, tensor number 1 is float64"),
        ({"a": 1, "b": 1.0}, {"op": "sum"}, "tensor 'a' is int64, tensor 'b' is float64"),
        (torch.ones(2).to(torch.float8_e4m3fn), {}, "float8_e4m3fn"),
        (torch.ones(2, dtype=torch.complex64), {}, "complex64"),
        (np.array(["x"]), {}, "str"),
        ("x", {}, "not str"),
        (torch.ones(2).to_sparse(), {}, "dense"),
        (1.0, {"op": "product"}, "unknown op 'product'"),
        (1.0, {"codec": "int8"}, "float64 only supports codec='exact'"),
        (torch.tensor([float("nan")]), {"codec": "int8"}, "cannot represent"),
        (torch.ones(1), {"codec": "zip"}, "zip"),
        (1.0, {"op": "sum", "weight": 2}, "weight"),
        (1.0, {"weight": 0}, "weight must be .* not 0"),
        (1.0, {"least": 0}, "least"),
        (1.0, {"least": 1.5}, "least"),
        (1.0, {"weight": 2.5}, "weight must be .* not 2.5"),
        (1.0, {"weight": float("nan")}, "weight must be .* not nan"),
        ({"x" * 200: 1.0}, {}, "128 characters"),
    ],
)
def test_average_refuses_unsupported_tensors(tensors, options, reason):
    with pytest.raises((ValueError, TypeError), match=reason):
        prepare(tensors, **{"op": "mean", "codec": None, "weight": 1, "least": 1, **options})


@pytest.mark.parametrize("kind", [float, np.int64, np.uint8, np.float32])
def test_average_sends_all_integer_types_as_integers(kind):
    made = prepare(1.0, op="mean", codec=None, weight=kind(2), least=kind(3))
    assert type(made.share.weight) is int and made.share.weight == 2
    assert type(made.plan.least) is int and made.plan.least == 3


def test_average_with_unencodable_name_is_refused(trio):
    with pytest.raises(ValueError, match="name"):
        trio[0].start_average(1.0, name="\ud800", grace=0)
    trio[0].check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.float64])
def test_average_returns_tensors_of_the_given_type_and_layout(dtype):
    tensor = (torch.arange(24).reshape(2, 3, 4) % 7).to(dtype).transpose(0, 2)
    package = Package((tensor, tensor[0]))
    first, second = package.unpack(package.array)
    assert first.dtype == dtype and torch.equal(first, tensor) and torch.equal(second, tensor[0])
