"""How long a peer waits for its partner, when it hurries, and when it believes that it is behind."""

from types import SimpleNamespace

import pytest
from thinwire.collectives.gossip import Meeting
from thinwire.node.inquiry import Inquiry
from thinwire.node.pace import Pace

A, B, C, D, E = (bytes([i]) * 32 for i in range(5))


class Rounds:
    """Rounds of one peer, whose partner is ready `late` seconds before us (less than zero: after)."""

    def __init__(self):
        self.time = 0.0
        self.pace = Pace(lambda: self.time, patience=2.0, entered=True)

    def round(self, late=0.0, *, train=10.0, reason="", refused=""):
        """The deadline of the round, and when its steps were ended early (None: they were not)."""
        pace, began = self.pace, self.time
        pair = SimpleNamespace(ours=None, theirs=None, theirs_at=0.0, refused="", ours_at=0.0)
        cut = None
        while cut is None and self.time < began + train:
            self.time += 0.1
            if self.time >= began + train - late and pair.theirs is None and not pair.refused:
                pair.theirs_at, pair.refused = self.time, refused
                pair.theirs = None if refused else object()
            if pace.keeps_waiting(pair):
                pace.hurried, cut = True, self.time - began
        pair.ours = object()
        pair.ours_at, deadline = self.time, pace.train()
        if pair.theirs is None and not refused:
            wait = min(deadline, max(0.0, -late))
            self.time += wait
            pair.theirs_at, reason = (0.0, "late") if wait < -late else (self.time, reason)
        pace.learn(pair, Meeting(A, () if reason or refused else (b"x",), reason=reason or refused))
        pace.begin(elsewhere=False)
        return deadline, cut


def test_who_is_in_time_makes_all_its_steps():
    rounds = Rounds()
    assert [rounds.round(late)[1] for late in (0.0, 0.5, -0.5, 0.9, -2.0, 0.0)] == [None] * 6


def test_who_was_late_ends_its_steps_when_the_partner_waits():
    rounds = Rounds()
    assert rounds.round(4.0)[1] is None  # the first time, it was not known
    for _ in range(6):
        _, cut = rounds.round(4.0)
        assert cut == pytest.approx(7.0, abs=0.4)  # the partner's time and a tenth of ours
    assert rounds.round(-1.0)[1] is None  # nobody waits: all steps
    slow = [rounds.round(-1.0)[1] for _ in range(4)]
    assert slow == [None] * 4


def test_who_was_held_up_does_not_hold_up_the_next():
    rounds = Rounds()
    assert rounds.round(0.0)[1] is None
    deadline, _ = rounds.round(-30.0)
    assert deadline == pytest.approx(10.0, abs=0.5)
    assert rounds.round(8.0)[1] == pytest.approx(3.0, abs=0.4)
    assert rounds.round(-0.1)[1] is None


def test_a_partner_that_has_waited_in_vain_ends_a_round_that_leads_nowhere():
    rounds = Rounds()
    rounds.round(5.0)
    assert rounds.round(6.0, refused="declined: late")[1] == pytest.approx(5.0, abs=0.4)


def test_a_faster_machine_waits_longer_but_not_because_of_one():
    rounds = Rounds()
    first, _ = rounds.round(-30.0)
    assert first == pytest.approx(10.0, abs=0.2)
    assert rounds.round(0.0)[0] == pytest.approx(10.0, abs=0.2)  # one long wait says nothing
    for _ in range(4):
        rounds.round(-30.0)
    assert rounds.round(-30.0)[0] >= 30.0
    for _ in range(40):
        deadline, _ = rounds.round(-1e6)
    assert deadline == pytest.approx(160.0, rel=0.05)  # and there is an end


def test_most_must_say_that_we_are_behind():
    now = [0.0]
    inquiry = Inquiry(lambda: now[0])
    assert inquiry.open(A, 10**6, [A, B, C, D, E], 2.0) == [B, C, D, E]
    assert inquiry.open(B, 10**6, [C, D], 2.0) == []  # one at a time
    assert not inquiry.answer(bytes(31) + b"x", 9) and not inquiry.answer(B, 10**6)
    assert not inquiry.answer(C, 4) and not inquiry.due
    now[0] = 2.5
    assert inquiry.due
    assert inquiry.close() == 10**6  # two of the three that said anything
    assert not inquiry.due
    now[0] = 5.0
    inquiry.open(A, 10**6, [B, C, D, E], 2.0)
    said = [inquiry.answer(peer, 4) for peer in (B, C, D, E)]
    assert said == [False, False, False, True] and inquiry.close() == 4


def test_of_two_one_word_is_all_there_is():
    inquiry = Inquiry(lambda: 0.0)
    assert inquiry.open(A, 7, [A], 2.0) == [] and inquiry.complete and inquiry.close() == 7


def test_who_has_gone_has_no_say():
    inquiry = Inquiry(lambda: 0.0)
    inquiry.open(A, 7, [B, C], 2.0)
    inquiry.lost(A)
    assert not inquiry.answer(B, 3)
    assert inquiry.answer(C, 3) and inquiry.close() == 3
