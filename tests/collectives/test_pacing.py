"""Bulk leaves no faster than its owner allows, in arithmetic and through real sockets."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.pacing import Pacer
from thinwire.sims import clock


@given(st.integers(1, 10**9), st.lists(st.tuples(st.floats(0, 10), st.integers(1, 1 << 20)), min_size=1, max_size=40))
def test_no_more_leaves_than_the_rate_allows_and_no_less(rate, records):
    pacer, now, sent = Pacer(rate), 0.0, []
    for pause, nbytes in records:
        now += pause
        sent.append((now + pacer.reserve(nbytes, now), nbytes, now))
    for (left, nbytes, _), (following, _, asked) in zip(sent, sent[1:], strict=False):
        # Each waits for as long as the one before takes, and not longer.
        assert following == pytest.approx(max(asked, left + nbytes / rate))


def test_without_a_limit_nothing_waits():
    pacer = Pacer()
    assert [pacer.reserve(1 << 30, 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]


def test_waiting_takes_that_long():
    async def main():
        pacer, loop = Pacer(1000), clock.current()
        await asyncio.gather(*(pacer.wait(500) for _ in range(5)))
        assert loop.time() == pytest.approx(2.0)

    clock.run(main(), seed=1)
