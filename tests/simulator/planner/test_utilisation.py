"""The model of compute utilisation against published tables and closed forms."""

import numpy as np
import pytest
from thinwire.collectives.costs.utilisation import ExchangeSchedule, TrainingWorkload, needed, utilisation

GRID = np.logspace(-1, 3, 50)
"""Bandwidths of the published tables, in Gbit/s."""

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
BITS, FP4 = 13.3, 3.3
METHODS = {
    "data parallel": (ExchangeSchedule(), BITS),
    "DiLoCo": (ExchangeSchedule(100), BITS),
    "streaming": (ExchangeSchedule(100, streaming=True), BITS),
    "overlapped": (ExchangeSchedule(100, streaming=True, overlap=1), BITS),
    "overlapped, fp4": (ExchangeSchedule(100, streaming=True, overlap=1), FP4),
}
# Gbit/s for 50, 80, 90, 95, 99 %, H = 100 (arXiv:2501.18512), in the order of METHODS.
PUBLISHED = {
    TrainingWorkload(1e9, 24, 0.1): (
        (86.8, 152.6, 184.2, 222.3, 569.0),
        (1.4, 6.2, 13.3, 23.3, 86.8),
        (1.4, 5.2, 9.1, 16.0, 28.1),
        (1.4, 4.3, 6.2, 9.1, 11.0),
        (0.4, 0.9, 1.7, 2.0, 3.0),
    ),
    TrainingWorkload(1e10, 48, 0.8): (
        (104.8, 222.3, 222.3, 268.3, 471.5),
        (1.7, 7.5, 16.0, 33.9, 104.8),
        (1.7, 5.2, 9.1, 13.3, 19.3),
        (1.7, 3.6, 5.2, 6.2, 7.5),
        (0.4, 0.9, 1.4, 1.4, 1.7),
    ),
    TrainingWorkload(1e11, 108, 4.9): (
        (184.2, 323.8, 390.7, 390.7, 471.5),
        (3.0, 11.0, 23.3, 49.4, 184.2),
        (2.4, 6.2, 9.1, 11.0, 19.3),
        (1.7, 3.6, 4.3, 5.2, 5.2),
        (0.5, 0.9, 1.1, 1.1, 1.4),
    ),
}
# DiLoCo by H, 405B, 126 layers, 26 s (arXiv:2503.09799); 12 bits fit best.
SCALING = {
    1: (126.5, 222.3, 268.3, 323.8, 323.8),
    10: (19.3, 72.0, 126.5, 184.2, 268.3),
    100: (2.0, 7.5, 16.0, 33.9, 126.5),
    300: (0.7, 3.0, 6.2, 13.3, 59.6),
}


def over(work, schedule, bits, gbits):
    """Return the utilisation over bandwidths in Gbit/s if a parameter takes `bits` bits on the wire."""
    return utilisation(work, schedule, work.parameters / work.layers * bits / (gbits * 1e9))


def place(gbits):
    """Index on the grid of a published, rounded bandwidth."""
    return int(np.argmin(np.abs(np.log(GRID / gbits))))


def steps_off(found, published):
    """Return the mean distance in grid steps; a target out of reach counts as the whole grid."""
    return [len(GRID) if f is None else place(f) - place(p) for f, p in zip(found, published, strict=True)]


def test_utilisation_matches_three_published_models_with_one_constant():
    off = [
        steps
        for work, rows in PUBLISHED.items()
        for (schedule, bits), row in zip(METHODS.values(), rows, strict=True)
        for steps in steps_off(needed(over(work, schedule, bits, GRID), GRID, TARGETS), row)
    ]
    assert len(off) == 75
    assert off.count(0) >= 65 and max(map(abs, off)) <= 1, off


def test_utilisation_with_another_constant_does_not_match():
    """The score would mean nothing if any constant reached it."""
    for bits in (10.0, 16.0):
        off = [
            steps
            for work, rows in PUBLISHED.items()
            for steps in steps_off(needed(over(work, ExchangeSchedule(100), bits, GRID), GRID, TARGETS), rows[1])
        ]
        assert off.count(0) <= 5


def test_utilisation_matches_scaling_law_table():
    work = TrainingWorkload(405e9, 126, 26.0)
    off = [
        steps
        for every, row in SCALING.items()
        for steps in steps_off(needed(over(work, ExchangeSchedule(every), 12.0, GRID), GRID, TARGETS), row)
    ]
    assert len(off) == 20
    assert off.count(0) >= 16 and max(map(abs, off)) <= 1, off


@pytest.mark.parametrize("every", [1, 7, 100])
def test_utilisation_of_one_layer_has_closed_form(every):
    """Without overlap: S·H computing (less unneeded activation gradients), then the transfer."""
    work, transfer = TrainingWorkload(1e6, 1, 0.6), np.array([0.0, 0.1, 3.0])
    computing = 0.4 * every
    found = utilisation(work, ExchangeSchedule(every), transfer, latency=0.05)
    np.testing.assert_allclose(found, computing / (computing + transfer + 0.05))


def test_slow_network_bounds_utilisation_at_any_overlap():
    """H·S cannot be shorter than the network's time for all layers."""
    work, transfer = TrainingWorkload(1e6, 12, 1.0), np.array([40.0])
    for schedule in (ExchangeSchedule(30), ExchangeSchedule(30, True), ExchangeSchedule(30, True, 5)):
        found = utilisation(work, schedule, transfer)[0]
        assert found <= 30.0 * (1 - 1 / 36) / (12 * 40.0) * 1.001


def test_more_overlap_never_lowers_utilisation():
    work, transfer = TrainingWorkload(1e9, 24, 0.1), np.geomspace(1e-4, 1.0, 9)
    by_overlap = [utilisation(work, ExchangeSchedule(100, True, overlap), transfer, 0.02) for overlap in range(4)]
    for less, more in zip(by_overlap, by_overlap[1:], strict=False):
        assert (more >= less - 1e-9).all()
    assert by_overlap[-1].max() <= 1 + 1e-12


@pytest.mark.parametrize(("layers", "every"), [(24, 100), (108, 100), (108, 10), (7, 3), (1, 1)])
def test_streaming_exchanges_every_layer_once_per_period(layers, every):
    sends = ExchangeSchedule(every, streaming=True).sends(layers)
    assert sorted(layer for sent in sends.values() for layer in sent) == list(range(layers))
    assert all(0 <= step < every for step in sends)


def test_bandwidth_needed_for_unreachable_utilisation_is_none():
    assert needed(np.array([0.2, 0.7]), np.array([1.0, 2.0]), (0.1, 0.5, 0.9)) == [1.0, 2.0, None]
