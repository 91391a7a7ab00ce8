"""Patience of rounds, and the time at which slow senders are late."""

from __future__ import annotations

import math

import pytest
from thinwire.collectives.timing import MAX_PATIENCE, STALL, Halfway, Patience


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


def test_senders_are_late_some_time_after_half_of_all_and_never_before():
    half = Halfway(100.0)
    half.note(0, 0, 101.0)
    half.note(1, 3, 102.0)
    assert half.seconds is None and half.late_at(100.0, 1.0) == math.inf
    half.note(2, 3, 104.0)
    half.note(3, 3, 190.0)  # the last one does not matter
    assert half.seconds == 4.0
    assert half.late_at(100.0, 1.0) == 104.0 + STALL * 4.0
    assert half.late_at(100.0, 60.0) == 104.0 + 60.0
    assert half.late_at(150.0, 60.0) == 150.0 + 60.0  # a new ballot asks for other data
