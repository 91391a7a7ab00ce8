"""Usual lateness of members, and from it the time that a round waits for stragglers.

This is "auto" in the manifest. Sans-IO. Each round is measured: the time from its start until a quorum had announced,
and how much later each other member did. The grace is that of the latest member that is worth waiting for: its median
lateness plus K times the median deviation from it (as if normally distributed), at least LEAST. A member gets twice as
long for each round in a row that continued without it. But a round does not wait longer than SHARE of the usual training
time of a quorum, because the machines of the others stand idle: a member that would need more is not considered until
it is in time again by itself.

Every peer computes its own grace, and the one of the round's leader is used, so no agreement is needed. A peer that
would open a round in the leader's place waits for the maximum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from statistics import median

from thinwire.swarm.messages.registry import PeerId

K = 3 * 1.4826
"""Multiple of the median deviation: three standard deviations of a normal distribution."""

SHARE = 0.5
"""Longest wait for one late member, as a share of the time from a round's start to its quorum."""

LEAST, MOST = 1.0, 3600.0
"""Bounds in seconds."""

ROUNDS = 8
"""Number of rounds stored per member."""

UNKNOWN = 6
"""Initial limit as a multiple of the grace: a peer that has seen no round leaves the lead to others."""

MISSES = 12
"""Maximum number of doublings."""


class _Member:
    __slots__ = ("late", "missed")

    def __init__(self) -> None:
        self.late: deque[float] = deque(maxlen=ROUNDS)
        self.missed = 0


class StragglerGrace:
    """One peer's view of the rounds of one fragment. `first`: initial grace in seconds."""

    def __init__(self, first: float, *, fraction: float = 0.5) -> None:
        self._first, self._fraction = first, fraction
        self._members: dict[PeerId, _Member] = {}
        self._took: deque[float] = deque(maxlen=ROUNDS)
        self._round, self._began = -1, 0.0
        self._awaited: tuple[PeerId, ...] = ()
        self._came: dict[PeerId, float] = {}

    def begin(self, round: int, members: Collection[PeerId], now: float) -> None:
        """Start a round and finish the previous one. A repeated call for the same round has no effect."""
        if round == self._round:
            return
        self._settle()
        self._round, self._began, self._awaited, self._came = round, now, tuple(members), {}
        for gone in self._members.keys() - set(self._awaited):
            del self._members[gone]

    def came(self, peer: PeerId, round: int, now: float) -> None:
        """Process the announcement of a member, or of this peer."""
        if round == self._round and peer in self._awaited:
            self._came.setdefault(peer, now)

    def on_link_down(self, peer: PeerId) -> None:
        """Note that a member is out of reach; its absence is no measure of its speed."""
        if peer not in self._came:
            self._awaited = tuple(one for one in self._awaited if one != peer)

    @property
    def limit(self) -> float:
        """Longest time in seconds that the round waits for any member."""
        if not self._took:
            return UNKNOWN * self._first
        return min(MOST, max(LEAST, SHARE * median(self._took)))

    def grace(self) -> float:
        """Return the seconds to wait for stragglers once a quorum is ready."""
        limit = self.limit
        usual = [self._usual(self._members.get(peer)) for peer in self._awaited]
        return max((one for one in usual if one <= limit), default=min(LEAST, limit))

    def _usual(self, member: _Member | None) -> float:
        if member is None or not (member.late or member.missed):
            return min(self._first, self.limit)  # nothing is known about the member yet
        middle = median(member.late) if member.late else 0.0
        spread = median(abs(one - middle) for one in member.late) if member.late else 0.0
        return max(LEAST, middle + K * spread) * 2.0 ** min(MISSES, member.missed)

    def _settle(self) -> None:
        """Process the measurements of the finished round.

        Nothing is learned from a round that ended before a quorum had announced.
        """
        times = sorted(self._came.values())
        place = int(self._fraction * len(self._awaited))
        if place >= len(times):
            return
        quorum = times[place]
        limit = self.limit
        for peer in self._awaited:
            member = self._members.setdefault(peer, _Member())
            at = self._came.get(peer)
            if at is not None:
                if member.missed:
                    member.late.clear()  # the machine has changed or was busy, so its usual times no longer apply
                    member.missed = 0
                member.late.append(max(0.0, at - quorum))
            elif self._usual(member) <= limit:
                member.missed += 1
        self._took.append(max(0.0, quorum - self._began))
