"""In step without a barrier: how long a peer waits for its partners, and when it ends its own inner steps for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from thinwire.collectives.gossip.group import GossipGroup
from thinwire.collectives.gossip.pair import PairResult
from thinwire.collectives.timing import MAX_PATIENCE, TICK

LATE_ROUNDS = 5
"""Rounds over which it is judged how long others wait for us, and we for them."""

SLACK = 0.1
"""Part of the time of our inner steps by which a partner may be kept waiting every time."""

LONGEST_WAIT = 16.0
"""Most times the seconds of our inner steps that a partner is waited for, however much faster we are than others."""


class PartnerWait:
    """Call `begin` when a round begins, `train` when its inner steps are done, `learn` when its meetings are over.

    Of several partners the one in the middle counts: the peer is late when half of them have waited for it.
    Who is late time and again ends its inner steps when they wait; so does who was last time, who has been held up by
    another, and who is new. So slower machines contribute fewer steps, and a delay goes no further than the next round. But a
    round is worth its exchange: nobody ends its steps before it has trained for as long as exchanges take.
    `patience`: seconds for an answer or for progress; adapts to what exchanges take. `hurried`: our steps were ended early.
    """

    def __init__(self, now: Callable[[], float], *, patience: float, entered: bool) -> None:
        self.patience, self._floor = patience, patience
        self.hurried = False
        self._now, self._began_at = now, now()
        self._trained = self._usually = 0.0
        self._late: deque[float] = deque(maxlen=LATE_ROUNDS)
        self._took: deque[float] = deque(maxlen=LATE_ROUNDS)
        self._held_up = self._hasty = not entered

    def begin(self, *, elsewhere: bool) -> None:
        """A round begins; `elsewhere` than where we were, with the state of another."""
        self._began_at, self.hurried = self._now(), False
        self._held_up |= elsewhere
        self._usually = median(self._late) if self._late else 0.0
        self._hasty = self._held_up or bool(self._late and max(self._usually, self._late[-1]) > self._slack)

    def train(self) -> float:
        """The inner steps are done: the seconds to wait for a partner that is there.

        As long as they took, or twice what others have let us wait; of that the longest but one counts, so that nobody's alone
        does.
        """
        took = self._now() - self._began_at
        if not self.hurried or took > self._trained:
            self._trained = 0.7 * self._trained + 0.3 * took if self._trained else took
        waits = sorted(-late for late in self._late)
        usual = waits[-2] if len(waits) > 1 else 0.0
        return max(self.patience, min(LONGEST_WAIT * self._trained, max(self._trained, 2 * usual)))

    def learn(self, circle: GossipGroup, meetings: Sequence[PairResult]) -> None:
        """What these meetings say about how long others wait for us (seconds, less than zero: we for them)."""
        late, now, reasons = circle.ours_at - circle.halfway, self._now(), {meeting.reason for meeting in meetings}
        met = any(meeting.theirs for meeting in meetings)
        self._held_up = "late" in reasons
        if met:
            took = now - circle.together
            self._took.append(took)
            self.patience = max(self._floor, min(MAX_PATIENCE, 0.7 * self.patience + 0.3 * 3.0 * took))
        if not (met and circle.halfway):
            if "late" in reasons:
                late = circle.ours_at - now
            elif "ahead" in reasons or self.hurried:
                late = self._trained
            elif not circle.halfway:
                return  # nobody has waited for anybody
        # With fewer steps we were in time, and with all of them would not have been.
        self._late.append(max(late, 2 * self._slack) if self.hurried else late)

    def keeps_waiting(self, circle: GossipGroup) -> bool:
        """Whether the partners have waited long enough for us to end our steps."""
        if not self._hasty or circle.ours is not None:
            return False
        if self._now() < self._began_at + min(self._trained, max(self._took, default=0.0)):
            return False
        waited_for = circle.waited_for
        if waited_for is not None:
            # Partners that have waited in vain are not to be met any more; the next may be.
            return self._now() > waited_for + self._slack
        # Two that are always late would wait for each other for ever, while all others go on.
        return self._usually > self._slack and self._now() > self._began_at + 1.5 * self._trained

    @property
    def _slack(self) -> float:
        return max(TICK, SLACK * self._trained)
