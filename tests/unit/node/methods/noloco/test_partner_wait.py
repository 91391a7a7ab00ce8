"""Waiting time for a partner, early end of steps, and the decision to be behind."""

from types import SimpleNamespace

import pytest
from thinwire.collectives.gossip.group import GossipGroup
from thinwire.collectives.gossip.pair import PairResult, PairTerms
from thinwire.node.methods.noloco.partner_wait import PartnerWait
from thinwire.node.methods.noloco.progress_poll import ProgressPoll

A, B, C, D, E = (bytes([i]) * 32 for i in range(5))
TERMS = PairTerms(1, bytes(32), None, None, 0, None, None, 2.0)


class Rounds:
    """Rounds of one peer whose partner is ready `late` seconds before us (negative: after us)."""

    def __init__(self):
        self.time = 0.0
        self.pace = PartnerWait(lambda: self.time, patience=2.0, entered=True)

    def round(self, late=0.0, *, train=10.0, reason="", refused="", took=0.0):
        """Return the deadline of the round, and when its steps ended early (None: not). `took`: exchange seconds."""
        pace, began = self.pace, self.time
        pair = SimpleNamespace(theirs=None, theirs_at=0.0, refused="", exchanged=False)
        group = GossipGroup(TERMS, size=2)
        group.pairs = {A: pair}
        cut = None
        while cut is None and self.time < began + train:
            self.time += 0.1
            if self.time >= began + train - late and pair.theirs is None and not pair.refused:
                pair.theirs_at, pair.refused = self.time, refused
                pair.theirs = None if refused else object()
            early = self.time < pace.deadline(group)
            if pace.keeps_waiting(group):
                assert not early
                pace.hurried, cut = True, self.time - began
        group.ours = object()
        group.ours_at, deadline = self.time, pace.train()
        if pair.theirs is None and not refused:
            wait = min(deadline, max(0.0, -late))
            self.time += wait
            pair.theirs_at, reason = (0.0, "late") if wait < -late else (self.time, reason)
        pair.exchanged = not (reason or refused)
        self.time += took if pair.exchanged else 0.0
        pace.learn(group, [PairResult(A, (b"x",) if pair.exchanged else (), reason=reason or refused)])
        pace.begin(elsewhere=False)
        return deadline, cut


def test_punctual_peer_makes_all_its_steps():
    rounds = Rounds()
    assert [rounds.round(late)[1] for late in (0.0, 0.5, -0.5, 0.9, -2.0, 0.0)] == [None] * 6


def test_late_peer_ends_its_steps_when_partner_waits():
    rounds = Rounds()
    assert rounds.round(4.0)[1] is None  # the first time, lateness was not known
    for _ in range(6):
        _, cut = rounds.round(4.0)
        assert cut == pytest.approx(7.0, abs=0.4)  # the partner's time and a tenth of ours
    assert rounds.round(-1.0)[1] is None  # no partner waits: all steps
    slow = [rounds.round(-1.0)[1] for _ in range(4)]
    assert slow == [None] * 4


def test_steps_are_not_cut_below_exchange_time():
    """On a slow link a round of a few steps costs a whole exchange, and its partner as much."""
    rounds = Rounds()
    rounds.round(9.0, took=4.0)
    assert rounds.round(9.0, took=4.0)[1] == pytest.approx(4.0, abs=0.2)
    assert rounds.round(5.0, took=0.5)[1] == pytest.approx(6.0, abs=0.4)
    for _ in range(5):
        rounds.round(9.0, took=12.0)
    _, cut = rounds.round(9.0, took=12.0)
    assert cut is None or cut > 9.9, "all its steps"
    for _ in range(5):
        rounds.round(9.0, took=0.5)
    assert rounds.round(9.0, took=0.5)[1] == pytest.approx(2.0, abs=0.4), "links may have become faster"


def test_delayed_peer_cuts_steps_for_its_next_partner():
    rounds = Rounds()
    assert rounds.round(0.0)[1] is None
    deadline, _ = rounds.round(-30.0)
    assert deadline == pytest.approx(10.0, abs=0.5)
    assert rounds.round(8.0)[1] == pytest.approx(3.0, abs=0.4)
    assert rounds.round(-0.1)[1] is None


def test_peer_ends_round_that_partner_gave_up():
    rounds = Rounds()
    rounds.round(5.0)
    assert rounds.round(6.0, refused="declined: late")[1] == pytest.approx(5.0, abs=0.4)


def test_faster_peer_waits_longer_but_not_after_one_round():
    rounds = Rounds()
    first, _ = rounds.round(-30.0)
    assert first == pytest.approx(10.0, abs=0.2)
    assert rounds.round(0.0)[0] == pytest.approx(10.0, abs=0.2)  # one long wait is no evidence
    for _ in range(4):
        rounds.round(-30.0)
    assert rounds.round(-30.0)[0] >= 30.0
    for _ in range(40):
        deadline, _ = rounds.round(-1e6)
    assert deadline == pytest.approx(160.0, rel=0.05)  # and there is an end


def test_partner_gets_the_time_of_exchanges_that_it_has_before_ours():
    rounds = Rounds()
    rounds.round(reason="late")
    assert rounds.pace.time_behind(1) == pytest.approx(160.0, rel=0.05)  # no exchange was measured yet
    rounds.round(took=5.0)
    assert rounds.pace.time_behind(1) == pytest.approx(5.0) and rounds.pace.time_behind(3) == pytest.approx(15.0)
    for _ in range(4):
        rounds.round(took=6.0)
    rounds.round(took=300.0)
    assert rounds.pace.time_behind(1) == pytest.approx(6.0)  # one slow partner alone has no effect


def circle_of(*ready, refused=0):
    """Return a group whose partners were ready at these times (None: not yet); the last ones have given up."""
    group = GossipGroup(TERMS, size=len(ready) + 1)
    for index, at in enumerate(ready):
        gone = index >= len(ready) - refused
        theirs = None if at is None or gone else object()
        pair = SimpleNamespace(theirs=theirs, theirs_at=at or 0.0, refused="x" if gone else "", exchanged=False)
        group.pairs[bytes([index]) * 32] = pair
    return group


def test_median_partner_sets_the_wait():
    assert circle_of(3.0).halfway == circle_of(3.0).waited_for == 3.0
    assert circle_of(None).halfway == 0.0 and circle_of(None).waited_for is None
    assert circle_of(9.0, 3.0, 5.0).halfway == 5.0 and circle_of(9.0, 3.0).waited_for == 3.0
    assert circle_of(9.0, None, None).waited_for is None and circle_of(9.0, None, None).halfway == 0.0
    assert circle_of(9.0, 4.0, None, refused=1).waited_for == 4.0  # a partner that gave up early has waited, too
    assert circle_of().waited_for is None and circle_of().halfway == 0.0


def test_last_of_a_group_hurries_and_others_do_not():
    for ready, hurries in (((4.0, 4.5, 9.9), True), ((4.0, 9.8, 9.9), False)):
        time = [0.0]
        pace = PartnerWait(lambda now=time: now[0], patience=2.0, entered=True)
        for _ in range(3):
            began = time[0]
            group = circle_of(*(began + at for at in ready))
            group.ours, group.ours_at = object(), began + 10.0
            time[0] = began + 10.0
            pace.train()
            for pair in group.pairs.values():
                pair.exchanged = True
            pace.learn(group, [PairResult(A, (b"x",))] * 3)
            pace.begin(elsewhere=False)
        group = circle_of(time[0] + 4.0, time[0] + 4.5, None)
        time[0] += 6.0
        assert pace.keeps_waiting(group) == hurries


def test_majority_must_report_that_we_are_behind():
    now = [0.0]
    inquiry = ProgressPoll(lambda: now[0])
    assert inquiry.open(A, 10**6, [A, B, C, D, E], 2.0) == [B, C, D, E]
    assert inquiry.open(B, 10**6, [C, D], 2.0) == []  # one poll at a time
    assert not inquiry.answer(bytes(31) + b"x", 9) and not inquiry.answer(B, 10**6)
    assert not inquiry.answer(C, 4) and not inquiry.due
    now[0] = 2.5
    assert inquiry.due
    assert inquiry.close(3) == 10**6  # two of three answers
    assert not inquiry.due
    now[0] = 5.0
    inquiry.open(A, 10**6, [B, C, D, E], 2.0)
    said = [inquiry.answer(peer, 4) for peer in (B, C, D, E)]
    assert said == [False, False, False, True] and inquiry.close(3) == 4


def test_single_report_of_two_peers_counts():
    inquiry = ProgressPoll(lambda: 0.0)
    assert inquiry.open(A, 7, [A], 2.0) == [] and inquiry.complete and inquiry.close(3) == 7


def test_departed_peer_reports_nothing():
    inquiry = ProgressPoll(lambda: 0.0)
    inquiry.open(A, 7, [B, C], 2.0)
    inquiry.on_link_down(A)
    assert not inquiry.answer(B, 3)
    assert inquiry.answer(C, 3) and inquiry.close(3) == 3
