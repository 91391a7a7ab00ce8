"""Patience of rounds."""

from __future__ import annotations

import pytest
from thinwire.collectives.timing import MAX_PATIENCE, Patience


def test_patience_approaches_three_times_the_usual_duration_between_its_limits():
    patience = Patience(2.0)
    assert patience.seconds == 2.0
    for took, limit in ((0.1, 2.0), (5.0, 15.0), (1000.0, MAX_PATIENCE)):
        for _ in range(40):
            patience.observe(took)
        assert patience.seconds == pytest.approx(limit, rel=1e-4)


def test_patience_follows_one_long_exchange_by_three_tenths():
    patience = Patience(10.0)
    patience.observe(10.0)
    assert patience.seconds == pytest.approx(0.7 * 10.0 + 0.3 * 30.0)


def test_one_exchange_that_an_outage_interrupted_at_most_doubles_patience():
    patience = Patience(2.0)
    patience.observe(1000.0)
    assert patience.seconds == 4.0
