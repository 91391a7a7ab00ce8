"""Waiting times between partners: how long a peer waits, and when it ends its inner steps early."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from thinwire.collectives.gossip.group import GossipGroup
from thinwire.collectives.gossip.pair import PairResult
from thinwire.collectives.timing import TICK, Patience

LATE_ROUNDS = 5
"""Rounds over which lateness is measured."""

SLACK = 0.1
"""Part of the time of our inner steps by which a partner may wait for us in every round."""

LONGEST_WAIT = 16.0
"""Maximum time to wait for a partner, in multiples of the time of our inner steps."""


class PartnerWait:
    """Waiting times of one peer, from the rounds that it has made.

    Call `begin` when a round begins, `train` after its inner steps, `learn` after its exchanges.

    A peer is late when half of its partners have waited for it. It ends its inner steps when partners wait if it was
    late repeatedly or in the last round, was delayed by another peer, or is new. So slow machines contribute fewer
    steps, and a delay does not spread beyond the next round. A peer always trains at least as long as exchanges take.
    `patience`: seconds to wait for an answer or progress, adapted to measured exchanges. `hurried`: our steps were
    ended early.
    """

    def __init__(self, now: Callable[[], float], *, patience: float, entered: bool) -> None:
        self._patience = Patience(patience)
        self.hurried = False
        self._now, self._began_at = now, now()
        self._trained = self._usually = 0.0
        self._late: deque[float] = deque(maxlen=LATE_ROUNDS)
        self._took: deque[float] = deque(maxlen=LATE_ROUNDS)
        self._delayed = self._may_hurry = not entered

    def begin(self, *, elsewhere: bool) -> None:
        """Begin a round. `elsewhere`: this replica has just taken over another peer's state."""
        self._began_at, self.hurried = self._now(), False
        self._delayed |= elsewhere
        self._usually = median(self._late) if self._late else 0.0
        self._may_hurry = self._delayed or bool(self._late and max(self._usually, self._late[-1]) > self._slack)

    def train(self) -> float:
        """Note the end of the inner steps; return the seconds to wait for a partner that is present.

        This is the time of the steps, or twice the second-longest wait that other peers have caused, so that one peer
        alone has no effect.
        """
        took = self._now() - self._began_at
        if not self.hurried or took > self._trained:
            self._trained = 0.7 * self._trained + 0.3 * took if self._trained else took
        waits = sorted(-late for late in self._late)
        usual = waits[-2] if len(waits) > 1 else 0.0
        return max(self.patience, min(LONGEST_WAIT * self._trained, max(self._trained, 2 * usual)))

    def time_behind(self, rounds: int) -> float:
        """Return the seconds to wait in addition for a partner that is this number of rounds behind us.

        They are the time of the exchanges that it has to finish before it begins our round: the second-longest of ours in
        the last rounds, so that one slow partner alone has no effect. Before our first one any time is possible.
        """
        took = sorted(self._took)[-2:]
        return rounds * took[0] if took else LONGEST_WAIT * self._trained

    def learn(self, group: GossipGroup, results: Sequence[PairResult]) -> None:
        """Measure from these results how long others wait for us, in seconds; negative if we wait for them."""
        late, now, reasons = group.ours_at - group.halfway, self._now(), {result.reason for result in results}
        exchanged = any(not result.reason for result in results)
        self._delayed = "late" in reasons
        if exchanged:
            took = now - group.together
            self._took.append(took)
            self._patience.observe(took)
        if not (exchanged and group.halfway):
            if "late" in reasons:
                late = group.ours_at - now
            elif "ahead" in reasons or self.hurried:
                late = self._trained
            elif not group.halfway:
                return  # neither side has waited
        # The hurried round was in time, but a round with all steps would not have been.
        self._late.append(max(late, 2 * self._slack) if self.hurried else late)

    def keeps_waiting(self, group: GossipGroup) -> bool:
        """Return True if the partners have waited long enough, so that our steps should end."""
        if not self._may_hurry or group.ours is not None:
            return False
        if self._now() < self._shortest:
            return False
        waited_for = group.waited_for
        if waited_for is not None:
            # No exchange with partners that have given up succeeds in this round, but one with the next partners may.
            return self._now() > waited_for + self._slack
        # Without this limit, two peers that are always late would wait for each other endlessly.
        return self._usually > self._slack and self._now() > self._began_at + 1.5 * self._trained

    def deadline(self, group: GossipGroup) -> float:
        """Return the time up to which `keeps_waiting` is False, unless the group changes before."""
        if not self._may_hurry or group.ours is not None:
            return math.inf
        if (waited_for := group.waited_for) is not None:
            return max(self._shortest, waited_for + self._slack)
        return max(self._shortest, self._began_at + 1.5 * self._trained) if self._usually > self._slack else math.inf

    @property
    def patience(self) -> float:
        """Seconds to wait for an answer or progress, adapted to measured exchanges."""
        return self._patience.seconds

    @property
    def _shortest(self) -> float:
        """Time until which our steps continue in any case: a peer trains at least as long as exchanges take."""
        return self._began_at + min(self._trained, max(self._took, default=0.0))

    @property
    def _slack(self) -> float:
        return max(TICK, SLACK * self._trained)
