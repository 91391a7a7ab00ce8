"""Inner steps by computing power."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.node.training.step_balancing import steps_by_power

SPEEDS = st.lists(st.floats(1.0, 1e6), min_size=1, max_size=9)


@pytest.mark.parametrize(
    ("own", "others", "steps"),
    [
        (100.0, [100.0, 100.0], 20),
        (25.0, [100.0, 100.0, 100.0], 5),
        (100.0, [25.0, 100.0, 100.0], 20),
        (100.0, [25.0], 20),  # of two, the faster one sets the time
        (25.0, [100.0], 5),
        (200.0, [100.0, 100.0], 40),
        (1e9, [100.0, 100.0], 80),  # at most spread times H
        (1.0, [1e9, 1e9], 1),  # and at least one
        (100.0, [], 20),
        (100.0, [0.0, math.nan, math.inf, -5.0], 20),  # these values are no evidence
        (0.0, [100.0, 100.0], 5),  # not measured yet
        (math.nan, [100.0], 5),
    ],
)
def test_steps_by_power_fit_the_time_of_the_median_peer(own: float, others: list[float], steps: int) -> None:
    assert steps_by_power(own, others, 20, 4.0) == steps


@given(SPEEDS)
def test_steps_by_power_make_peers_finish_together(speeds: list[float]) -> None:
    steps = 1000
    times = []
    for place, own in enumerate(speeds):
        mine = steps_by_power(own, speeds[:place] + speeds[place + 1 :], steps, 8.0)
        assert 1 <= mine <= 8000
        if round(steps / 16) < mine < 8000:
            times.append((mine / own, 0.5 / own))
    for seconds, slack in times:
        assert all(abs(seconds - other) <= slack + more + 1e-9 * seconds for other, more in times)


@given(st.lists(st.floats(50.0, 200.0), min_size=3, max_size=9), st.floats(1e-3, 1e12))
def test_one_liar_cannot_change_steps_much(speeds: list[float], lie: float) -> None:
    own, rest = speeds[0], speeds[1:]
    assert 5 <= steps_by_power(own, [*rest[1:], lie], 20, 4.0) <= 80


def test_steps_by_power_of_two_peers_are_bounded() -> None:
    assert steps_by_power(1000.0, [1e300], 160, 4.0) == 10
