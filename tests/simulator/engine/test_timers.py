"""Timers of a simulated loop: their order, for any times, beside a sorted list."""

import contextvars
import math
import random

import pytest
from thinwire.sims.engine.loop_handles import Timer
from thinwire.sims.engine.timers import SLOTS, Timers

CONTEXT = contextvars.Context()


def timer(due: float) -> Timer:
    return Timer(CONTEXT, (print,), due)


def taken(timers: Timers, now: float) -> list[Timer]:
    """Take all timers that are due, as a loop does."""
    found = []
    while (when := timers.next()) is not None and when <= now:
        found.append(timers.near.popleft()[2])
    return found


@pytest.mark.parametrize("seed", range(10))
def test_timers_are_in_order_of_time_then_of_their_addition(seed: int) -> None:
    rng, timers, now = random.Random(seed), Timers(), 0.0
    waiting: list[tuple[float, int, Timer]] = []
    for step in range(2000):
        # Some in the past, some at equal times, some at the edge of a slot, some in the same slot, some far away.
        due = now + rng.choice((-1.0, 0.0, 0.5 / SLOTS, 1 / SLOTS, rng.random(), rng.expovariate(0.1), 1e12))
        waiting.append((due, step, one := timer(due)))
        timers.add(one)
        if rng.random() < 0.3:
            rng.choice(waiting)[2].cancel()
        if rng.random() < 0.2:
            live = [entry for entry in waiting if not entry[2].ended]
            first = min(live, default=None)
            assert timers.next() == (None if first is None else first[0])
            if first is not None:
                now = max(now, first[0] if first[0] < 1e9 else now)
                due_now = sorted(entry for entry in live if entry[0] <= now)
                assert taken(timers, now) == [entry[2] for entry in due_now]
                waiting = [entry for entry in live if entry[0] > now]
    rest = sorted(entry for entry in waiting if not entry[2].ended)
    assert taken(timers, math.inf) == [entry[2] for entry in rest] and timers.next() is None


def test_timer_without_end_comes_last_and_none_comes_after_clear() -> None:
    timers = Timers()
    for due in (math.inf, 1e300, 5.0):
        timers.add(timer(due))
    assert [one.due for one in taken(timers, math.inf)] == [5.0, 1e300, math.inf]
    timers.add(timer(7.0))
    timers.clear()
    assert timers.next() is None
