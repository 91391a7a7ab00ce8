from collections import Counter
from hashlib import blake2b

from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.swarm.rendezvous_hash import backups, leader_order, rank

PEERS = [blake2b(bytes([i]), digest_size=32).digest() for i in range(16)]
peer_lists = st.lists(st.sampled_from(PEERS), min_size=1, unique=True)


@given(peer_lists, st.randoms(use_true_random=False), st.integers(0, 2**64 - 1))
@settings(max_examples=50)
def test_ranking_depends_on_set_not_order(peers, random, number):
    shuffled = random.sample(peers, len(peers))
    ranked = rank(b"seed", "owner", peers, number)
    assert ranked == rank(b"seed", "owner", shuffled, number)
    assert sorted(ranked) == sorted(peers)


@given(peer_lists, st.sampled_from(PEERS), st.integers(0, 1000))
@settings(max_examples=50)
def test_departure_or_arrival_moves_nobody_else(peers, other, number):
    rest = [peer for peer in peers if peer != other]
    with_it = rank(b"seed", "owner", [*rest, other], number)
    assert tuple(peer for peer in with_it if peer != other) == rank(b"seed", "owner", rest, number)


def test_only_chunks_of_departed_peer_move():
    before = [rank(b"seed", "owner", PEERS, chunk)[0] for chunk in range(256)]
    after = [rank(b"seed", "owner", PEERS[1:], chunk)[0] for chunk in range(256)]
    moved = [old for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {PEERS[0]} and len(moved) == before.count(PEERS[0])
    heirs = {new for old, new in zip(before, after, strict=True) if old != new}
    assert len(heirs) > 4, "one peer should not inherit everything"


def test_roles_are_spread_evenly():
    first = Counter(rank(b"seed", "owner", PEERS, chunk)[0] for chunk in range(3200))
    # 200 expected a peer, standard deviation 13.7: five of them.
    assert set(first) == set(PEERS) and all(abs(count - 200) < 70 for count in first.values())


def test_ranking_depends_on_seed_role_and_numbers_separately():
    orders = {
        rank(b"seed", "owner", PEERS),
        rank(b"seee", "owner", PEERS),
        rank(b"seed", "ownes", PEERS),
        rank(b"seed", "owner", PEERS, 0),
        rank(b"seed", "owner", PEERS, 0, 0),
        rank(b"seed", "owner", PEERS, 1),
        rank(b"seedo", "wner", PEERS),
    }
    assert len(orders) == 7


def test_ranking_is_frozen():
    digest = blake2b(b"".join(rank(b"seed", "owner", PEERS, 7)), digest_size=8).hexdigest()
    assert digest == "bc4a709026582708"


def test_leaders_vary_and_backups_exclude_the_owner():
    assert leader_order(b"s", PEERS, 3, 0) != leader_order(b"s", PEERS, 4, 0)
    assert leader_order(b"s", PEERS, 3, 0) != leader_order(b"s", PEERS, 3, 1)
    heirs = backups(b"s", PEERS, PEERS[5], 9)
    assert PEERS[5] not in heirs and len(heirs) == 15
    assert rank(b"s", "owner", []) == () and backups(b"s", PEERS[:1], PEERS[0], 0) == ()
