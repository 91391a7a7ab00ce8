"""Comparison of wall clocks: the values in order agree with medians of all values."""

import random
from statistics import median_high, median_low

from thinwire.collectives.health.clocks import Clocks


def test_distance_is_that_to_the_nearer_median_of_the_others():
    rng, clocks, ahead = random.Random(3), Clocks(), {}
    for _ in range(500):
        peer = bytes([rng.randrange(9)])
        if rng.random() < 0.2:
            clocks.forget(peer)
            ahead.pop(peer, None)
            continue
        value = float(rng.randrange(-5, 5))  # equal values of several peers, too
        others = [0.0, *(known for other, known in ahead.items() if other != peer)]
        wanted = min(value - median_low(others), value - median_high(others), key=abs) if len(others) > 1 else None
        assert clocks.compare(peer, value) == wanted
        ahead[peer] = value
