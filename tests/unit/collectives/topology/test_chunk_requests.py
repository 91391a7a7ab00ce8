"""Requests for missing chunks: divided among a few sources, and repeated at others."""

from __future__ import annotations

from thinwire.collectives.topology.chunk_requests import MAX_SOURCES, ChunkRequests

IDS = [bytes([i]) * 32 for i in range(2 * MAX_SOURCES)]


def test_requests_are_divided_among_a_few_sources():
    parts = ChunkRequests().plan(range(10), IDS, 1.0)
    assert list(parts) == IDS[:MAX_SOURCES] and sorted(sum(parts.values(), [])) == list(range(10))
    assert {len(part) for part in parts.values()} == {2, 3}


def test_no_source_is_asked_twice_in_a_row_for_a_chunk():
    requests, before = ChunkRequests(), {}
    for number in range(6):
        parts = requests.plan(range(3), IDS[:2], float(number))
        asked = {index: peer for peer, part in parts.items() for index in part}
        assert asked.keys() == {0, 1, 2} and all(before.get(index) != peer for index, peer in asked.items())
        before = asked
    assert (requests.at, requests.tries) == (5.0, 6)


def test_chunk_whose_turn_is_at_the_same_source_again_is_requested_from_the_next_one():
    requests = ChunkRequests()
    assert requests.plan([5, 7], IDS[:2], 1.0) == {IDS[0]: [5], IDS[1]: [7]}
    assert requests.plan([7], IDS[:2], 2.0) == {IDS[0]: [7]}, "the turn is at the second source, which has not answered"


def test_only_source_is_asked_again():
    requests = ChunkRequests()
    assert [requests.plan([7], IDS[:1], now) for now in (1.0, 2.0)] == [{IDS[0]: [7]}] * 2


def test_source_owes_the_chunks_that_it_was_asked_for_last():
    requests = ChunkRequests()
    requests.plan([0, 1, 2], IDS[:2], 1.0)
    assert requests.owed(IDS[0]) == {0, 2} and requests.owed(IDS[1]) == {1} and not requests.owed(IDS[2])
    requests.plan([0], IDS[1:2], 2.0)
    assert requests.owed(IDS[0]) == {2} and requests.owed(IDS[1]) == {0, 1}
