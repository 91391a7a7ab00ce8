"""Parts of the ZeroMQ transport: limits, buffers, queues, record keys, endpoints."""

import asyncio
import random
import weakref

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.collectives.transport.interface import Arrival
from thinwire.collectives.transport.rate_limit import TokenBuckets
from thinwire.collectives.transport.receive_queue import ReceiveQueue
from thinwire.collectives.transport.zeromq.admission import fair_visits
from thinwire.collectives.transport.zeromq.sockets.limits import Limits, Retry
from thinwire.collectives.transport.zeromq.sockets.listener import HalfOpen, own_addresses, port_of
from thinwire.collectives.transport.zeromq.streams import record_crypto


@given(st.lists(st.floats(0, 3), max_size=60), st.integers(1, 9), st.floats(0.1, 5))
def test_token_bucket_grants_at_most_burst_and_rate(pauses, burst, rate):
    buckets, now, granted = TokenBuckets(burst, rate), 0.0, 0
    for pause in pauses:
        now += pause
        granted += buckets.take("key", now)
        assert granted <= burst + rate * now + 1e-6
    assert buckets.take("another", now)


def test_token_buckets_are_bounded_and_drop_full_ones():
    buckets = TokenBuckets(2, 1.0, capacity=3)
    assert all(buckets.take(str(key), 0.0) for key in range(3))
    assert not buckets.take("late", 0.1)
    assert buckets.take("late", 5.0)
    assert [buckets.take(key, 5.0) for key in "abc"] == [True, True, False], "no place is taken by a full one"


def crowd_of(cap, addresses, rng=None):
    """Return a crowd after connections from these addresses, and a list of the addresses whose connection it closes."""
    crowd, closed = HalfOpen(cap, rng=rng or random.Random(1)), []

    def connection(address):
        def close():
            closed.append(address)
            crowd.remove(address, close)

        assert crowd.add(address, close)

    for address in addresses:
        connection(address)
    return crowd, closed


def test_busiest_network_loses_a_connection_first():
    flood = [f"198.51.100.{number}" for number in (1, 2, 3)]
    crowd, closed = crowd_of(4, ["192.0.2.1", *flood, "203.0.113.1", "192.0.2.9"])
    assert len(closed) == 2 and set(closed) < set(flood) and len(crowd) == 4
    crowd.clear()
    assert len(crowd) == 0 and len(closed) == 6


def test_connection_outlives_a_flood_from_many_networks_with_the_probability_of_a_random_choice():
    """The oldest of 16 connections meets 16 further ones: it remains with the probability (15/16)**16 = 0.36."""
    networks = [f"10.0.{number}.1" for number in range(32)]
    remained = sum("10.0.0.1" not in crowd_of(16, networks, random.Random(seed))[1] for seed in range(400))
    assert 0.25 < remained / 400 < 0.47


def test_source_above_its_rate_gets_no_connection():
    assert not HalfOpen(4, lambda source: source != "x").add("x", lambda: None)


@pytest.mark.parametrize(("networks", "rate"), [(1, 400), (20, 400), (100, 4000)])
def test_flood_of_visits_from_a_few_networks_keeps_out_no_others_and_stays_limited(networks, rate):
    clock, limits = [0.0], Limits()
    may_begin = fair_visits(limits, lambda: clock[0])
    flooded = honest = 0
    for number in range(20 * rate):
        clock[0] = number / rate
        flooded += may_begin(f"10.0.{number % networks}.0")
        if number % rate == 0:
            assert may_begin(f"192.0.{number // rate}.0"), clock
            honest += 1
    assert honest == 20 and limits.visit_burst / 2 < flooded <= limits.visit_burst + 20 * limits.visit_rate


def test_buffer_pool_lends_no_byte_twice():
    pool = BufferPool(spare=1 << 20)
    views = [pool.lend(size) for size in (1, 65536, 65537, 1 << 20, 100)]
    for number, view in enumerate(views):
        view[:] = bytes([number]) * len(view)
    part = np.frombuffer(views[3], np.uint8)[5:9]
    del views[3]
    again = pool.lend(1 << 20)
    again[:] = b"\xff" * len(again)
    assert part.tolist() == [3] * 4
    assert [bytes(set(view)) for view in views] == [b"\0", b"\1", b"\2", b"\4"]
    del views, view, part, again
    assert 0 < pool.spare <= 1 << 20
    kept = pool.spare
    assert pool.lend(10).nbytes == 10 and pool.spare <= kept


def test_buffer_pool_keeps_requested_sizes():
    pool = BufferPool(spare=8 << 20)
    given = []

    def give(buffer):
        given.append(weakref.ref(buffer))
        pool.give(buffer)

    for size in range(1 << 16, 1 << 20, 1 << 16):
        give(pool.take(size))  # as averages of changing sizes do
    wanted = [pool.take(3 << 20) for _ in range(2)]
    for buffer in wanted:
        give(buffer)
    again = [pool.take(3 << 20) for _ in range(2)]
    assert {id(buffer) for buffer in again} == {id(buffer) for buffer in wanted}
    lent = {id(buffer) for buffer in again}
    alive = {id(buffer): buffer.nbytes for one in given if (buffer := one()) is not None and id(buffer) not in lent}
    kept = sum(alive.values())
    assert pool.spare == kept and 0 < kept <= (8 << 20) - (6 << 20)
    pool.give(np.empty(9 << 20, np.uint8))
    assert pool.spare == kept


def test_buffer_pool_frees_all_that_is_not_lent():
    pool = BufferPool()
    lent, spare = pool.take(1), pool.take(1 << 20)
    gone = weakref.ref(spare)
    pool.give(spare)
    del spare
    assert pool.spare == 1 << 20 and gone() is not None
    pool.free()
    assert pool.spare == 0 and gone() is None
    pool.give(lent)
    assert pool.spare == lent.nbytes and pool.take(1) is lent


@pytest.mark.parametrize("size", [1, 70_000, 1 << 19, (1 << 19) + 1, (1 << 20) + 1, 5_000_001])
def test_buffer_pool_rounds_sizes_up(size):
    lent = BufferPool().take(size).nbytes
    assert size <= lent < size + (1 << 16) if size < 1 << 19 else size <= lent <= 1.125 * size


def test_back_off_grows_to_its_bound():
    limits, retry, pauses = Limits(), Retry(), []
    for _ in range(12):
        retry.failed(100.0, limits, 0.5, final=False)
        pauses.append(retry.at - 100.0)
    assert pauses[0] == limits.retry_first / 2 and pauses[-1] == limits.retry_last / 2
    assert pauses == sorted(pauses)
    retry = Retry()
    retry.failed(0.0, limits, 1.0, final=True)
    assert retry.at == limits.retry_last


def test_receive_queue_pauses_its_queues_separately_and_drops_a_peer():
    log = []

    async def work():
        receive_queue = ReceiveQueue(
            10_000, lambda paused: log.append(("control", paused)), lambda paused: log.append(("bulk", paused))
        )
        for _ in range(3):
            receive_queue.put(Arrival(b"a", None, "bulk"), 4000, bulk=True)
        assert log == [("bulk", True)]
        receive_queue.put(Arrival(b"b", None, "control"), 0)
        assert (await receive_queue.get()).reason == "control"
        assert (await receive_queue.get()).reason == "bulk" and receive_queue.bulk.full
        receive_queue.put(Arrival(b"b", None, "bulk"), 10, bulk=True)
        receive_queue.forget(b"a")
        assert log == [("bulk", True), ("bulk", False)]
        assert (await receive_queue.get()).peer == b"b" and receive_queue.bulk.held == receive_queue.control.held == 0
        waiting = asyncio.create_task(receive_queue.get())
        await asyncio.sleep(0)
        receive_queue.close()
        with pytest.raises(RuntimeError):
            await waiting

    asyncio.run(work())


@given(st.binary(min_size=17, max_size=record_crypto.MAX_BULK[0]), st.binary(max_size=3000), st.data())
def test_sealed_record_opens_only_once_and_unchanged(head, payload, data):
    secret = b"s" * 32
    there, _ = record_crypto.stream_keys(secret, 3)
    record = memoryview(bytearray(record_crypto.record_size(len(head), len(payload))))

    def opened(key):
        there = memoryview(bytearray(record))
        return key.open(len(head), there), there[
            len(there) - record_crypto.TAG - len(payload) : len(there) - record_crypto.TAG
        ]

    there.seal(head, payload, record)
    assert record_crypto.parse_lengths(record[: record_crypto.LENGTHS.size]) == (len(head), len(payload))
    key, back = record_crypto.stream_keys(secret, 3)
    assert opened(key) == (head, payload)
    with pytest.raises(InvalidTag):
        opened(key)
    for other in (back, record_crypto.stream_keys(secret, 4)[0], record_crypto.stream_keys(b"t" * 32, 3)[0]):
        with pytest.raises(InvalidTag):
            opened(other)
    where = data.draw(st.integers(0, len(record) - 1))
    record[where] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(InvalidTag):
        opened(record_crypto.stream_keys(secret, 3)[0])


def test_record_key_is_exhausted_after_its_limit(monkeypatch):
    monkeypatch.setattr(record_crypto, "MAX_SEALS", 3)
    key, _ = record_crypto.stream_keys(bytes(32), 0)
    for _ in range(3):
        key.prove(b"")
    with pytest.raises(record_crypto.KeyUsedUp):
        key.prove(b"")


@pytest.mark.parametrize("endpoint", ["", ":", "80", ":0", ":65536", ":-1", ":8 0", "x:80", ":١", ":99999999999999"])
def test_invalid_endpoints_are_refused(endpoint):
    with pytest.raises(ValueError):
        port_of(endpoint)


def test_own_address_is_known():
    assert own_addresses("10.1.2.3") == ("10.1.2.3",)
    (address,) = own_addresses("0.0.0.0")
    assert address not in ("", "0.0.0.0")
