"""The matching of a round: uniform, the same everywhere, little changed by who comes or goes."""

import hashlib
from collections import Counter
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.collectives.pairing import labels, partner

RUN = bytes(range(32))


def people(count, start=0):
    return tuple(sorted(hashlib.blake2b(str(i).encode(), digest_size=32).digest() for i in range(start, start + count)))


def knock_out(view, round):
    """The whole matching from the labels, as a tournament: another way to the same pairs. And who is alone."""
    found = []

    def play(players, bit):
        if len(players) < 2:
            return players[0] if players else None
        left = play([p for p in players if not p[0] >> bit & 1], bit - 1)
        right = play([p for p in players if p[0] >> bit & 1], bit - 1)
        if left and right:
            found.append(tuple(sorted((left[1], right[1]))))
            return None
        return left or right

    alone = play(list(zip(map(int, labels(RUN, round, view)), view, strict=True)), 63)
    return found, alone and alone[1]


def test_every_pair_is_equally_likely():
    view, rounds = people(8), 10_000
    seen = Counter(pair for round in range(rounds) for pair in knock_out(view, round)[0])
    for pair in combinations(view, 2):
        assert abs(seen[pair] / rounds - 1 / 7) < 0.015


def test_an_odd_one_is_alone_and_it_is_not_always_the_same():
    view, alone = people(7), Counter()
    for round in range(500):
        nobody = [peer for peer in view if partner(RUN, round, view, peer) is None]
        assert len(nobody) == 1
        alone[nobody[0]] += 1
    assert len(alone) == 7 and max(alone.values()) < 3 * 500 / 7


@given(st.integers(1, 70), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_each_finds_its_own_partner_without_the_others(count, round):
    view = people(count)
    pairs, alone = knock_out(view, round)
    table = dict(pairs) | {b: a for a, b in pairs}
    assert len(pairs) == count // 2
    for peer in view:
        assert partner(RUN, round, view, peer) == table.get(peer)
    assert (alone is not None) == bool(count % 2)


def test_strangers_and_the_last_one_have_nobody():
    view = people(4)
    assert partner(RUN, 1, view, bytes(32)) is None and partner(RUN, 1, view, b"\xff" * 32) is None
    assert partner(RUN, 1, view[:1], view[0]) is None and partner(RUN, 1, (), view[0]) is None


def test_rounds_and_runs_draw_anew():
    view = people(200)
    drawn = [tuple(knock_out(view, round)[0]) for round in (1, 2)]
    assert len(set(drawn[0]) & set(drawn[1])) < 10
    other = [partner(bytes(32), 1, view, peer) for peer in view]
    assert sum(a == partner(RUN, 1, view, peer) for a, peer in zip(other, view, strict=True)) < 20


def test_one_that_comes_changes_few_pairs():
    view, changed = people(200), []
    for round in range(50):
        more = tuple(sorted((*view, *people(1, start=1000 + round))))
        before, after = set(knock_out(view, round)[0]), set(knock_out(more, round)[0])
        changed.append(len(before - after))
    assert max(changed) <= 20 and sum(changed) / len(changed) < 8  # of 100


def test_equal_labels_are_paired_too():
    twin = bytes(8)
    view = tuple(sorted(twin + bytes([i]) + bytes(23) for i in range(5)))
    found = [partner(RUN, 3, view, peer) for peer in view]
    for peer, other in zip(view, found, strict=True):
        assert other is None or found[view.index(other)] == peer
    assert found.count(None) == 1
