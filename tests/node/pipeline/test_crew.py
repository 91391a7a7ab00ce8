"""The origin's knowledge of its stages: who can be asked, for how long, and where each gradient is."""

from collections import Counter

import pytest
from thinwire.node.pipeline.account import Account
from thinwire.node.pipeline.crew import Crew
from thinwire.node.pipeline.patience import Patience
from thinwire.node.pipeline.update import clipping
from thinwire.swarm.protocol import Hop, Passed

A, B, C, D = (bytes([i]) * 32 for i in range(4))


class Time:
    now = 0.0

    def __call__(self):
        return self.now


def scene():
    now = Time()
    return Crew({1: [A, B], 2: [C]}), Patience(now, first=30.0, least=2.0), now


def way(crew, step=0, claimed=None, tried=None, visits=None, last=()):
    path = crew.path(step, claimed or {}, tried or {}, visits, last)
    return [(hop.stage, hop.peer, hop.counts) for hop in path]


def test_load_goes_by_speed():
    crew, _, _ = scene()
    for _ in range(30):
        crew.done(A, 1.0, backward=False)
        crew.done(B, 10.0, backward=True)  # as 4.0 forward
    taken = Counter(crew.path(0, {}, {})[0].peer for _ in range(50))
    assert taken == {A: 40, B: 10}


def test_who_comes_does_not_make_up_for_the_time_it_was_not_there():
    crew, _, _ = scene()
    for _ in range(40):
        crew.path(0, {}, {})
    crew.holders[1].append(D)
    taken = Counter(crew.path(0, {}, {})[0].peer for _ in range(30))
    assert set(taken.values()) == {10}
    crew.lost.add(A)
    for _ in range(40):
        assert crew.path(0, {}, {})[0].peer != A
    crew.lost.clear()
    taken = Counter(crew.path(0, {}, {})[0].peer for _ in range(30))
    assert max(taken.values()) - min(taken.values()) <= 2


def test_who_may_have_counted_it_is_asked_again_and_else_nobody_counts_it():
    crew, _, _ = scene()
    for peer in (A, B):
        assert way(crew, claimed={1: peer}) == [(1, peer, True), (2, C, True)]
        last = (Hop(1, peer, True), Hop(2, C, True))
        assert way(crew, last=last) == [(1, peer, True), (2, C, True)]
        assert way(crew, last=last, tried={peer: 1})[0] == (1, A if peer == B else B, True)
    assert way(crew, claimed={1: B}, tried={B: 1}) == [(1, A, False), (2, C, True)]
    crew.lost.add(A)
    assert way(crew, claimed={1: A}) == [(1, B, False), (2, C, True)]


def test_a_plan_is_followed_as_far_as_those_it_names_are_there():
    crew, _, _ = scene()
    assert way(crew, visits=[(2, C), (1, B)]) == [(2, C, True), (1, B, True)]
    assert way(crew, visits=[(2, C), (1, B)], tried={B: 1}) == [(2, C, True), (1, A, True)]
    crew.lost.add(C)
    assert way(crew, visits=[(2, C), (1, B)]) == [(1, B, True)]
    assert way(crew, visits=[(3, D)]) == []


def test_who_stalls_rests_longer_each_time_unless_there_is_nobody_else():
    crew, _, _ = scene()
    crew.rest(A, 0)
    crew.rest(A, 0)
    assert crew.able(1, 0, {}) == [B] and crew.able(1, 1, {}) == [A, B]
    crew.rest(A, 1)
    assert crew.able(1, 2, {}) == [B] and crew.able(1, 3, {}) == [A, B]
    crew.did_well(A)
    crew.rest(A, 3)
    assert crew.able(1, 3, {}) == [B] and crew.able(1, 4, {}) == [A, B]
    crew.rest(C, 5)
    assert crew.able(2, 5, {}) == [] and crew.able(2, 6, {}) == [C]
    crew.rest(C, 6)
    assert crew.able(2, 6, {}) == [] and crew.able(2, 7, {}) == [C], "it rests, but there is nobody else"


def test_patience_is_what_a_peer_took():
    _, patience, now = scene()
    assert patience.left((A, False), 0.0) == 30.0
    now.now = 5.0
    patience.moved((A, False), 2.0)
    assert patience.left((A, False), 0.0) == 12.0 == patience.left((A, False), 5.0)
    assert patience.left((A, True), 5.0) == 30.0 and patience.left((B, False), 5.0) == 30.0
    for _ in range(60):
        now.now += 0.1
        patience.moved((A, False), 0.0)
    assert patience.left((A, False), 0.0) == pytest.approx(2.0)
    now.now += 2.5
    assert patience.left((A, False), 0.0) == 0.0


def passed(micro, attempt=0, backward=True, reason=""):
    return Passed(0, micro, attempt, backward, 0.1, reason)


def test_the_account_looks_for_each_gradient_at_one_peer():
    account = Account()
    for micro, first in ((0, A), (1, A), (2, B)):
        account.sent(micro, 0, (Hop(1, first, True), Hop(2, C, True)))
        account.losses[micro] = 1.0
        assert account.where(micro) == {}
        account.turned(micro, 0)
        assert account.where(micro) == {1: first, 2: C}
        account.passed(C, passed(micro))
    account.passed(A, passed(0))
    account.passed(A, passed(1, backward=False))
    account.passed(A, passed(2))
    account.passed(B, passed(2, reason="full"))
    assert account.counted() == {1: {A: {0}}, 2: {C: {0, 1, 2}}}
    account.sent(1, 1, (Hop(1, B, False),))
    account.turned(1, 1)
    account.passed(B, passed(1, 1))
    account.passed(B, passed(2))
    assert account.counted()[1] == {A: {0}, B: {2}} and account.attempts == 4 and account.where(1) == {1: A, 2: C}
    assert account.divisor(A, by_visits=False) == 1.5 and account.divisor(A, by_visits=True) == 1.0
    assert account.divisor(C, by_visits=False) == 3.0 and account.divisor(D, by_visits=False) == 0.0
    account.give_up(B, "gone")
    account.give_up(B, "gone again")
    account.passed(B, passed(2))
    assert account.lost == ((B, (1, frozenset({2}), "gone")),) and account.where(2) == {2: C}
    assert account.counted()[1] == {A: {0}}
    account.sent(2, 1, (Hop(1, A, True), Hop(2, C, True)))
    account.finish(2, 1)
    assert account.counted() == {1: {A: {0, 2}}, 2: {C: {0, 1, 2}}} and account.finished == {2} and not account.lost
    assert account.divisor(A, by_visits=False) == 3.0
    account.settle()
    account.give_up(A, "too late")
    assert account.counted()[1] == {A: {0, 2}} and not account.lost


def test_clipping_is_torchs():
    assert (
        clipping(4.0, 1.0) == pytest.approx(0.5, rel=1e-5) and clipping(4.0, 2.1) == 1.0 and clipping(4.0, 0.0) == 1.0
    )
