"""The origin's view of stage holders: peers to ask, patience, and the place of each gradient."""

from collections import Counter

import pytest
from thinwire.node.pipeline.model.stage_optimizer import clipping
from thinwire.node.pipeline.step.gradient_ledger import GradientLedger
from thinwire.node.pipeline.step.stage_holders import StageHolders
from thinwire.node.pipeline.step.timeouts import Timeouts
from thinwire.swarm.messages.registry import Hop, Passed

A, B, C, D = (bytes([i]) * 32 for i in range(4))


class Time:
    now = 0.0

    def __call__(self):
        return self.now


def scene():
    now = Time()
    return StageHolders({1: [A, B], 2: [C]}), Timeouts(now, first=30.0, least=2.0), now


def way(stage_holders, step=0, claimed=None, tried=None, visits=None, last=()):
    path = stage_holders.path(step, claimed or {}, tried or {}, visits, last)
    return [(hop.stage, hop.peer, hop.counts) for hop in path]


def test_stage_load_follows_speed():
    stage_holders, _, _ = scene()
    for _ in range(30):
        stage_holders.done(A, 1.0, backward=False)
        stage_holders.done(B, 10.0, backward=True)  # as 4.0 forward
    taken = Counter(stage_holders.path(0, {}, {})[0].peer for _ in range(50))
    assert taken == {A: 40, B: 10}


def test_newcomer_does_not_catch_up_on_missed_load():
    stage_holders, _, _ = scene()
    for _ in range(40):
        stage_holders.path(0, {}, {})
    stage_holders.holders[1].append(D)
    taken = Counter(stage_holders.path(0, {}, {})[0].peer for _ in range(30))
    assert set(taken.values()) == {10}
    stage_holders.lost.add(A)
    for _ in range(40):
        assert stage_holders.path(0, {}, {})[0].peer != A
    stage_holders.lost.clear()
    taken = Counter(stage_holders.path(0, {}, {})[0].peer for _ in range(30))
    assert max(taken.values()) - min(taken.values()) <= 2


def test_retry_goes_to_peer_that_may_hold_the_gradient():
    stage_holders, _, _ = scene()
    for peer in (A, B):
        assert way(stage_holders, claimed={1: peer}) == [(1, peer, True), (2, C, True)]
        last = (Hop(1, peer, True), Hop(2, C, True))
        assert way(stage_holders, last=last) == [(1, peer, True), (2, C, True)]
        assert way(stage_holders, last=last, tried={peer: 1})[0] == (1, A if peer == B else B, True)
    assert way(stage_holders, claimed={1: B}, tried={B: 1}) == [(1, A, False), (2, C, True)]
    stage_holders.lost.add(A)
    assert way(stage_holders, claimed={1: A}) == [(1, B, False), (2, C, True)]


def test_planned_path_is_followed_where_its_peers_exist():
    stage_holders, _, _ = scene()
    assert way(stage_holders, visits=[(2, C), (1, B)]) == [(2, C, True), (1, B, True)]
    assert way(stage_holders, visits=[(2, C), (1, B)], tried={B: 1}) == [(2, C, True), (1, A, True)]
    stage_holders.lost.add(C)
    assert way(stage_holders, visits=[(2, C), (1, B)]) == [(1, B, True)]
    assert way(stage_holders, visits=[(3, D)]) == []


def test_stalling_peer_rests_longer_unless_it_is_the_only_one():
    stage_holders, _, _ = scene()
    stage_holders.rest(A, 0)
    stage_holders.rest(A, 0)
    assert stage_holders.able(1, 0, {}) == [B] and stage_holders.able(1, 1, {}) == [A, B]
    stage_holders.rest(A, 1)
    assert stage_holders.able(1, 2, {}) == [B] and stage_holders.able(1, 3, {}) == [A, B]
    stage_holders.did_well(A)
    stage_holders.rest(A, 3)
    assert stage_holders.able(1, 3, {}) == [B] and stage_holders.able(1, 4, {}) == [A, B]
    stage_holders.rest(C, 5)
    assert stage_holders.able(2, 5, {}) == [] and stage_holders.able(2, 6, {}) == [C]
    stage_holders.rest(C, 6)
    assert stage_holders.able(2, 6, {}) == [] and stage_holders.able(2, 7, {}) == [C], (
        "it rests, but there is nobody else"
    )


def test_timeout_follows_measured_duration():
    _, patience, now = scene()
    assert patience.left((A, False), 0.0) == 30.0
    now.now = 5.0
    patience.record((A, False), 2.0)
    assert patience.left((A, False), 0.0) == 12.0 == patience.left((A, False), 5.0)
    assert patience.left((A, True), 5.0) == 30.0 and patience.left((B, False), 5.0) == 30.0
    for _ in range(60):
        now.now += 0.1
        patience.record((A, False), 0.0)
    assert patience.left((A, False), 0.0) == pytest.approx(2.0)
    now.now += 2.5
    assert patience.left((A, False), 0.0) == 0.0


def passed(micro, attempt=0, backward=True, reason=""):
    return Passed(0, micro, attempt, backward, 0.1, reason)


def test_gradient_ledger_has_each_gradient_at_one_peer():
    account = GradientLedger()
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


def test_clipping_equals_torch():
    assert (
        clipping(4.0, 1.0) == pytest.approx(0.5, rel=1e-5) and clipping(4.0, 2.1) == 1.0 and clipping(4.0, 0.0) == 1.0
    )
