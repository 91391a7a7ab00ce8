"""Who owns which chunk of a sparse sum, how a fragment is cut, and what is counted as lost."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
from thinwire.collectives.sieve import PARTS, Kept, parts, steady
from thinwire.compression.portions import Portions
from thinwire.compression.sparse import Sparse
from thinwire.swarm.protocol import CHUNK_BYTES

RUN = bytes(range(32))
PORTIONS = Portions(Sparse(64), Sparse(256))


def people(count):
    return tuple(sorted(hashlib.blake2b(str(i).encode(), digest_size=32).digest() for i in range(count)))


@pytest.mark.parametrize("count, peers", [(128, 1), (128, 5), (128, 64), (7, 16)])
def test_all_own_equally_many(count, peers):
    view = people(peers)
    found = steady(count, view, RUN)
    loads = Counter(found)
    assert len(found) == count and set(found) <= set(view)
    assert max(loads.values()) - min(loads.get(peer, 0) for peer in view) <= 1
    assert steady(count, view, bytes(32)) != found or peers == 1


def test_small_fragments_are_not_all_kept_by_one():
    view = people(8)
    found = Counter(steady(1, view, RUN, fragment)[0] for fragment in range(64))
    assert set(found) == set(view) and max(found.values()) <= 16
    assert steady(128, view, RUN, 0) == steady(128, view, RUN)


@pytest.mark.parametrize("peers", [4, 16, 50])
def test_few_chunks_change_hands_when_somebody_comes_or_goes(peers):
    view = people(peers)
    before = steady(128, view, RUN)
    for gone in view[:4]:
        after = steady(128, tuple(peer for peer in view if peer != gone), RUN)
        moved = sum(a != b for a, b in zip(before, after, strict=True))
        assert before.count(gone) <= moved <= 3 * 128 / peers + 8


@pytest.mark.parametrize("total", [1, 4096, 20_000, 3_000_000, 10**9, 5 * 10**9])
def test_a_fragment_is_cut_into_as_many_chunks_as_peers_can_share(total):
    cut = parts(total, PORTIONS, 4096)
    assert cut.chunk % 4096 == 0 and cut.total == total
    assert len(cut) == min(-(-total // 4096), len(cut)) and (len(cut) > PARTS // 2 or cut.chunk == 4096)
    assert PORTIONS.nbytes(cut.chunk) <= CHUNK_BYTES
    if total <= 10**9:
        assert len(cut) <= PARTS


def test_a_fragment_that_needs_too_many_chunks_is_refused():
    with pytest.raises(ValueError, match="chunks, the limit is"):
        parts(10**11, PORTIONS, 4096)


def test_what_others_own_now_is_counted():
    kept = Kept()
    kept.put(3, np.array([3.0, 4.0], np.float32))
    kept.put(5, np.array([1.0, 0.0], np.float32))
    kept.drop(4)
    assert kept.lost == (0, 0.0)
    kept.drop(3)
    assert kept.of(3) is None and kept.of(5) is not None and kept.lost == (1, 25.0)
    kept.clear()
    assert kept.of(5) is None and kept.lost == (2, 26.0)
