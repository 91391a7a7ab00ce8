"""Count of rounds with our contribution, and a warning for the owner if it is always late."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

ALWAYS = 6
"""Consecutive missed rounds after which a warning is due, if we missed more than half of all rounds."""

SLOWER = 1.25
"""Least ratio of the others' median speed to ours that is given as the reason."""


class Participation:
    """Rounds of one peer in which it was to contribute. `contributed`: those with its contribution."""

    def __init__(self) -> None:
        self.rounds = self.contributed = 0
        self._missed, self._warned = 0, False

    def add(self, contributed: bool) -> bool:
        """Count a committed round; return True if a warning is due now: once until the next contribution."""
        self.rounds += 1
        self.contributed += contributed
        self._missed = 0 if contributed else self._missed + 1
        self._warned &= not contributed
        due = self._missed >= ALWAYS and 2 * self.contributed < self.rounds and not self._warned
        self._warned |= due
        return due

    @property
    def poor(self) -> bool:
        """True if this peer contributed to less than half of its rounds, and these are enough to judge by.

        A peer that enters a running swarm misses the first rounds.
        """
        return self.rounds >= 2 * ALWAYS and 2 * self.contributed < self.rounds

    @property
    def recovered(self) -> bool:
        """True if a warning is out of date: we contributed to the last round, and to half of all."""
        return not self._missed and 2 * self.contributed >= self.rounds

    def text(self, own: float, others: Iterable[float], *, balancing: str, unlinked: int = 0, group: str = "") -> str:
        """Return the warning. `own`, `others`: speeds in tokens/s, 0 for unknown.

        `balancing`: value of `outer.step_balancing`; empty if the method has no such key. `unlinked`: number of live members
        without a link to us. `group`: state of the group with which this peer holds the model; empty if it holds all of it.
        """
        counts = f"contributed to {self.contributed} of {self.rounds} rounds"
        if group:
            return f"{counts}: its group was too slow, or a stage was missing for a while ({group})"
        known = [speed for speed in others if speed > 0]
        ratio = median(known) / own if known and own > 0 else 0.0
        if unlinked and ratio < SLOWER:
            return f"{counts}: no link to {unlinked} of the other members; `thinwire status --peers` gives the reasons"
        why = (
            f"this machine is {ratio:.1f} times slower than the others" if ratio >= SLOWER else "it is always too late"
        )
        advice = (
            'set outer.step_balancing = "by-speed" in the run\'s manifest'
            if balancing == "equal"
            else "lower outer.sync_every or raise exchange.straggler_timeout in the run's manifest"
        )
        return f"{counts}: {why}; {advice}"
