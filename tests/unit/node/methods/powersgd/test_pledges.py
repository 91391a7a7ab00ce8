"""Pledges between the two rounds of a step: blame for a failed step, and its duration."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from thinwire.node.methods.powersgd import pledges
from thinwire.node.methods.powersgd.pledges import MOST, SIZE, Pledge
from thinwire.swarm.manifest.tables import MAX_WEIGHT
from thinwire.swarm.messages.registry import MAX_GROUP, Contribution

A, B, C, H = (letter * 32 for letter in (b"a", b"b", b"c", b"h"))


def pair(noted, first, second, members=(A, B, C, H)):
    """Play one step with these contributors of the first round, and of the second."""
    pledges.begin(noted, [Contribution(peer, 1, 10) for peer in first])
    assert pledges.weights(noted) == dict.fromkeys(first, 10)
    pledges.settle(noted, set(second), members)
    assert not pledges.weights(noted)
    return pledges.resting(noted)


def test_repeated_broken_pledges_lengthen_the_rest():
    noted, rests = {}, []
    for _ in range(8):
        assert pair(noted, (A, B, H), (A, B)) == {H}
        rests.append(1)
        while pair(noted, (A, B), (A, B)):
            rests[-1] += 1
    assert rests == [1, 2, 4, 8, 16, 32, 32, 32]
    assert MOST == 6


def test_fulfilled_pledges_reduce_the_count():
    noted = {H: Pledge(broken=2)}
    assert not pair(noted, (A, H), (A, H)) and noted == {H: Pledge(broken=1)}
    assert pair(noted, (A, B, H), (A, H)) == {B} and noted[H].broken == 1
    pair(noted, (A, H), (A, H))
    assert noted == {B: Pledge(broken=1)}
    pair(noted, (A, H), (A, H), members=(A, H))
    assert not noted


def test_nobody_is_blamed_when_more_than_half_are_missing():
    assert not pair({}, (A, B, C), (A,))
    assert not pair({}, (A, B), ())
    assert pair({}, (A, B), (B,)) == {A}
    assert pair({}, (A, B, C, H), (A, C)) == {B, H}


@given(
    st.dictionaries(
        st.binary(min_size=32, max_size=32).filter(any),
        st.builds(Pledge, st.integers(0, MAX_WEIGHT), st.integers(0, MOST), st.integers(0, 1 << MOST)),
        max_size=20,
    )
)
def test_pledges_round_trip(noted):
    numbers = np.ones(SIZE, np.float32)
    pledges.write(noted, numbers)
    assert pledges.read(numbers) == noted and np.isfinite(numbers).all()


def test_excess_pledges_keep_current_and_longest_resting_peers():
    noted = {bytes([i % 256, 1 + i // 256]) * 16: Pledge(i < MAX_GROUP and i + 1, 1, i % 33) for i in range(700)}
    numbers = np.zeros(SIZE, np.float32)
    pledges.write(noted, numbers)
    kept = pledges.read(numbers)
    assert len(kept) == 2 * MAX_GROUP and pledges.weights(kept) == pledges.weights(noted)
    assert min(one.rest for one in kept.values() if not one.weight) >= max(
        one.rest for peer, one in noted.items() if peer not in kept
    )


@given(st.integers(0, 2**32 - 1))
def test_decoded_pledges_are_within_bounds(seed):
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 2**32, SIZE, np.uint32).view(np.float32)
    for one in pledges.read(numbers).values():
        assert 0 <= one.weight <= MAX_WEIGHT and 0 <= one.broken <= MOST and 0 <= one.rest <= 1 << MOST
