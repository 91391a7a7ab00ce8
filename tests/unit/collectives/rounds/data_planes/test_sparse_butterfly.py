"""Chunk ownership of sparse sums, the cutting of fragments, and lost residuals."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
from thinwire.collectives.rounds.data_planes.sparse_butterfly import HOLD, PARTS, OwnerResiduals, parts, steady
from thinwire.collectives.topology.shards import Grid
from thinwire.compression.sparse.portions import PortionCodecs
from thinwire.compression.sparse.topk import Sparse
from thinwire.swarm.messages.registry import CHUNK_BYTES

RUN = bytes(range(32))
PORTIONS = PortionCodecs(Sparse(64), Sparse(256))


def people(count):
    return tuple(sorted(hashlib.blake2b(str(i).encode(), digest_size=32).digest() for i in range(count)))


@pytest.mark.parametrize("count, peers", [(128, 1), (128, 5), (128, 64), (7, 16)])
def test_peers_own_equally_many_chunks(count, peers):
    view = people(peers)
    found = steady(count, view, RUN)
    loads = Counter(found)
    assert len(found) == count and set(found) <= set(view)
    assert max(loads.values()) - min(loads.get(peer, 0) for peer in view) <= 1
    assert steady(count, view, bytes(32)) != found or peers == 1


def test_small_fragments_are_owned_by_different_peers():
    view = people(8)
    found = Counter(steady(1, view, RUN, fragment)[0] for fragment in range(64))
    assert set(found) == set(view) and max(found.values()) <= 16
    assert steady(128, view, RUN, 0) == steady(128, view, RUN)


@pytest.mark.parametrize("peers", [4, 16, 50])
def test_few_chunks_change_owner_when_a_peer_comes_or_goes(peers):
    view = people(peers)
    before = steady(128, view, RUN)
    for gone in view[:4]:
        after = steady(128, tuple(peer for peer in view if peer != gone), RUN)
        moved = sum(a != b for a, b in zip(before, after, strict=True))
        assert before.count(gone) <= moved <= 3 * 128 / peers + 8


@pytest.mark.parametrize("total", [1, 4096, 20_000, 3_000_000, 10**9, 5 * 10**9])
def test_fragment_is_cut_into_one_chunk_per_possible_owner(total):
    cut = parts(total, PORTIONS, 4096)
    assert cut.chunk % 4096 == 0 and cut.total == total
    assert len(cut) == min(-(-total // 4096), len(cut)) and (len(cut) > PARTS // 2 or cut.chunk == 4096)
    assert PORTIONS.nbytes(cut.chunk) <= CHUNK_BYTES
    if total <= 10**9:
        assert len(cut) <= PARTS


def test_fragment_that_needs_too_many_chunks_is_refused():
    with pytest.raises(ValueError, match="chunks, the limit is"):
        parts(10**11, PORTIONS, 4096)


def rest(*values):
    return np.array(values, np.float32)


def test_residual_of_lost_chunk_is_dropped_after_hold_and_counted():
    kept = OwnerResiduals()
    kept.prepare(1, {3: rest(3.0, 4.0), 5: rest(1.0, 0.0)})
    assert kept.of(3) is None  # a verdict alone changes nothing
    kept.commit(1)
    for number in range(2, 2 + HOLD):
        kept.prepare(number, {5: rest(1.0, float(number))})
        kept.commit(number)
        assert kept.lost == (0, 0.0) and set(kept.all()) == {3, 5} and kept.of(5)[1] == number
        np.testing.assert_array_equal(kept.of(3), [3.0, 4.0])
    kept.commit(2 + HOLD)
    assert kept.of(3) is None and kept.of(5) is not None and kept.lost == (1, 25.0)
    kept.prepare(3 + HOLD, {7: rest(1.0, 1.0)})
    kept.clear()
    kept.commit(3 + HOLD)
    assert not kept.all() and kept.lost == (2, 26.0 + (1 + HOLD) ** 2)


def test_uncommitted_residual_counts_only_for_its_round():
    kept = OwnerResiduals()
    kept.prepare(4, {3: rest(1.0)})
    kept.commit(5)
    kept.commit(4)
    assert not kept.all()


def test_restored_residual_is_used_where_it_fits():
    cut, kept = Grid(10, 4), OwnerResiduals()
    whole = {0: rest(1, 2, 3, 4), 1: rest(5, 6, 7, 8), 2: rest(9, 10)}
    kept.prepare(6, whole)
    kept.commit(6)
    other = OwnerResiduals()
    assert other.load(kept.all(), cut, 6) == 0
    assert other.all().keys() == whole.keys() and all(np.array_equal(other.of(i), one) for i, one in whole.items())
    other.prepare(7, {1: rest(1, 1, 1, 1)}, others={2})
    other.commit(7)
    # The result of the first may be one that an earlier life has made with what it had kept.
    assert other.all().keys() == {1, 2} and other.lost == (1, 30.0)
    other.commit(6 + HOLD)
    assert other.all().keys() == {1, 2} and other.lost == (1, 30.0)
    wrong = {
        -1: rest(1, 2, 3, 4),
        0: np.array([[1, 2, 3, 4]], np.float32),
        1: np.array([1, 2, 3, 4], np.float64),
        2: rest(1, 2, 3, 4),
        3: rest(1, 2),
    }
    assert other.load(wrong, cut, 6) == 5 and not other.all()
    assert other.load({0: rest(1, 2, np.nan, 4), 2: rest(1, 2)}, cut, 6) == 1 and list(other.all()) == [2]
