"""Pace and links of other peers, derived from late reports."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.node.pipeline.planner.simulate_kernel import BACKWARD, LOSS
from thinwire.node.pipeline.step.measurements import ME, NEWEST, Measurements

A, B, C = (bytes([i]) * 32 for i in range(3))
WORK = {A: 2.0, B: 0.5}
LINKS = {(ME, A): 1.0, (A, B): 3.0, (B, ME): 0.25}
WORDS = {A: 0.7, B: 0.1}
"""Seconds that a peer's messages take to the origin."""


class Time:
    now = 0.0

    def __call__(self):
        return self.now


def link(a, b):
    return LINKS.get((a, b), LINKS.get((b, a)))


def go(measurements, now, micro, *, backward=False, waits=(), late=False):
    """Send a micro-batch over A and B, or its gradient back, with `waits[i]` seconds of queueing at each.

    All messages arrive in order.
    """
    peers = (B, A) if backward else (A, B)
    measurements.sent(micro, backward=backward)
    words, at = [], now.now
    for (before, peer), wait in zip(pairwise((ME, *peers)), waits or (0.0, 0.0), strict=True):
        work = WORK[peer] * (BACKWARD if backward else 1.0)
        at += link(before, peer) + wait + work
        words.append((at + WORDS[peer], peer, work))
    arrival = at + link(peers[-1], ME)
    for heard, peer, work in sorted(words):
        if heard <= arrival or late:
            now.now = max(now.now, heard)
            measurements.passed(peer, micro, work, backward=backward)
    now.now = max(now.now, arrival)
    measurements.arrived(micro, peers, backward=backward)


def scene():
    now = Time()
    return Measurements(now), now


def test_measured_links_do_not_depend_on_late_reports():
    measurements, now = scene()
    for micro in range(3):
        now.now += 100.0
        go(measurements, now, micro)
        now.now += 100.0
        go(measurements, now, micro, backward=True)
    for a, b in ((ME, A), (A, B), (B, ME)):
        assert measurements.delay(a, b) == measurements.delay(b, a) == pytest.approx(LINKS[a, b])
    assert measurements.work(A) == pytest.approx(2.0) and measurements.work(B) == pytest.approx(0.5)
    assert measurements.delay(A, C) is None and measurements.work(C) is None and measurements.work(ME) is None


def test_busy_peer_does_not_distort_link_measurement():
    measurements, now = scene()
    now.now = 10.0
    go(measurements, now, 0, waits=(0.0, 0.0))
    alone = measurements.delay(A, B)
    for micro in range(1, 4):  # two at a time: the second waits for the first
        now.now += 50.0
        measurements.sent(micro, backward=False)
        measurements.sent(micro + 10, backward=False)
        start = now.now
        for at, peer, number, work in (
            (3.7, A, micro, 2.0), (5.7, A, micro + 10, 2.0), (6.6, B, micro, 0.5), (40.0, B, micro + 10, 33.4),
        ):  # fmt: skip
            now.now = start + at
            measurements.passed(peer, number, work, backward=False)
        measurements.arrived(micro, (A, B), backward=False)
        measurements.arrived(micro + 10, (A, B), backward=False)
    assert measurements.delay(A, B) == pytest.approx(alone)
    assert measurements.delay(ME, A) == pytest.approx(1.0 + WORDS[A]), "one way only: with the words' time"
    waited = measurements.waited()
    assert waited[A] == pytest.approx(3 * (2.0 + 4.0) + 2.0) and measurements.waited() == {}


def test_outlier_measurements_are_ignored():
    measurements, now = scene()
    for micro in range(NEWEST):
        now.now += 100.0
        go(measurements, now, micro, waits=(0.0, 30.0) if micro in (2, 5) else ())
    assert measurements.delay(A, B) == pytest.approx(3.0 + WORDS[B] - WORDS[A])


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=12), st.booleans())
def test_reported_measurements_are_clamped(said, backward):
    measurements, now = scene()
    for micro, seconds in enumerate(said):
        now.now += 1.0
        measurements.sent(micro, backward=backward)
        now.now += 2.0
        measurements.passed(A, micro, seconds, backward=backward)
        measurements.passed(A, micro, 1.0, backward=backward)  # twice: the first counts
        measurements.passed(B, micro + 1, 1.0, backward=backward)  # not in progress
        measurements.arrived(micro, (A, C), backward=backward)
    assert measurements.work(A) is None, "of one direction only"
    for micro in range(2):
        measurements.sent(micro, backward=not backward)
        measurements.passed(A, micro, 0.0, backward=not backward)
    assert 0 < measurements.work(A) <= 2.0
    assert measurements.delay(ME, A) is None or 0 <= measurements.delay(ME, A) <= 2.0


def test_origin_compute_time_excludes_waiting():
    measurements, now = scene()
    for micro in range(3):
        start = now.now
        for part, seconds in (("begin", 1.0), ("turn", LOSS), ("finish", BACKWARD)):
            now.now += seconds
            measurements.own(part, start)  # all were asked for at once
        now.now += 7.0 * micro
    assert measurements.work(ME) == pytest.approx(1.0)


def test_unknown_measurements_default_to_known_ones():
    measurements, now = scene()
    options = {"length": 2, "paths": 4, "rounds": 3, "room": 5, "swaps": 1}
    blank = measurements.instance([[A], [B, C]], **options)
    assert set(blank.work) == {1.0} and set(blank.delays[~np.eye(4, dtype=bool)]) == {1.0}
    assert blank.stages == ((0,), (1,), (2, 3)) and list(blank.memory) == [4, 5, 5, 5]
    assert (blank.length, blank.per_start, blank.rounds, blank.swaps, blank.gap) == (2, 4, 3, 1, 0.0)
    now.now = 10.0
    go(measurements, now, 0)
    now.now += 50.0
    go(measurements, now, 0, backward=True)
    known = measurements.instance([[A], [B, C]], **options)
    assert known.delays[1, 2] == known.delays[2, 1] == pytest.approx(3.0)
    assert known.delays[0, 3] == pytest.approx(1.0) and known.delays[1, 3] == pytest.approx(1.0), "C: the median"
    assert known.work[3] == pytest.approx((2.0 + 0.5) / 2) and list(np.diag(known.delays)) == [0.0] * 4
