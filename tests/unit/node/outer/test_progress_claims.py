"""When a peer concludes from claims that it is behind."""

import pytest
from thinwire.node.outer.progress_claims import ASKED, ProgressClaims

ANN, BEN, CAT = (bytes([n]) * 32 for n in (1, 2, 3))


class Clock:
    def __init__(self):
        self.now = 100.0
        self.ahead = ProgressClaims(lambda: self.now)

    def beyond(self, voices=(ANN, BEN, CAT), moved=0.0):
        return self.ahead.beyond_reach(3, voices, moved, 2.0)


@pytest.fixture
def here():
    return Clock()


def test_two_of_three_claims_are_believed_after_a_patience(here):
    here.ahead.claimed(ANN, 2**32 - 1)
    here.now += 100
    assert not here.beyond()
    here.ahead.claimed(BEN, 4)
    assert not here.beyond()
    here.now += 1.9
    assert not here.beyond()
    here.now += 0.2
    assert here.beyond()


def test_claims_of_strangers_and_old_rounds_are_ignored(here):
    for peer in (ANN, BEN, CAT):
        here.ahead.claimed(peer, 3)
    assert not here.beyond()
    here.ahead.claimed(ANN, 9)
    here.ahead.claimed(BEN, 9)
    here.now += 10
    assert not here.beyond(voices=(CAT,)) and not here.beyond(voices=())


def test_peer_that_makes_progress_is_not_behind(here):
    here.ahead.claimed(ANN, 9)
    assert not here.beyond(voices=(ANN,))
    here.now += 5
    assert not here.beyond(voices=(ANN,), moved=here.now - 1.0)
    assert here.beyond(voices=(ANN,))


def test_peers_ahead_are_asked_periodically(here):
    asked = 0
    for _ in range(100):
        asked += here.ahead.seen(ANN, 5, 2.0)
        here.now += 0.1
    assert 10 <= asked <= 20
    assert here.ahead.seen(BEN, 5, 2.0), "each for itself"


def test_next_round_starts_by_asking_peers_past_it(here):
    here.ahead.seen(ANN, 5, 2.0)
    here.ahead.seen(BEN, 7, 2.0)
    for n in range(10, 30):
        here.ahead.seen(bytes([n]) * 32, 9, 2.0)
    assert len(here.ahead.begin(4)) == ASKED
    here.ahead.on_link_down(BEN)
    for n in range(10, 30):
        here.ahead.on_link_down(bytes([n]) * 32)
    assert here.ahead.begin(4) == [ANN] and here.ahead.begin(5) == []


def test_claim_of_stranger_starts_no_inquiry(here):
    here.ahead.claimed(CAT, 10**6)
    here.ahead.seen(CAT, 10**6, 2.0)
    assert not here.ahead.inquire(3, (ANN, BEN), 0.0, 2.0)
    here.ahead.seen(BEN, 5, 2.0)
    assert here.ahead.inquire(3, (ANN, BEN), 0.0, 2.0)


def test_all_peers_are_asked_when_nothing_arrives(here):
    assert not here.ahead.inquire(3, (ANN, BEN), 0.0, 2.0), "nobody is ahead"
    here.ahead.claimed(ANN, 4)
    assert here.ahead.inquire(3, (ANN, BEN), 0.0, 2.0)
    assert not here.ahead.inquire(3, (ANN, BEN), 0.0, 2.0)
    here.now += 2.1
    assert not here.ahead.inquire(3, (ANN, BEN), here.now - 1.0, 2.0) and here.ahead.inquire(
        3, (ANN, BEN), here.now - 2.0, 2.0
    )


def test_few_claims_are_believed_when_the_rest_has_no_quorum(here):
    """Half of the members, frozen in a partition, or all but one of a quorum would wait endlessly."""
    here.ahead.claimed(ANN, 9)
    here.now += 10
    asked = []

    def able(without):
        asked.append(set(without))
        return False

    everybody = (ANN, BEN, CAT)
    assert not here.ahead.beyond_reach(3, everybody, 0.0, 2.0, lambda without: True)
    assert not here.ahead.beyond_reach(3, everybody, 0.0, 2.0, able)
    here.now += 2.1
    assert here.ahead.beyond_reach(3, everybody, 0.0, 2.0, able)
    assert asked[-1] == {ANN}
    here.ahead.begin(9)
    assert not here.ahead.beyond_reach(9, everybody, 0.0, 2.0, able), "when nobody says anything nothing is believed"


def test_peers_with_later_claims_or_frames_are_further(here):
    here.ahead.claimed(ANN, 3)
    here.ahead.seen(BEN, 4, 2.0)  # our own round, after 3
    assert not here.ahead.further(3)
    here.ahead.claimed(ANN, 4)
    here.ahead.seen(BEN, 5, 2.0)
    assert here.ahead.further(3) == {ANN, BEN} and here.ahead.past(3) == {ANN}
