"""Ring orders against brute force and obvious cases."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.collectives.topology.ring_order import EXACT, best, score


def matrices(low, high, *values):
    """Square matrices with few different values, so that ties are common."""
    figures = st.sampled_from(values) if values else st.floats(1.0, 1e9)
    return st.integers(low, high).flatmap(
        lambda n: st.lists(figures, min_size=n * n, max_size=n * n).map(lambda f: np.array(f).reshape(n, n))
    )


def by_trying(rates):
    return max(score([0, *rest], rates) for rest in permutations(range(1, len(rates))))


@given(matrices(3, 7) | matrices(3, 7, 1.0, 2.0, 5.0, 9.0))
@settings(max_examples=60, deadline=None)
def test_ring_order_maximizes_slowest_link_then_sum(rates):
    order = best(rates)
    assert sorted(order) == list(range(len(rates))) and order[0] == 0
    wanted = by_trying(rates)
    assert score(order, rates) == (wanted[0], pytest.approx(wanted[1], rel=1e-12))


def test_ring_order_is_exact_up_to_twelve_peers():
    """A ring of fast links among slow ones is found, although slower links away from it have larger sums."""
    rng = np.random.default_rng(5)
    planted = [0, *(rng.permutation(EXACT - 1) + 1).tolist()]
    rates = np.where(rng.random((EXACT, EXACT)) < 0.5, 1.0, 100.0)
    for a, b in zip(planted, [*planted[1:], planted[0]], strict=True):
        rates[a, b] = 2.0
    np.fill_diagonal(rates, 0)
    assert score(best(rates), rates)[0] >= 2.0


@given(matrices(EXACT + 1, 20))
@settings(max_examples=15, deadline=None)
def test_ring_order_of_many_peers_is_no_worse_than_given_order(rates):
    order = best(rates)
    assert sorted(order) == list(range(len(rates))) and order[0] == 0
    given = score(list(range(len(rates))), rates)
    found = score(order, rates)
    assert found[0] >= given[0] and (found[0] > given[0] or found[1] >= given[1] - 1e-6 * abs(given[1]))


@pytest.mark.parametrize("regions", [2, 4])
def test_ring_order_enters_each_region_once(regions):
    """Peers of one region follow each other, for any order of the input."""
    rng = np.random.default_rng(7)
    place = rng.permutation(np.arange(8 * regions) % regions)
    rates = np.where(place[:, None] == place[None, :], 100.0, 1.0)
    order = best(rates)
    crossings = sum(place[a] != place[b] for a, b in zip(order, [*order[1:], order[0]], strict=True))
    assert crossings == regions


def test_ring_order_avoids_failing_link():
    rng = np.random.default_rng(8)
    rates = rng.uniform(1.0, 2.0, (40, 40))
    for at in range(39):
        rates[at, at + 1] = 0.01
    assert score(best(rates), rates)[0] >= 1.0


def test_ring_order_depends_on_link_direction():
    rates = np.ones((4, 4))
    for a, b in ((0, 3), (3, 2), (2, 1), (1, 0)):
        rates[a, b] = 5.0
    assert best(rates) == [0, 3, 2, 1]


def test_ring_order_ignores_unknown_links():
    assert best(np.zeros((5, 5))) == best(np.full((5, 5), np.nan)) == [0, 1, 2, 3, 4]
    assert best(np.ones((1, 1))) == [0] and best(np.ones((2, 2))) == [0, 1] and best(np.zeros((0, 0))) == []
    rates = np.zeros((5, 5))
    rates[0, 1], rates[0, 2], rates[2, 3] = 1.0, 8.0, 4.0
    order = best(rates)
    assert (0, 1) not in zip(order, [*order[1:], order[0]], strict=True), "one that is known to be slow is avoided"
    with pytest.raises(ValueError, match="square"):
        best(np.ones((2, 3)))


def test_ring_order_is_deterministic():
    for count in (9, 33):
        rates = np.random.default_rng(1).uniform(1, 2, (count, count))
        assert best(rates) == best(rates.copy())


def length(order, trips):
    return sum(float(trips[a, b]) for a, b in zip(order, [*order[1:], order[0]], strict=True))


def symmetric(n, seed):
    """Points in a plane, and the times between them."""
    points = np.random.default_rng(seed).random((n, 2))
    return np.hypot(*(points[:, None] - points[None]).transpose(2, 0, 1))


@pytest.mark.parametrize("n", [3, 5, 7])
def test_ring_order_takes_shortest_latency(n):
    trips = symmetric(n, n)
    found = length(best(np.zeros((n, n)), trips), trips)
    assert found == pytest.approx(min(length([0, *rest], trips) for rest in permutations(range(1, n))))
    rates = np.random.default_rng(n).uniform(1.0, 1.4, (n, n)) * 2**20
    assert length(best(rates, trips), trips) == pytest.approx(found), "rates as good as alike"


def test_ring_order_avoids_slow_link_at_any_latency():
    trips, rates = symmetric(7, 1), np.full((7, 7), 1e7)
    short = best(rates, trips)
    rates[short[0], short[1]] = rates[short[1], short[0]] = 1e6
    order = best(rates, trips)
    assert score(order, rates)[0] == 1e7 and length(order, trips) >= length(short, trips)


@pytest.mark.parametrize("seed", range(3))
def test_ring_order_of_many_peers_is_nearly_shortest(seed):
    n = 40
    trips = symmetric(n, seed)
    order = best(np.zeros((n, n)), trips)
    assert sorted(order) == list(range(n)) and order[0] == 0
    # Beardwood, Halton and Hammersley: 0.7124 times the root of n times the area, and a little more for few points.
    assert length(order, trips) < 1.25 * 0.7124 * n**0.5 * (1 + 0.33 / n**0.5)


def test_unknown_latency_counts_as_the_longest():
    trips = symmetric(6, 4)
    order = best(np.zeros((6, 6)), trips)
    for a, b in ((order[0], order[2]), (order[1], order[4])):
        trips[a, b] = trips[b, a] = 0.0
    assert best(np.zeros((6, 6)), trips) in (order, [order[0], *reversed(order[1:])])
