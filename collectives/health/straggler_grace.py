"""Lateness of members, and from it the time that a round waits for each of them.

Sans-IO. Each round is measured: the time from its start until a quorum had announced, and how much later each other
member did. `exchange.straggler_timeout` gives the longest wait. If it is "auto", a member gets its median lateness plus
K times the median deviation from it (as if normally distributed), at least LEAST, and no more than SHARE of the usual
training time of a quorum, because the machines of the others stand idle.

For both settings, a member that was connected but too late in MISSES rounds in a row gets a short wait only, SHORT_WAIT of
the usual training time, until it is in time once. So a peer that is always late costs the others the longest wait twice,
and one that has become nearly as fast as the others takes part again.

Every peer decides by the rounds that it saw, and the decision of the round's leader is used, so no agreement is needed.
A peer that would open a round in the leader's place waits for the maximum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median

from thinwire.swarm.messages.registry import PeerId

K = 3 * 1.4826
"""Multiple of the median deviation: three standard deviations of a normal distribution."""

SHARE = 0.5
"""Longest wait of "auto" for a late member, as a share of the time until a round's quorum."""

LEAST, MOST = 1.0, 3600.0
"""Bounds of "auto" in seconds."""

ROUNDS = 8
"""Number of rounds stored per member, and for which a former member is remembered."""

UNKNOWN = 6
"""Initial limit of "auto" in first waits: a peer that has measured no round lets others open it."""

MISSES = 2
"""Number of late rounds in a row after which a member is not waited for."""

SHORT_WAIT = 0.05
"""Wait for such a member, as a share of the time until a round's quorum; at most LEAST."""


@dataclass(frozen=True, slots=True)
class Attendance:
    """Lateness of a member in a finished round.

    seconds: from the quorum to the member's announcement, or to the end of the round without one.
    """

    peer: PeerId
    late: bool
    seconds: float


class _Member:
    __slots__ = ("late", "missed", "seen")

    def __init__(self) -> None:
        self.late: deque[float] = deque(maxlen=ROUNDS)
        self.missed = 0
        self.seen = 0


class StragglerGrace:
    """One peer's view of the rounds of one fragment.

    `first`: the longest wait in seconds, with `auto` only the initial one. `fraction`: of the members, for a quorum.
    """

    def __init__(self, first: float, *, auto: bool = True, fraction: float = 0.5) -> None:
        self._first, self._auto, self._fraction = first, auto, fraction
        self._members: dict[PeerId, _Member] = {}
        self._took: deque[float] = deque(maxlen=ROUNDS)
        """Seconds of the last rounds until a quorum had announced."""
        self._round, self._began = -1, 0.0
        self._awaited: tuple[PeerId, ...] = ()
        self._announced_at: dict[PeerId, float] = {}

    def begin(
        self, round: int, members: Collection[PeerId], now: float, *, present: Collection[PeerId] = ()
    ) -> list[Attendance]:
        """Start a round with the `members` that have a link, and finish the previous one.

        Return the lateness of its members; empty for the same round again, or if too little is known. `present`: peers
        that took part in the finished round. If their announcements did not reach us, they were not late.
        """
        if round == self._round:
            return []
        for peer in present:
            self.on_link_down(peer)
        found = self._measure(now, whole=round == self._round + 1)
        self._round, self._began, self._awaited, self._announced_at = round, now, tuple(members), {}
        for peer in self._awaited:
            self._members.setdefault(peer, _Member()).seen = round
        for gone in [peer for peer, member in self._members.items() if member.seen + ROUNDS < round]:
            del self._members[gone]
        return found

    def on_announcement(self, peer: PeerId, round: int, now: float, *, contributes: bool = True) -> None:
        """Process the announcement of a peer, or of this one.

        Without a contribution it counts only for members.
        """
        if round == self._round and (peer in self._awaited or (contributes and peer in self._members)):
            self._announced_at.setdefault(peer, now)

    def on_link_down(self, peer: PeerId) -> None:
        """Note that a member is out of reach; its absence is no measure of its speed."""
        if peer not in self._announced_at:
            self._awaited = tuple(one for one in self._awaited if one != peer)

    @property
    def limit(self) -> float:
        """Longest time in seconds that the round waits for any member."""
        if not self._auto:
            return self._first
        if not self._took:
            return UNKNOWN * self._first
        return min(MOST, max(LEAST, SHARE * median(self._took)))

    def graces(self) -> dict[PeerId, float]:
        """Return the seconds to wait for each member once a quorum is ready."""
        return {peer: self._grace(self._members[peer]) for peer in self._awaited}

    def _grace(self, member: _Member) -> float:
        limit = self.limit
        short = min(LEAST, limit, SHORT_WAIT * median(self._took)) if self._took else min(LEAST, limit)
        if member.missed >= MISSES:
            return short
        if not self._auto or member.missed:
            return limit
        if not member.late:
            return min(self._first, limit)  # nothing is known about the member yet
        middle = median(member.late)
        usual = max(LEAST, middle + K * median(abs(one - middle) for one in member.late))
        return usual if usual <= limit else short

    def _measure(self, now: float, *, whole: bool) -> list[Attendance]:
        """Process the measurements of the finished round. `whole`: no later round was missed here.

        Nothing is learned from a round that ended before a quorum had announced.
        """
        times = sorted(at for peer, at in self._announced_at.items() if peer in self._awaited)
        place = int(self._fraction * len(self._awaited))
        if place >= len(times) or not whole:
            return []
        quorum, limit, found = times[place], self.limit, []
        for peer in sorted({*self._awaited, *self._announced_at}):
            member, at = self._members[peer], self._announced_at.get(peer)
            seconds = max(0.0, (now if at is None else at) - quorum)
            late = at is None or seconds > limit
            if peer in self._awaited:
                found.append(Attendance(peer, late, seconds))
                member.missed += late
            if not late and member.missed:
                member.late.clear()  # the machine has changed or was busy, so its usual times no longer apply
                member.missed = 0
            if at is not None and peer in self._awaited:
                member.late.append(seconds)
        self._took.append(max(0.0, quorum - self._began))
        return found
