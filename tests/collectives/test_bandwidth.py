"""What a link carries, told from bytes that moved: the densest stretch counts, not the wait, nor what is too fast to see."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.bandwidth import CEILING, FALL, LEAST, LOOKS, RISE, SHORTEST, Bandwidth, densest

MB = 10**6


class Meter:
    """A link at which looks are had every `step` seconds while bytes move."""

    def __init__(self, step=0.05):
        self.link, self.step, self.now, self.up, self.down = Bandwidth(), step, 100.0, 0, 0

    def move(self, nbytes, seconds, *, up=True, down=True):
        for _ in range(steps := round(seconds / self.step)):
            self.now += self.step
            self.up += nbytes // steps * up
            self.down += nbytes // steps * down
            self.link.look(self.up, self.down, self.now)

    def idle(self, seconds):
        self.move(0, seconds)


def test_unknown_until_something_moves():
    meter = Meter()
    meter.idle(10)
    assert meter.link.settle() == (0, 0)
    meter.move(LEAST // 2, 1)
    assert meter.link.settle() == (0, 0), "too little"


def test_the_rate_of_a_transfer_and_not_of_the_wait_for_it():
    meter = Meter()
    for _ in range(3):
        meter.idle(30)
        meter.move(10 * MB, 2, up=False)
        meter.idle(5)
        up, down = meter.link.settle()
        assert up == 0 and down == pytest.approx(5 * MB, rel=0.01)


def test_who_waits_for_a_slow_one_is_not_slow():
    """Three quarters go at full speed, the rest trickles to a peer with a tenth of the bandwidth."""
    meter = Meter()
    meter.move(9 * MB, 0.75)
    meter.move(3 * MB, 9)
    assert meter.link.settle()[0] == pytest.approx(12 * MB, rel=0.05)


def test_what_is_too_fast_to_see_is_no_measure():
    meter = Meter(step=0.001)
    meter.idle(1)
    meter.move(2 * MB, 0.01)
    assert meter.link.settle() == (0, 0)
    meter.move(2 * MB, 0.2)
    known = meter.link.settle()
    assert known[0] == pytest.approx(10 * MB, rel=0.1)
    meter.idle(1)
    meter.move(MB, 0.005)
    meter.move(MB, 1)
    assert meter.link.settle() == known, "it is no slower because the rest was"


def test_a_burst_counts_from_when_nothing_had_moved():
    meter = Meter(step=0.1)
    meter.idle(1)
    meter.move(2 * MB, 0.1)
    meter.move(MB, 10)
    assert meter.link.settle()[0] == pytest.approx(20 * MB, rel=0.01)


def test_a_link_carries_no_less_down_than_up():
    meter = Meter()
    meter.move(10 * MB, 1, down=False)
    meter.move(10 * MB, 10, up=False)
    up, down = meter.link.settle()
    assert up == down == pytest.approx(10 * MB, rel=0.05)
    assert meter.link.down == pytest.approx(MB, rel=0.05)


def test_lumps_count_by_the_time_between_them():
    meter = Meter(step=0.8)
    meter.move(20 * MB, 16)
    assert meter.link.settle()[0] == pytest.approx(MB / 0.8, rel=0.01)


def test_estimates_rise_faster_than_they_fall():
    meter = Meter()
    meter.move(10 * MB, 2)
    assert meter.link.settle()[0] == pytest.approx(5 * MB, rel=0.01)
    meter.move(20 * MB, 2)
    assert meter.link.settle()[0] == pytest.approx((5 + RISE * 5) * MB, rel=0.01)
    meter.move(5 * MB, 2)
    assert meter.link.settle()[0] == pytest.approx((7.5 - FALL * 5) * MB, rel=0.01)


def test_memory_is_bounded_and_long_transfers_are_measured_too():
    meter = Meter()
    meter.move(1000 * MB, 0.05 * 10 * LOOKS)
    assert len(meter.link._looks) <= LOOKS
    assert meter.link.settle()[0] == pytest.approx(1000 * MB / (0.5 * LOOKS), rel=0.05)


def test_looks_are_due_now_and_then():
    link = Bandwidth()
    assert link.due(0.0)
    link.look(0, 0, 5.0)
    assert not link.due(5.005) and link.due(5.011)


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 10**13)), max_size=60))
def test_whatever_is_seen_the_result_is_a_bandwidth(steps):
    link, now, up = Bandwidth(), 0.0, 0
    for seconds, nbytes in steps:
        now, up = now + seconds, up + nbytes
        link.look(up, up, now)
    assert all(type(rate) is int and 0 <= rate <= CEILING for rate in link.settle())


@given(st.lists(st.tuples(st.floats(0.01, 10), st.integers(1, 10**7)), min_size=1, max_size=30), st.integers(0, 10**6))
def test_the_densest_stretch_is_found(steps, first):
    times, moved, now, total = [0.0], [first], 0.0, first
    for seconds, nbytes in steps:
        now, total = now + seconds, total + nbytes
        times.append(now)
        moved.append(total)
    pairs = [(i, j) for j in range(len(times)) for i in range(j) if 4 * (moved[j] - moved[i]) >= total]
    every = [(moved[j] - moved[i]) / (times[j] - times[i]) for i, j in pairs]
    found = densest(times, moved, 0)
    fast = any(times[j] - times[i] < SHORTEST for i, j in pairs)
    if total < LEAST or not every or fast:
        assert found == 0
    else:
        # The shortest stretches that have enough end at every look; none of them is missed.
        assert 0 < found <= max(every) * (1 + 1e-9)
        shortest = max((moved[j] - moved[i]) / (times[j] - times[i]) for i, j in pairs if (i + 1, j) not in pairs)
        assert found == pytest.approx(shortest)
