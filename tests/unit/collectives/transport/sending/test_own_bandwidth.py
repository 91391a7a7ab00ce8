"""Link bandwidth measured from transferred bytes: the densest stretch counts, waiting does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.transport.sending.own_bandwidth import (
    FALL,
    LEAST,
    MAX_SAMPLES,
    RISE,
    SHORTEST,
    Bandwidth,
    densest,
)
from thinwire.swarm.quantized_links import CEILING

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
            self.link.add_sample(self.up, self.down, self.now)

    def idle(self, seconds):
        self.move(0, seconds)


def test_bandwidth_is_unknown_until_bytes_move():
    meter = Meter()
    meter.idle(10)
    assert meter.link.end_round() == (0, 0)
    meter.move(LEAST // 2, 1)
    assert meter.link.end_round() == (0, 0), "too little"


def test_bandwidth_excludes_waiting_time():
    meter = Meter()
    for _ in range(3):
        meter.idle(30)
        meter.move(10 * MB, 2, up=False)
        meter.idle(5)
        up, down = meter.link.end_round()
        assert up == 0 and down == pytest.approx(5 * MB, rel=0.01)


def test_bandwidth_is_at_most_the_limit_of_the_owner():
    """The limit lets a burst pass. Only the uplink has a limit."""
    meter = Meter()
    meter.link = Bandwidth(2 * MB)
    meter.idle(10)
    meter.move(8 * MB, 1)
    assert meter.link.uplink() == 2 * MB, "in the round"
    assert meter.link.end_round() == (2 * MB, 8 * MB)
    meter.move(8 * MB, 1)
    assert meter.link.end_round() == (2 * MB, 8 * MB)
    meter.move(MB, 1)
    assert meter.link.end_round()[0] < 2 * MB, "slower than the limit"


def test_slow_receiver_does_not_lower_own_bandwidth():
    """Three quarters go at full speed, the rest trickles to a peer with a tenth of the bandwidth."""
    meter = Meter()
    meter.move(9 * MB, 0.75)
    meter.move(3 * MB, 9)
    assert meter.link.end_round()[0] == pytest.approx(12 * MB, rel=0.05)


def test_too_short_transfer_is_not_measured():
    meter = Meter(step=0.001)
    meter.idle(1)
    meter.move(2 * MB, 0.01)
    assert meter.link.end_round() == (0, 0)
    meter.move(2 * MB, 0.2)
    known = meter.link.end_round()
    assert known[0] == pytest.approx(10 * MB, rel=0.1)
    meter.idle(1)
    meter.move(MB, 0.005)
    meter.move(MB, 1)
    assert meter.link.end_round() == known, "it is no slower because the rest was"


def test_burst_is_timed_from_the_idle_moment_before_it():
    meter = Meter(step=0.1)
    meter.idle(1)
    meter.move(2 * MB, 0.1)
    meter.move(MB, 10)
    assert meter.link.end_round()[0] == pytest.approx(20 * MB, rel=0.01)


def test_download_rate_is_at_least_upload_rate():
    meter = Meter()
    meter.move(10 * MB, 1, down=False)
    meter.move(10 * MB, 10, up=False)
    up, down = meter.link.end_round()
    assert up == down == pytest.approx(10 * MB, rel=0.05)
    assert meter.link.down == pytest.approx(MB, rel=0.05)


def test_lumps_are_timed_by_their_spacing():
    meter = Meter(step=0.8)
    meter.move(20 * MB, 16)
    assert meter.link.end_round()[0] == pytest.approx(MB / 0.8, rel=0.01)


def test_bandwidth_estimate_rises_faster_than_it_falls():
    meter = Meter()
    meter.move(10 * MB, 2)
    assert meter.link.end_round()[0] == pytest.approx(5 * MB, rel=0.01)
    meter.move(20 * MB, 2)
    assert meter.link.end_round()[0] == pytest.approx((5 + RISE * 5) * MB, rel=0.01)
    meter.move(5 * MB, 2)
    assert meter.link.end_round()[0] == pytest.approx((7.5 - FALL * 5) * MB, rel=0.01)


def test_long_transfer_is_measured_with_bounded_memory():
    meter = Meter()
    meter.move(1000 * MB, 0.05 * 10 * MAX_SAMPLES)
    assert meter.link.samples <= MAX_SAMPLES
    assert meter.link.end_round()[0] == pytest.approx(1000 * MB / (0.5 * MAX_SAMPLES), rel=0.05)


def test_bandwidth_sample_is_due_periodically():
    link = Bandwidth()
    assert link.due(0.0)
    link.add_sample(0, 0, 5.0)
    assert not link.due(5.005) and link.due(5.011)


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 10**13)), max_size=60))
def test_bandwidth_is_valid_for_any_samples(steps):
    link, now, up = Bandwidth(), 0.0, 0
    for seconds, nbytes in steps:
        now, up = now + seconds, up + nbytes
        link.add_sample(up, up, now)
    assert all(type(rate) is int and 0 <= rate <= CEILING for rate in link.end_round())


@given(st.lists(st.tuples(st.floats(0.01, 10), st.integers(1, 10**7)), min_size=1, max_size=30), st.integers(0, 10**6))
def test_densest_stretch_gives_the_bandwidth(steps, first):
    times, totals, now, total = [0.0], [first], 0.0, first
    for seconds, nbytes in steps:
        now, total = now + seconds, total + nbytes
        times.append(now)
        totals.append(total)
    pairs = [(i, j) for j in range(len(times)) for i in range(j) if 4 * (totals[j] - totals[i]) >= total]
    every = [(totals[j] - totals[i]) / (times[j] - times[i]) for i, j in pairs]
    found = densest(times, totals, 0)
    fast = any(times[j] - times[i] < SHORTEST for i, j in pairs)
    if total < LEAST or not every or fast:
        assert found == 0
    else:
        # The shortest sufficient intervals end at every sample; none is missed.
        assert 0 < found <= max(every) * (1 + 1e-9)
        shortest = max((totals[j] - totals[i]) / (times[j] - times[i]) for i, j in pairs if (i + 1, j) not in pairs)
        assert found == pytest.approx(shortest)
