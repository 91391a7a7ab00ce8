"""Past rounds: which are stored, for which peers, and for how long."""

from types import SimpleNamespace

import pytest
from thinwire.node.outer.state_transfer.round_history import FOLLOWED_SECONDS, MOST_COMMITS, MOST_ROUNDS, RoundHistory

ANN, BEN, CAT = (bytes([n]) * 32 for n in (1, 2, 3))


def past_round(round, *, ready=(), alive=(), nbytes=10, before=(ANN, BEN), lineage=b""):
    """A past round, with the attributes that a RoundHistory reads."""
    readies = {peer: SimpleNamespace(base=b"same", hashes=b"") for peer in ready}
    agreement = SimpleNamespace(
        ready=readies,
        terms=SimpleNamespace(base=b"same", members=before),
        commit=SimpleNamespace(proposal=SimpleNamespace(round=round, alive=alive, members=alive, lineage=lineage)),
    )
    return SimpleNamespace(round=round, agreement=agreement, nbytes=nbytes)


class Shelf:
    def __init__(self, limit=1000):
        self.now = 0.0
        self.history = RoundHistory(limit, lambda: self.now)

    def fill(self, count, **more):
        for round in range(1, count + 1):
            self.history.add(past_round(round, alive=(ANN, BEN), **more))

    def prune(self, current, *, read=False, live=(ANN, BEN, CAT)):
        self.history.prune(current, live, read=read)
        return [round for round in range(1, 100) if self.history.get(round) is not None]


@pytest.fixture
def shelf():
    return Shelf()


SPACE = 400
"""Bytes of a round that is too large to be kept without a reader, and small enough to be kept for one."""


def test_large_last_round_is_kept_until_all_are_past_it(shelf):
    shelf.fill(2, nbytes=SPACE)
    assert shelf.prune(past_round(3, ready=(ANN,))) == [2]
    assert shelf.prune(past_round(3, ready=(ANN, BEN))) == []


def test_large_last_round_is_kept_for_late_peer_while_it_is_live(shelf):
    shelf.history.add(past_round(3, ready=(ANN, BEN, CAT), alive=(ANN, BEN), nbytes=SPACE))
    assert shelf.prune(past_round(4, ready=(ANN, BEN))) == [3]
    assert shelf.prune(past_round(4, ready=(ANN, BEN)), live=(ANN, BEN)) == []


def test_small_rounds_are_kept_for_peers_that_return(shelf):
    """An eighth of the limit: 12 rounds of 10 bytes."""
    shelf.fill(20)
    assert shelf.prune(past_round(21, ready=(ANN, BEN))) == list(range(9, 21))
    assert shelf.history.replay == (12, 120)


def test_replay_counts_consecutive_rounds_up_to_the_last_one(shelf):
    assert shelf.history.replay == (0, 0)
    for round in (1, 2, 4, 5):
        shelf.history.add(past_round(round, alive=(ANN, BEN)))
    assert shelf.history.replay == (2, 20)


def test_link_loss_reaches_only_rounds_that_some_peer_may_still_need(shelf):
    lost = []
    for round in (1, 2, 3):
        one = past_round(round, alive=(ANN, BEN))
        one.on_link_down = lambda peer, round=round: lost.append((round, peer))
        shelf.history.add(one)
    shelf.prune(past_round(4, ready=(ANN,)))
    shelf.history.on_link_down(BEN)
    assert lost == [(3, BEN)]


def test_large_older_rounds_are_kept_only_for_readers_and_followers(shelf):
    shelf.fill(2, nbytes=SPACE)
    assert shelf.prune(past_round(3), read=True) == [1, 2]
    shelf.history.follow(CAT)
    shelf.now += FOLLOWED_SECONDS
    assert shelf.prune(past_round(3)) == [1, 2]
    shelf.now += 0.1
    assert shelf.prune(past_round(3)) == [2]
    shelf.fill(2, nbytes=SPACE)
    shelf.history.follow(CAT)
    shelf.history.done(CAT)
    assert shelf.prune(past_round(3)) == [2]


def test_follower_is_hurried_once_it_falls_behind_or_would_find_rounds_dropped(shelf):
    shelf.fill(4)
    shelf.history.follow(CAT, 2)
    assert not shelf.history.hurried(CAT), "it is two rounds behind, as when it asked first"
    shelf.history.add(past_round(5, alive=(ANN, BEN)))
    shelf.history.follow(CAT, 3)
    assert not shelf.history.hurried(CAT), "it keeps up"
    shelf.history.add(past_round(6, alive=(ANN, BEN)))
    assert shelf.history.hurried(CAT) and not shelf.history.hurried(BEN)
    shelf.history.follow(CAT, 6)
    assert shelf.history.hurried(CAT), "until it has caught up"
    shelf.history.done(CAT)
    assert not shelf.history.hurried(CAT)


@pytest.mark.parametrize("gains", [True, False])
def test_follower_is_hurried_unless_it_comes_nearer_by_a_round_for_every_two(shelf, gains):
    """It keeps its distance otherwise, and would never be in time for a round of a swarm that always exchanges."""
    shelf.fill(4)
    shelf.history.follow(CAT, 1)
    shelf.history.add(past_round(5, alive=(ANN, BEN)))
    shelf.history.follow(CAT, 2)
    assert not shelf.history.hurried(CAT)
    if not gains:
        shelf.history.add(past_round(6, alive=(ANN, BEN)))
    shelf.history.follow(CAT, 3)
    assert shelf.history.hurried(CAT) == (not gains)


def test_follower_of_the_last_round_is_never_hurried(shelf):
    for round in range(1, 9):
        shelf.fill(round)
        shelf.history.follow(CAT, round)
        assert not shelf.history.hurried(CAT)


def test_follower_far_behind_is_hurried_until_it_gives_up(shelf):
    half = MOST_ROUNDS // 2
    shelf.fill(MOST_ROUNDS)
    shelf.history.follow(CAT, half)
    assert not shelf.history.hurried(CAT), "half of the limit is left"
    shelf.history.done(CAT)
    shelf.history.follow(CAT, half - 1)
    assert shelf.history.hurried(CAT)
    shelf.now += FOLLOWED_SECONDS + 1
    shelf.prune(past_round(MOST_ROUNDS + 1))
    assert shelf.history.followers == [] and not shelf.history.hurried(CAT)


def test_stored_rounds_are_bounded_in_number_and_bytes():
    assert Shelf(10**9).prune(past_round(1)) == []
    many = Shelf(10**9)
    many.fill(MOST_ROUNDS + 3)
    assert many.prune(past_round(MOST_ROUNDS + 4), read=True) == list(range(4, MOST_ROUNDS + 4))
    large = Shelf(1000)
    large.fill(5, nbytes=400)
    assert large.prune(past_round(6), read=True) == [4, 5] and large.history.nbytes <= 1000
    huge = Shelf(1000)
    huge.fill(2, nbytes=4000)
    assert huge.prune(past_round(3), read=True) == [2], "the last one whatever it is"


def test_commits_are_kept_longer_than_results(shelf):
    shelf.fill(MOST_COMMITS + 3)
    shelf.prune(past_round(MOST_COMMITS + 4))
    kept = [round for round in range(MOST_COMMITS + 9) if shelf.history.commit_of(round, ANN) is not None]
    assert kept == list(range(4, MOST_COMMITS + 4))
    assert shelf.history.commit_of(9, CAT) is None, "who had no say in it"
    shelf.history.clear()
    assert shelf.history.commit_of(5, ANN) is None, "it is not our history any more"
