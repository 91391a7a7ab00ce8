"""Grids, shares and owners: pure functions that every peer computes alike."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.topology.shards import MIN_CHUNK, Grid, grid, owners, shares
from thinwire.compression import registry
from thinwire.swarm.messages.registry import CHUNK_BYTES, MAX_CHUNKS, Chunk

PEERS = tuple(bytes([i]) * 32 for i in range(12))
CODECS = ["fp32", "int8(block=256)", "int8(block=64)", "int4(block=256)", "int3(block=256)", "e3m0(block=256)"]


@given(st.integers(1, 200_000_000), st.sampled_from(CODECS))
def test_grid_covers_each_element_once_and_fits_the_wire(total, spec):
    codec = registry.parse(spec)
    cut = grid(total, codec)
    assert 1 <= len(cut) <= MAX_CHUNKS and cut.chunk % MIN_CHUNK == 0
    assert cut.span(0)[0] == 0 and cut.span(len(cut) - 1)[1] == total
    for index in {0, len(cut) // 2, len(cut) - 1}:
        start, stop = cut.span(index)
        assert cut.size(index) == stop - start > 0
        assert codec.nbytes(stop - start) <= Chunk.payload
        if index + 1 < len(cut):
            assert cut.span(index + 1)[0] == stop


def test_too_fine_grid_is_refused():
    codec = registry.parse("fp32")
    most = MAX_CHUNKS * CHUNK_BYTES // 4
    assert len(grid(most, codec)) == MAX_CHUNKS
    with pytest.raises(ValueError, match="limit"):
        grid(most + 1, codec)


@given(st.integers(0, 300), st.integers(1, 12))
def test_shares_are_equal_runs(count, n):
    group = PEERS[:n]
    owned = shares(count, group)
    assert len(owned) == count
    # Chunks of a peer are consecutive, in the order of the group.
    assert list(owned) == sorted(owned, key=group.index)
    lengths = [Counter(owned)[peer] for peer in group]
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


@given(st.integers(1, 200), st.integers(1, 12), st.binary(min_size=1, max_size=8), st.data())
def test_only_chunks_of_departed_owners_move(count, n, seed, data):
    group = PEERS[:n]
    before = owners(count, group, group, seed)
    assert before == shares(count, group)
    alive = data.draw(st.sets(st.sampled_from(group), min_size=1))
    after = owners(count, group, sorted(alive), seed)
    for old, new in zip(before, after, strict=True):
        assert new in alive
        assert new == old or old not in alive
    # Another departure moves only that peer's chunks.
    if len(alive) > 1:
        fewer = alive - {sorted(alive)[0]}
        again = owners(count, group, sorted(fewer), seed)
        assert all(new == old or old not in fewer for old, new in zip(after, again, strict=True))


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 24))
def test_next_fragment_continues_the_ownership_order(count, n, fragments):
    group = PEERS[:n]
    owned = Counter(peer for number in range(fragments) for peer in shares(count, group, fragment=number))
    totals = [owned[peer] for peer in group]
    assert sum(totals) == fragments * count and max(totals) - min(totals) <= 1
    for number in range(fragments):
        runs = shares(count, group, fragment=number)
        assert list(runs) == sorted(runs, key=group.index), "runs in the order of the group"
        assert owners(count, group, group, b"seed", fragment=number) == runs


def test_chunks_of_departed_owner_are_spread():
    group, count = PEERS[:5], 500
    after = owners(count, group, group[1:], b"seed")
    taken = Counter(after[:100])
    assert set(taken) == set(group[1:]) and max(taken.values()) < 50


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.binary(min_size=1, max_size=8), st.data())
def test_owners_get_the_given_numbers_of_chunks(counts, seed, data):
    group, count = PEERS[: len(counts)], sum(counts)
    owned = owners(count, group, group, seed, counts)
    assert [Counter(owned)[peer] for peer in group] == counts or not any(counts)
    assert list(owned) == sorted(owned, key=group.index)
    # Chunks of departed peers go to other owners, and to peers without chunks only if there are none.
    alive = data.draw(st.sets(st.sampled_from(group), min_size=1))
    after = owners(count, group, sorted(alive), seed, counts)
    able = {peer for peer, own in zip(group, counts, strict=True) if own and peer in alive} or alive
    for old, new in zip(owned, after, strict=True):
        assert new == old or (old not in alive and new in able)


def test_last_chunk_may_be_shorter():
    assert [Grid(10, 4).size(index) for index in range(3)] == [4, 4, 2]
    assert len(Grid(8, 4)) == 2


class Tiny:
    """Codec whose payloads have one byte."""

    def nbytes(self, n):
        return 1


def test_chunks_have_at_most_half_a_million_elements_with_any_codec():
    assert grid(480 << 19, Tiny()).chunk == 1 << 19


class Scaled:
    """Codec with `extra` bytes beside the values of 2**18 elements, which take CHUNK_BYTES."""

    def __init__(self, extra):
        self.extra = extra

    def nbytes(self, n):
        return n * (CHUNK_BYTES + self.extra) // (1 << 18)


@pytest.mark.parametrize(("extra", "elements"), [(0, 1 << 18), (1 << 16, 1 << 18), ((1 << 16) + 1, 1 << 17)])
def test_payload_has_at_most_a_mebibyte_of_values_and_a_sixteenth_of_scales(extra, elements):
    assert CHUNK_BYTES == 1 << 20
    assert grid(240 << 18, Scaled(extra)).chunk == elements


def test_small_fragment_has_at_most_32_chunks():
    assert [len(grid(total, registry.parse("fp32"))) for total in (32 * 4096, 32 * 4096 + 1, 64 * 4096)] == [32, 17, 32]


@given(st.integers(13_000_000, 250_000_000), st.sampled_from(CODECS), st.sampled_from([2, 3, 4, 6, 8, 12]))
def test_owners_of_large_fragment_have_equal_work(total, spec, peers):
    cut = grid(total, registry.parse(spec))
    owned = Counter[bytes]()
    for index, peer in enumerate(shares(len(cut), PEERS[:peers])):
        owned[peer] += cut.size(index)
    assert max(owned.values()) < 1.04 * total / peers
