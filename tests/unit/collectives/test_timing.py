"""Patience of rounds, and the time at which slow senders are late."""

from __future__ import annotations

import math

import pytest
from thinwire.collectives.timing import MAX_PATIENCE, SLOW_FACTOR, Halfway, Patience


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
