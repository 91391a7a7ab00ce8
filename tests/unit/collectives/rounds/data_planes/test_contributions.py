"""Contributions to owned chunks: checks, norms, and what they teach about the usual norm."""

import math

import blake3
import numpy as np
import pytest
from thinwire.collectives.rounds.data_planes.contributions import (
    Contributions,
    ContributionSummary,
    announced_norm,
    summarize,
)
from thinwire.collectives.topology.shards import Grid
from thinwire.compression import registry
from thinwire.swarm.messages.registry import Contribution

ANN, BEN, CAT = (bytes([number]) * 32 for number in (1, 2, 3))
CODEC, GRID = registry.parse("fp32"), Grid(8, 4)
HASH, NAME, OTHER = b"h" * 32, b"n" * 32, b"o" * 32


def chunk(norm):
    return np.array([norm, 0.0, 0.0, 0.0], np.float32).tobytes()


def entries(*peers, attempt=1):
    return [Contribution(peer, attempt, 10) for peer in peers]


def held(usual=None, attempt=1, **norms):
    """Return contributions to chunk 0 with these norms, by peer."""
    found = Contributions(CODEC, GRID, {} if usual is None else usual)
    for name, norm in norms.items():
        peer = {"ann": ANN, "ben": BEN, "cat": CAT}[name]
        assert found.take((peer, attempt), 0, chunk(norm), found=HASH, announced=HASH) == ""
    return found


def test_chunks_of_all_contributors_are_returned_in_their_order():
    found = held(ann=1.0, ben=2.0)
    assert found.of(entries(BEN, ANN), 0) == [chunk(2.0), chunk(1.0)]
    assert found.of(entries(ANN, CAT), 0) is None and found.of(entries(ANN), 1) is None
    assert found.of(entries(ANN, attempt=2), 0) is None
    assert (len(found), found.nbytes) == (2, 32)


@pytest.mark.parametrize(
    ("payload", "hashed", "reason"),
    [
        (chunk(1.0), b"a" * 32, "hash"),
        (chunk(1.0), OTHER, "hash"),
        (chunk(np.nan), HASH, "not finite"),
        (chunk(1.0)[:8], HASH, "length"),
    ],
)
def test_invalid_chunk_is_not_stored(payload, hashed, reason):
    found = held()
    assert found.take((ANN, 1), 0, payload, found=hashed, announced=HASH) == reason
    assert not found.has((ANN, 1), 0) and len(found) == 0


def test_dropped_chunk_can_be_replaced():
    found = held(ann=1.0)
    found.drop((ANN, 1), 0)
    assert not found.has((ANN, 1), 0)
    assert found.take((ANN, 1), 0, chunk(3.0), found=HASH, announced=HASH) == ""
    assert found.of(entries(ANN), 0) == [chunk(3.0)]


def test_contributor_beyond_the_usual_norm_is_named_and_not_learned():
    usual = {0: 1.0}
    found = held(usual, ann=0.5, ben=5000.0)
    assert found.outliers(entries(ANN, BEN), NAME, 0) == (BEN,)
    assert usual == {0: 1.0}, "before the commit"
    found.finish(NAME)
    assert usual == {0: pytest.approx(0.95)} and len(found) == 0


def test_norms_of_other_contributors_are_not_learned():
    usual = {0: 1.0}
    found = held(usual, ann=0.5, ben=2.0)
    found.outliers(entries(ANN), OTHER, 0)
    found.outliers(entries(BEN), NAME, 0)
    found.finish(NAME)
    assert usual == {0: pytest.approx(1.1)}


def test_round_that_does_not_learn_leaves_the_usual_norm():
    usual = {0: 1.0}
    found = held(usual, ann=0.5)
    found.outliers(entries(ANN), NAME, 0)
    found.finish(NAME, learns=False)
    assert usual == {0: 1.0}


@pytest.mark.parametrize(("name", "next"), [(NAME, OTHER), (OTHER, NAME)])
def test_limit_grows_for_the_next_contributors_after_all_were_beyond(name, next):
    found = held({0: 1.0}, ann=5000.0, ben=7000.0)
    for _ in range(3):
        assert found.outliers(entries(ANN, BEN), name, 0) == (ANN, BEN), "the same contributors change nothing"
    assert found.outliers(entries(ANN), next, 0) == ()


def test_lent_chunk_counts_with_its_norm():
    site, wide = held(ann=5000.0), held({0: 1.0}, ben=1.0)
    site.lend((ANN, 1), 0, wide, (CAT, 7))
    assert wide.of([Contribution(CAT, 7, 1)], 0) == [chunk(5000.0)]
    assert wide.outliers([Contribution(BEN, 1, 1), Contribution(CAT, 7, 1)], NAME, 0) == (CAT,)


def test_own_chunk_is_lent_without_a_norm():
    site, wide = held(), held({0: 1.0}, ben=1.0)
    site.store(ANN, 1, 0, chunk(5000.0))
    site.lend((ANN, 1), 0, wide, (ANN, 1))
    assert wide.outliers(entries(ANN, BEN), NAME, 0) == ()


def test_old_announcements_of_one_peer_are_forgotten():
    found = held(ann=1.0, ben=1.0, cat=1.0)
    found.take((BEN, 2), 0, chunk(2.0), found=HASH, announced=HASH)
    found.forget(BEN, (2,))
    assert [found.has((peer, 1), 0) for peer in (ANN, BEN, CAT)] == [True, False, True] and found.has((BEN, 2), 0)


def test_limit_grows_when_all_but_empty_contributions_were_beyond():
    found = held({0: 1.0}, ann=5000.0, ben=0.0)
    assert found.outliers(entries(ANN, BEN), NAME, 0) == (ANN,)
    assert found.outliers(entries(ANN), OTHER, 0) == ()


def test_limit_stays_when_one_small_contribution_was_not_beyond():
    found = held({0: 1.0}, ann=5000.0, ben=0.5)
    assert found.outliers(entries(ANN, BEN), NAME, 0) == (ANN,)
    assert found.outliers(entries(ANN), OTHER, 0) == (ANN,)


def test_norms_of_the_first_round_are_its_own_measure():
    usual = {}
    found = held(usual, ann=5000.0, ben=7000.0, cat=9e7)
    assert found.outliers(entries(ANN, BEN, CAT), NAME, 0) == (CAT,)
    found.finish(NAME)
    assert usual == {0: pytest.approx(5000.0)}


def test_norm_of_a_chunk_that_was_not_screened_is_zero():
    found = held(ann=2.0)
    assert found.norm((ANN, 1), 0) == pytest.approx(2.0)
    assert found.norm((ANN, 1), 1) == found.norm((ANN, 2), 0) == found.norm((BEN, 1), 0) == 0.0


def test_ratios_are_norms_in_units_of_the_limit_of_chunks_with_enough_norms():
    found = held(ann=1.0, ben=2.0, cat=8.0)
    assert found.ratios(entries(ANN, BEN, CAT)) == pytest.approx({ANN: 0.5, BEN: 1.0, CAT: 4.0})
    assert found.ratios(entries(ANN)) == {}


def test_summary_has_hash_and_rounded_norm_of_each_chunk():
    grid, largest = Grid(7, 3), np.finfo(np.float32).max
    values = np.array([3, 4, 0, largest, largest, 0, 0.1], np.float32)
    chunks = [values[slice(*grid.span(index))].tobytes() for index in range(len(grid))]
    summary = summarize(chunks, CODEC, grid)
    assert summary.hashes == b"".join(blake3.blake3(chunk).digest() for chunk in chunks)
    assert summary.norms == np.array([5.0, np.inf, np.float32(0.1)], "<f4").tobytes()
    assert [announced_norm(summary.norms, index) for index in range(4)] == [5.0, math.inf, np.float32(0.1), math.inf]
    assert announced_norm(summary.norms[:-1], 2) == math.inf
    assert announced_norm(np.array([np.nan, -1.0], "<f4").tobytes(), 0) == math.inf
    assert announced_norm(np.array([np.nan, -1.0], "<f4").tobytes(), 1) == math.inf
    assert summarize(chunks) == ContributionSummary(summary.hashes)
