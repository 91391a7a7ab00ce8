"""The all-reduce of arrays over a fixed group, in virtual time."""

import asyncio
import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.costs.round_time import ring_data
from thinwire.collectives.topology.shards import grid
from thinwire.compression.registry import dense
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network.network import SimNet
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import Welcome

from benchmarks.peers.fixed_group import Averager, Flat

RUN = bytes(range(32))
SHAPES = ((300, 70), (1,), (0,), (41_003,), ())


async def inline(function):
    return function()


class Group:
    """Peers with linked averagers; all calls of one turn run at once."""

    def __init__(self, count, codec, *, latency=0.01, bandwidth=50e6, patience=1.0, **options):
        self.net = SimNet(3, latency=latency, bandwidth=bandwidth)
        self.identities = [Identity.generate(bytes([i]) * 32) for i in range(count)]
        keys = {identity.peer_id: identity.public_key for identity in self.identities}
        records = []
        self.transports, self.averagers = [], []
        for i, identity in enumerate(self.identities):
            address = f"10.0.0.{i}:7000"
            record = PeerRecord.create(identity, run_id=RUN, addresses=(address,), sequence=1, issued=self.net.wall())
            welcome = Welcome(record.wire, b"", bytes(32), bytes(64), (), "", "", bytes(32))
            self.transports.append(
                self.net.transport(identity, RUN, lambda hello, them, source, welcome=welcome: welcome, address)
            )
            records.append(record)
        loop = virtual_loop.current()
        for identity, transport in zip(self.identities, self.transports, strict=True):
            for record in records:
                transport.learn(record)
            self.averagers.append(
                Averager(
                    identity,
                    RUN,
                    transport,
                    keys=keys,
                    codec=dense(codec),
                    now=loop.time,
                    grace=2.0,
                    patience=patience,
                    work=inline,
                    **options,
                )
            )
        self.running = [asyncio.create_task(averager.run()) for averager in self.averagers]

    def kill(self, index):
        self.net.kill(self.identities[index].peer_id)
        self.running[index].cancel()


def arrays(seed):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def flat(several):
    return np.concatenate([array.reshape(-1) for array in several])


@pytest.mark.trial
@pytest.mark.parametrize(
    ("codec", "tolerance"),
    [
        ("fp32", 1e-7),
        ("int8(block=64)", 0.02),
        pytest.param("fp16", 1e-3, marks=pytest.mark.soak),
        pytest.param("int4(block=64)", 0.3, marks=pytest.mark.soak),
        pytest.param("int4(block=64,asymmetric=1,stochastic=1)", 0.3, marks=pytest.mark.soak),
        pytest.param("int3(block=64)", 0.7, marks=pytest.mark.soak),
    ],
)
def test_allreduce_gives_every_peer_the_same_weighted_mean(codec, tolerance):
    async def main():
        group = Group(3, codec)
        for turn in range(2):
            given = [arrays(10 * turn + i) for i in range(3)]
            before = [flat(each) for each in given]
            room = [[np.full_like(array, np.nan) for array in each] for each in given]
            outcomes = await asyncio.gather(
                *(
                    averager.average(each, into, weight=weight)
                    for averager, each, into, weight in zip(group.averagers, given, room, (1, 2, 5), strict=True)
                )
            )
            exact = sum(weight * each.astype(np.float64) for weight, each in zip((1, 2, 5), before, strict=True)) / 8
            assert all(len(outcome.contributors) == 3 for outcome in outcomes)
            for each, untouched, into in zip(given, before, room, strict=True):
                np.testing.assert_array_equal(flat(into), flat(room[0]))
                np.testing.assert_array_equal(flat(each), untouched)
            np.testing.assert_allclose(flat(room[0]), exact, atol=tolerance * 4, rtol=1e-6)

    virtual_loop.run(main(), seed=1)


@pytest.mark.parametrize("delay", [0.0, 0.015, 0.025, 0.04, 0.08])
def test_allreduce_leaves_out_dead_peer_and_finishes(delay):
    async def main():
        group = Group(4, "fp32")
        given = [[np.full(200_000, 2.0**i, np.float32)] for i in range(4)]
        calls = [asyncio.create_task(group.averagers[i].average(given[i])) for i in range(4)]
        await asyncio.sleep(delay)
        group.kill(3)
        calls[3].cancel()
        outcomes = await asyncio.gather(*calls[:3])
        # Each peer contributes 2**rank, so the sum shows its contributors.
        counted = {
            round(float(array[0][0]) * len(outcome.contributors))
            for array, outcome in zip(given[:3], outcomes, strict=True)
        }
        assert counted in ({7}, {15})
        second = [[np.full(5, 2.0**i, np.float32)] for i in range(3)]
        outcomes = await asyncio.gather(*(group.averagers[i].average(second[i]) for i in range(3)))
        assert {len(outcome.contributors) for outcome in outcomes} == {3}
        np.testing.assert_array_equal(flat(map(flat, second)), np.full(15, np.float32(7 / 3)))

    virtual_loop.run(main(), seed=1)


def test_allreduce_alone_writes_nothing():
    async def main():
        group = Group(3, "fp32")
        mine = [np.arange(9, dtype=np.float32)]
        outcome = await group.averagers[0].average(mine)
        assert outcome.commit is None
        np.testing.assert_array_equal(mine[0], np.arange(9))

    virtual_loop.run(main(), seed=1)


@pytest.mark.parametrize("size", [9, 20_000])
def test_allreduce_retries_a_call_that_failed(size):
    """One peer calls alone and gives up; then all call, that peer with arrays of the same or other sizes."""

    async def main():
        group = Group(3, "fp32")
        alone = await group.averagers[0].average([np.ones(9, np.float32)])
        assert alone.commit is None
        for turn in range(2):
            given = [[np.full(size, 2.0**i, np.float32)] for i in range(3)]
            outcomes = await asyncio.gather(*(group.averagers[i].average(given[i]) for i in range(3)))
            assert all(outcome.commit is not None for outcome in outcomes), turn
            for i in range(3):
                np.testing.assert_array_equal(given[i][0], given[0][0])

    virtual_loop.run(main(), seed=1)


def test_second_call_of_same_round_keeps_earlier_promises_and_votes():
    """The second call is in the same round, and remembers the promises and votes of the first."""

    async def main():
        group = Group(3, "fp32")
        mine = group.averagers[0]
        assert (await mine.average([np.ones(9, np.float32)])).commit is None
        acceptor, attempt = mine.current.agreement.acceptor, mine.current.attempt
        assert (await mine.average([np.ones(9, np.float32)])).commit is None
        assert mine.current.agreement.acceptor is acceptor and mine.current.attempt > attempt
        # With arrays of other sizes it has other terms, and its votes still hold.
        assert (await mine.average([np.ones(7, np.float32)])).commit is None
        assert mine.current.agreement.acceptor.promised >= acceptor.promised and mine.current.attempt > attempt + 1

    virtual_loop.run(main(), seed=1)


def test_allreduce_refuses_unsupported_arrays():
    async def main():
        averager = Group(2, "int8").averagers[0]
        for wrong in ([np.zeros(3)], [np.zeros((4, 4), np.float32).T[1:]]):
            with pytest.raises(ValueError, match="float32"):
                await averager.average(wrong)
        with pytest.raises(ValueError, match="3 elements, the output 2"):
            await averager.average([np.zeros(3, np.float32)], [np.zeros(2, np.float32)])
        with pytest.raises(ValueError, match="finite"):
            await averager.average([np.array([np.nan], np.float32)])

    virtual_loop.run(main(), seed=1)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_flat_view_reads_and_writes_like_a_copy(sizes, data):
    parts = [np.arange(100 * i, 100 * i + size, dtype=np.float32) for i, size in enumerate(sizes)]
    vector, copy = Flat(parts), np.concatenate(parts)
    assert vector.total == copy.size
    start = data.draw(st.integers(0, copy.size))
    stop = data.draw(st.integers(start, copy.size))
    out = np.empty(stop - start, np.float32)
    vector.read(start, stop, out)
    np.testing.assert_array_equal(out, copy[start:stop])
    view = vector.view(start, stop)
    if view is not None:
        np.testing.assert_array_equal(view, copy[start:stop])
        assert any(np.shares_memory(view, part) for part in parts)
    vector.write(start, -out)
    copy[start:stop] *= -1
    np.testing.assert_array_equal(np.concatenate(parts), copy)


@pytest.mark.parametrize(
    ("peers", "latency", "chunks", "near"),
    [(2, 0.05, 32, 1e-3), (4, 0.05, 32, 1e-3), (6, 0.2, 30, 1e-3), (5, 0.5, 5, 1e-3), (8, 0.6, 32, 0.03)],
)
def test_ring_allreduce_takes_closed_form_time(peers, latency, chunks, near):
    """Time from the ballot to the last result: bytes over one link, or one latency per hop if that is more.

    Where both count, chunks wait for each other, because the leader begins one latency before the others.
    """
    total, rate = chunks * (4096 if chunks == 5 else 32768), 1e6

    async def main():
        group = Group(peers, "fp32", latency=latency, bandwidth=rate, patience=60.0, topology="ring")
        given = [[np.full(total, 2.0**i, np.float32)] for i in range(peers)]
        await asyncio.gather(*(group.averagers[i].average(given[i]) for i in range(peers)))
        rounds = [averager.past for averager in group.averagers]
        assert all(len(past.data_plane.proposal.order) == peers for past in rounds)
        return max(past.progressed_at for past in rounds) - max(past.opened_at for past in rounds)

    codec = dense("fp32")
    cut = grid(total, codec)
    assert len(cut) == chunks
    assert virtual_loop.run(main(), seed=1, limit=1000) == pytest.approx(
        ring_data(peers, cut, codec, rate, latency), rel=near
    )


@pytest.mark.parametrize(("topology", "rule"), [("star", "mean"), ("hierarchy", "mean"), ("ring", "rda")])
def test_unknown_topology_or_rule_is_an_error(topology, rule):
    me = Identity.generate(bytes(32))
    with pytest.raises(ValueError, match="is not supported with the topology"):
        Averager(me, RUN, None, keys={}, codec=dense("fp32"), now=None, rule=rule, topology=topology)


@pytest.mark.parametrize("topology", ["butterfly", "ring"])
def test_results_of_a_past_round_are_free_without_the_garbage_collector(topology):
    async def main():
        group = Group(2, "fp32", topology=topology)

        async def call(seed):
            given = [arrays(seed + i) for i in range(2)]
            await asyncio.gather(
                *(averager.average(each) for averager, each in zip(group.averagers, given, strict=True))
            )

        await call(0)
        old = [weakref.ref(averager.past.data_plane) for averager in group.averagers]
        assert None not in [one() for one in old]
        await call(2)
        await asyncio.sleep(1.0)  # the tasks of the averagers have forgotten it, too
        assert [one() for one in old] == [None, None]

    gc.disable()  # it would end the cycles of which this test must find none
    try:
        virtual_loop.run(main(), seed=1)
    finally:
        gc.enable()
