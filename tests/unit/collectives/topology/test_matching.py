"""Gossip groups of a round: uniform, equal on every peer, and stable as peers come and go."""

import hashlib
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.collectives.topology.matching import Matching, labels, others, partition

RUN = bytes(range(32))


def people(count, start=0):
    return tuple(sorted(hashlib.blake2b(str(i).encode(), digest_size=32).digest() for i in range(start, start + count)))


def knock_out(view, round, size=2):
    """Return the full groups of a round by a tournament of labels, another algorithm, and the rest."""
    found = []

    def play(players, bit):
        if len(players) < 2:
            return players
        over = play([p for p in players if not p[0] >> bit & 1], bit - 1)
        over += play([p for p in players if p[0] >> bit & 1], bit - 1)
        if len(over) >= size:
            found.append(tuple(sorted(peer for _, peer in over[:size])))
            over = over[size:]
        return over

    left = play(sorted(zip(map(int, labels(RUN, round, view)), view, strict=True)), 63)
    return found, [peer for _, peer in left]


def groups(view, round, size):
    """Return the groups as each peer computes them."""
    return {tuple(sorted((peer, *others(RUN, round, view, peer, size)))) for peer in view}


def test_every_pair_is_equally_likely():
    view, rounds = people(8), 10_000
    seen = Counter(pair for round in range(rounds) for pair in knock_out(view, round)[0])
    for pair in combinations(view, 2):
        assert abs(seen[pair] / rounds - 1 / 7) < 0.015


def test_odd_peer_is_alone_and_varies():
    view, alone = people(7), Counter()
    for round in range(500):
        nobody = [peer for peer in view if not others(RUN, round, view, peer)]
        assert len(nobody) == 1
        alone[nobody[0]] += 1
    assert len(alone) == 7 and max(alone.values()) < 3 * 500 / 7


@given(st.integers(1, 70), st.integers(0, 2**32 - 1), st.integers(2, 8))
@settings(max_examples=150, deadline=None)
def test_group_lookup_of_one_peer_matches_full_grouping(count, round, size):
    view = people(count)
    full, left = knock_out(view, round, size)
    assert len(full) == count // size and len(left) == count % size
    found = groups(view, round, size)
    assert sorted(peer for group in found for peer in group) == list(view)
    lengths = sorted(map(len, found))
    if size > 2 and len(left) == 1 and count > 1:
        # No peer is alone: it and a full group have become two groups.
        assert len(found - set(full)) == 2 and lengths[0] >= 2 and len(set(full) - found) == 1
    else:
        assert found == {*full, *([tuple(sorted(left))] if left else [])}
    assert len(found) == -(-count // size)


@given(st.lists(st.sets(st.integers(0, 40)), max_size=12), st.integers(0, 5), st.sampled_from([2, 3, 16]))
@settings(max_examples=150, deadline=None)
def test_matching_that_follows_views_is_that_of_the_last_one(views, round, size):
    everyone, matching = people(41), Matching(RUN, round, size)
    twins = [peer[:8] + bytes(24) for peer in everyone[:5]]  # with the labels of others
    for chosen in views:
        view = tuple(sorted([everyone[one] for one in chosen] + twins[: len(chosen) % 6]))
        for me in (*everyone[:3], twins[0]):
            assert matching.others(view, me) == others(RUN, round, view, me, size)


@given(st.lists(st.sets(st.integers(0, 40)), min_size=1, max_size=12), st.integers(0, 5), st.sampled_from([2, 3, 16]))
@settings(max_examples=100, deadline=None)
def test_matching_that_follows_changed_peers_is_that_of_the_last_view(changes, round, size):
    everyone, matching, here = people(41), Matching(RUN, round, size), set(range(41))
    for changed in changes:
        here ^= changed
        view = tuple(everyone[one] for one in sorted(here))
        toggled = [everyone[one] for one in (*changed, *range(3))]  # the first three may have come and gone meanwhile
        found = matching.others(view, everyone[0], toggled)
        assert found == others(RUN, round, view, everyone[0], size)


@pytest.mark.parametrize("size, count", [(3, 7), (4, 9), (4, 10), (8, 12)])
def test_any_two_peers_are_equally_likely_to_meet(size, count):
    view, rounds, met = people(count), 1000, Counter()
    for round in range(rounds):
        for group in groups(view, round, size):
            met.update(combinations(group, 2))
    share = sum(met.values()) / len(list(combinations(view, 2))) / rounds
    for pair in combinations(view, 2):
        assert abs(met[pair] / rounds - share) < 5 * (share * (1 - share) / rounds) ** 0.5


def test_group_size_of_all_groups_everybody():
    view = people(8)
    assert all(others(RUN, 3, view, peer, 8) == tuple(p for p in view if p != peer) for peer in view)
    assert others(RUN, 3, view[:5], view[0], 8) == view[1:5]


def test_strangers_and_lone_peer_have_no_partners():
    view = people(4)
    assert others(RUN, 1, view, bytes(32)) == others(RUN, 1, view, b"\xff" * 32) == ()
    assert others(RUN, 1, view[:1], view[0]) == others(RUN, 1, (), view[0]) == ()


def test_groups_differ_by_round_and_run():
    view = people(200)
    drawn = [tuple(knock_out(view, round)[0]) for round in (1, 2)]
    assert len(set(drawn[0]) & set(drawn[1])) < 10
    other = [others(bytes(32), 1, view, peer) for peer in view]
    assert sum(a == others(RUN, 1, view, peer) for a, peer in zip(other, view, strict=True)) < 20


@pytest.mark.parametrize("size, most, usual", [(2, 20, 8), (4, 16, 7), (8, 14, 6)])
def test_newcomer_changes_few_groups(size, most, usual):
    view, changed = people(200), []
    for round in range(50):
        more = tuple(sorted((*view, *people(1, start=1000 + round))))
        before, after = set(knock_out(view, round, size)[0]), set(knock_out(more, round, size)[0])
        changed.append(len(before - after))
    assert max(changed) <= most and sum(changed) / len(changed) < usual  # of 100, 50, 25


@pytest.mark.parametrize("size, lengths", [(2, [1, 2, 2]), (3, [2, 3]), (4, [2, 3])])
def test_peers_with_equal_id_prefix_are_grouped(size, lengths):
    twin = bytes(8)
    view = tuple(sorted(twin + bytes([i]) + bytes(23) for i in range(5)))
    assert sorted(map(len, groups(view, 3, size))) == lengths


@given(st.integers(1, 70), st.integers(0, 5), st.sampled_from([2, 3, 16]))
@settings(max_examples=40, deadline=None)
def test_partition_has_the_groups_that_peers_compute(count, round, size):
    view = people(count)
    found = partition(RUN, round, view, size)
    assert {tuple(sorted(view[at] for at in group)) for group in found} == groups(view, round, size)
    assert sorted(at for group in found for at in group) == list(range(count))
