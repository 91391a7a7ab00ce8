"""Patience of rounds, and the time at which slow senders are late."""

from __future__ import annotations

import asyncio
import math
from functools import wraps

import pytest
from thinwire.collectives.timing import LONGEST_NAP, MAX_PATIENCE, SLOW_FACTOR, Halfway, Patience, Ticks
from thinwire.sims.engine import virtual_loop


def test_patience_approaches_three_times_the_usual_duration_between_its_limits():
    patience = Patience(2.0)
    assert patience.seconds == 2.0
    for took, limit in ((0.1, 2.0), (5.0, 15.0), (1000.0, MAX_PATIENCE)):
        for _ in range(40):
            patience.observe(took)
        assert patience.seconds == pytest.approx(limit, rel=1e-4)


def test_patience_follows_one_long_exchange_by_three_tenths():
    patience = Patience(2.0)
    patience.observe(10.0)
    assert patience.seconds == pytest.approx(0.7 * 2.0 + 0.3 * 30.0)


def test_peers_are_late_some_time_after_more_than_half_of_all_and_never_before():
    half = Halfway()
    half.begin(100.0)
    half.note(0, 0, 101.0)
    half.note(2, 4, 102.0)
    assert half.late_at(1.0) == math.inf and half.longest == 0.0
    half.note(3, 4, 104.0)
    half.note(3, 4, 190.0)  # the last one does not matter
    assert half.longest == 4.0
    assert half.late_at(1.0) == 104.0 + SLOW_FACTOR * 4.0 and half.late_at(60.0) == 104.0 + 60.0
    half.begin(150.0)  # a ballot that asks for other data
    assert half.late_at(1.0) == math.inf
    half.note(3, 4, 150.5)  # some have it already
    assert half.late_at(1.0) == 150.5 + SLOW_FACTOR * 4.0 and half.longest == 4.0
    half.note(4, 4, 151.0)
    assert half.late_at(1.0) == math.inf


def simulated(main):
    @wraps(main)
    def run():
        virtual_loop.run(main(), seed=1)

    return run


class Clock:
    """Clock that can be moved, beside that of the event loop."""

    def __init__(self):
        self.ahead = 0.0

    def __call__(self):
        return asyncio.get_running_loop().time() + self.ahead


@simulated
async def test_ticks_are_multiples_of_the_pause_at_or_after_the_deadline():
    ticks, clock = Ticks(0.1, Clock()), Clock()
    for deadline, expected in ((-math.inf, 0.1), (0.1, 0.2), (0.42, 0.5), (0.75, 0.8), (0.75, 0.9)):
        ticks.by(deadline)
        assert await ticks.next() == pytest.approx(0.0, abs=1e-9)
        assert clock() == pytest.approx(expected) and clock() >= deadline


@simulated
async def test_earliest_of_several_deadlines_counts_also_while_a_tick_is_awaited():
    ticks, clock = Ticks(1.0, Clock()), Clock()
    ticks.by(3.0)
    ticks.by(9.0)
    asyncio.get_running_loop().call_later(1.34, ticks.by, -math.inf)  # an input
    await ticks.next()
    assert clock() == pytest.approx(2.0)
    ticks.by(5.0)
    ticks.by(4.5)
    await ticks.next()
    assert clock() == pytest.approx(5.0)


@simulated
async def test_tick_that_is_late_is_not_planned_again():
    clock = Clock()
    ticks = Ticks(1.0, clock)
    ticks.by(3.0)
    await asyncio.sleep(2.95)
    asyncio.get_running_loop().now += 3.0  # the process was stopped
    ticks.by(-math.inf)  # and then an input came first
    assert await ticks.next() == pytest.approx(2.95)
    ticks.by(-math.inf)
    await ticks.next()
    assert clock() == pytest.approx(6.95)


@simulated
async def test_ticks_follow_a_clock_that_differs_from_the_event_loop():
    start = asyncio.get_running_loop().time()
    ticks = Ticks(0.1, lambda: 100.0 + 1.0005 * (asyncio.get_running_loop().time() - start))
    made = 0
    while (now := 100.0 + 1.0005 * (asyncio.get_running_loop().time() - start)) < 100.25:
        ticks.by(100.25)
        await ticks.next()
        made += 1
    assert now < 100.31 and made == 1


@simulated
async def test_ticks_come_now_and_then_without_a_deadline():
    ticks, clock = Ticks(0.1, Clock()), Clock()
    for number in (1, 2):
        ticks.by(math.inf)
        await ticks.next()
        assert clock() == pytest.approx(0.1 * LONGEST_NAP * number)
