"""Claims of peers to be ahead: which of them are asked, and when."""

import pytest
from thinwire.node.outer.progress_claims import ASKED, ProgressClaims

ANN, BEN, CAT = (bytes([n]) * 32 for n in (1, 2, 3))


class Clock:
    def __init__(self):
        self.now = 100.0
        self.ahead = ProgressClaims(lambda: self.now)


@pytest.fixture
def here():
    return Clock()


def test_peers_ahead_are_asked_periodically(here):
    asked = 0
    for _ in range(100):
        asked += here.ahead.asks(ANN, 2.0)
        here.now += 0.1
    assert 10 <= asked <= 20
    assert here.ahead.asks(BEN, 2.0), "each for itself"


def test_next_round_starts_by_asking_peers_past_it(here):
    here.ahead.seen(ANN, 5)
    here.ahead.seen(BEN, 7)
    for n in range(10, 30):
        here.ahead.seen(bytes([n]) * 32, 9)
    assert len(here.ahead.begin(4)) == ASKED
    here.ahead.on_link_down(BEN)
    for n in range(10, 30):
        here.ahead.on_link_down(bytes([n]) * 32)
    assert here.ahead.begin(4) == [ANN] and here.ahead.begin(5) == []


def test_each_claim_is_questioned_once_in_a_patience(here):
    def asked(**how):
        return here.ahead.unproved(3, here.now, 2.0, **{"waits": False, **how})

    assert asked() == []
    here.ahead.claimed(ANN, 3)
    assert asked() == [], "our own round"
    here.ahead.claimed(ANN, 4)
    assert asked(waits=True) == [], "its results are on their way"
    assert asked() == [ANN] and asked() == []
    here.ahead.claimed(BEN, 10**6)
    assert asked() == [BEN]
    here.now += 2.1
    assert asked() == [ANN, BEN]


def test_peers_of_later_rounds_are_questioned_if_nothing_moves(here):
    here.ahead.seen(CAT, 9)
    assert here.ahead.unproved(3, here.now - 1.9, 2.0, waits=False) == []
    assert here.ahead.unproved(3, here.now - 2.0, 2.0, waits=True) == [CAT]


def test_few_of_many_claims_are_questioned_at_a_time(here):
    for n in range(30):
        here.ahead.claimed(bytes([n]) * 32, 9)
    first, second = (here.ahead.unproved(3, 0.0, 2.0, waits=False) for _ in range(2))
    assert len(first) == len(second) == ASKED and not set(first) & set(second)


def test_claims_and_messages_of_our_own_round_are_not_questioned(here):
    here.ahead.claimed(ANN, 3)
    here.ahead.seen(BEN, 4)  # our own round, after 3
    assert here.ahead.unproved(3, 0.0, 2.0, waits=False) == []
    here.ahead.claimed(ANN, 4)
    here.ahead.seen(BEN, 5)
    assert here.ahead.unproved(3, 0.0, 2.0, waits=False) == [ANN, BEN]


def test_peers_past_a_round_claim_it_or_send_messages_of_later_ones(here):
    here.ahead.claimed(ANN, 3)
    here.ahead.seen(BEN, 4)
    assert here.ahead.past(3) == {ANN, BEN} and here.ahead.past(4) == set()
    here.ahead.begin(4)
    here.ahead.claimed(ANN, 4)
    assert here.ahead.past(4) == {ANN}
    here.ahead.on_link_down(ANN)
    here.ahead.seen(BEN, 5)
    assert here.ahead.past(4) == {BEN} and here.ahead.past(5) == set()
