"""Chunk shares by bandwidth: optimal, complete, bounded, and equal where nothing is known or gained."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.topology import shards
from thinwire.collectives.topology.bandwidth_shares import GAIN, MOST, PeerLoad, allot, seconds

LOADS = st.lists(
    st.builds(PeerLoad, st.integers(1, 200), st.integers(1, 200), st.booleans(), st.booleans()), min_size=2, max_size=4
)


def most(count, loads):
    return max(-(-MOST * count // len(loads)), -(-count // sum(load.owns for load in loads)))


def equal(count, loads):
    owners = [at for at, load in enumerate(loads) if load.owns]
    run, odd = divmod(count, len(owners))
    return [run + (owners.index(at) < odd) if at in owners else 0 for at in range(len(loads))]


def divisions(count, loads):
    """Yield all divisions of the chunks among possible owners within the bound."""
    ranges = [range(min(count, most(count, loads)) + 1) if load.owns else (0,) for load in loads]
    return [counts for counts in product(*ranges) if sum(counts) == count]


@given(st.integers(1, 8), LOADS)
def test_no_other_division_is_faster(count, loads):
    owned = allot(count, loads)
    if sum(load.owns for load in loads) < 2:
        assert owned == ()
        return
    best = min(max(seconds(loads, counts)) for counts in divisions(count, loads))
    usual = max(seconds(loads, equal(count, loads)))
    if owned:
        assert sum(owned) == count and max(owned) <= most(count, loads)
        assert not any(chunks for chunks, load in zip(owned, loads, strict=True) if not load.owns)
        assert max(seconds(loads, owned)) == pytest.approx(best)
        assert usual >= GAIN * best * (1 - 1e-9)
    else:
        assert usual < GAIN * best * (1 + 1e-9)


@given(st.integers(1, 1024), st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=40))
def test_every_chunk_is_assigned_once_within_the_bound(count, links):
    loads = [PeerLoad(up, down) for up, down in links]
    owned = allot(count, loads)
    assert owned == () or (sum(owned) == count and 0 <= min(owned) <= max(owned) <= most(count, loads))


@given(st.integers(1, 512), st.lists(st.integers(1, 1000), min_size=3, max_size=12), st.integers(1, 50), st.data())
def test_faster_link_never_owns_fewer_chunks(count, links, more, data):
    at = data.draw(st.integers(0, len(links) - 1))
    faster = [rate + more * (i == at) for i, rate in enumerate(links)]
    before, after = (allot(count, [PeerLoad(rate, rate) for rate in rates]) for rates in (links, faster))
    if before and after:
        assert after[at] >= before[at]


@pytest.mark.parametrize("count", [1, 2, 31, 100, 1024])
@pytest.mark.parametrize("peers", [1, 2, 3, 7, 100])
def test_equal_links_get_equal_shares(count, peers):
    assert allot(count, [PeerLoad(0, 0)] * peers) == (), "nothing is known"
    assert allot(count, [PeerLoad(1000, 500)] * peers) == (), "all are alike"
    assert allot(count, [PeerLoad(1000 + 10 * (i % 7), 0) for i in range(peers)]) == (), "hardly a difference"


def test_few_owners_do_not_raise_the_share_of_one():
    loads = [*[PeerLoad(10**9, 10**9)] * 3, *[PeerLoad(1000, 1000)] * 3, *[PeerLoad(1000, 1000, owns=False)] * 6]
    assert max(allot(120, loads)) == MOST * 120 / 12


def test_two_peers_get_equal_shares():
    assert allot(64, [PeerLoad(1, 1), PeerLoad(10**9, 10**9)]) == ()


def test_too_slow_link_owns_nothing():
    fast, slow = PeerLoad(100, 100), PeerLoad(10, 10)
    assert allot(96, [fast, fast, slow, fast]) == (32, 32, 0, 32)
    assert allot(96, [fast, fast, fast, PeerLoad(70, 70)])[3] == pytest.approx(
        96 / 4 * 0.24, abs=2
    )  # 70·T = 1, see below
    # With T the time of all: 3 · (100 T − 1) / 2 + (70 T − 1) / 2 = 1.


def test_unknown_bandwidth_counts_as_usual():
    known = [PeerLoad(100, 100), PeerLoad(100, 100), PeerLoad(10, 10)]
    assert allot(99, [*known, PeerLoad(0, 0)]) == allot(99, [*known, PeerLoad(100, 100)]) != ()
    assert allot(99, [PeerLoad(100, 0), PeerLoad(100, 0), PeerLoad(10, 0), PeerLoad(0, 0)]) == allot(
        99, [*known, PeerLoad(100, 100)]
    )


def test_liar_gets_at_most_the_bound():
    links = [PeerLoad(100, 100)] * 3
    assert allot(96, [*links, PeerLoad(2**40, 2**40)]) == (8, 8, 8, 72)
    # A link that slow makes this twice as bad as equal parts, and no worse.
    truth = [*links, PeerLoad(10, 10)]
    assert max(seconds(truth, (8, 8, 8, 72))) <= (1 + MOST) / 2 * max(seconds(truth, [24] * 4))


@given(st.integers(10, 1024), st.lists(st.tuples(*[st.integers(1, 10**6)] * 3), min_size=3, max_size=20))
def test_lies_lengthen_a_round_only_within_the_bound(count, links):
    owned = allot(count, [PeerLoad(up, down) for up, down, _ in links])
    truth = [PeerLoad(rate, rate) for *_, rate in links]
    usual = max(seconds(truth, equal(count, truth)))
    rounding = len(links) / min(rate for *_, rate in links)  # one chunk more than MOST shares, to all
    assert not owned or max(seconds(truth, owned)) <= (1 + MOST) / 2 * usual + rounding


def test_non_contributor_owns_more_chunks():
    owned = allot(60, [PeerLoad(10, 1000)] * 2 + [PeerLoad(10, 1000, contributes=False)] * 4)
    assert owned and min(owned[2:]) > 10 > max(owned[:2])


def test_idle_peer_owns_no_chunks():
    fast, slow = PeerLoad(100, 100), PeerLoad(10, 10)
    owned = allot(90, [fast, PeerLoad(100, 100, owns=False), fast, fast, slow])
    assert owned == (30, 0, 30, 30, 0)


@pytest.mark.parametrize("count", [1, 3])
def test_small_fragments_are_spread_over_equal_peers(count):
    """One link is slow, so shares follow bandwidth; no peer is preferred for its place."""
    loads = [PeerLoad(100, 100), *[PeerLoad(1000, 1000)] * 4]
    owned = [allot(count, loads, fragment) or shards.equal(count, 5, fragment) for fragment in range(20)]
    totals = [sum(counts) for counts in zip(*owned, strict=True)]
    assert totals[0] == 0 and sum(totals) == 20 * count
    assert max(totals) <= 2 * min(totals[1:])
