"""How late members usually are, and so how long a round shall wait for stragglers ("auto" in the manifest).

Sans-IO. A round is measured from its beginning: when more than the quorum's part had announced, and how much later everybody
else did. The grace is that of the latest member that is worth waiting for: its median lateness and K times the median deviation
from it (as if it were normally distributed), at least LEAST. Whom one round after the other went on without gets twice as
long each time. But nobody is waited for longer than SHARE of what a quorum usually takes to train, because the others' machines
stand still meanwhile: who would need more is left out of the measure, until it is in time again by itself.

Every peer computes its own, and that of the round's leader matters: nothing of it must be agreed on. Who would open a round
in its place, because nobody has, waits for as long as anybody might.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from statistics import median

from thinwire.swarm.protocol import PeerId

K = 3 * 1.4826
"""Median deviations: three standard deviations of a normal distribution."""

SHARE = 0.5
"""Of the seconds from a round's beginning to its quorum: the most that others wait for one that is late."""

LEAST, MOST = 1.0, 3600.0
"""Bounds in seconds."""

ROUNDS = 8
"""Rounds that are remembered."""

UNKNOWN = 6
"""Times the grace to begin with: what one that has seen no round yet leaves to those who have."""

MISSES = 12
"""Doublings, at most."""


class _Member:
    __slots__ = ("late", "missed")

    def __init__(self) -> None:
        self.late: deque[float] = deque(maxlen=ROUNDS)
        self.missed = 0


class Lateness:
    """One peer's view of the rounds of one fragment. `first`: the grace, in seconds, as long as nothing is known."""

    def __init__(self, first: float, *, fraction: float = 0.5) -> None:
        self._first, self._fraction = first, fraction
        self._members: dict[PeerId, _Member] = {}
        self._took: deque[float] = deque(maxlen=ROUNDS)
        self._round, self._began = -1, 0.0
        self._awaited: tuple[PeerId, ...] = ()
        self._came: dict[PeerId, float] = {}

    def begin(self, round: int, members: Collection[PeerId], now: float) -> None:
        """A round begins; the one before is over. The same once more is no new one."""
        if round == self._round:
            return
        self._settle()
        self._round, self._began, self._awaited, self._came = round, now, tuple(members), {}
        for gone in self._members.keys() - set(self._awaited):
            del self._members[gone]

    def came(self, peer: PeerId, round: int, now: float) -> None:
        """A member, or ourselves, has announced what it trained."""
        if round == self._round and peer in self._awaited:
            self._came.setdefault(peer, now)

    def lost(self, peer: PeerId) -> None:
        """A member is out of reach: that it does not come says nothing of how fast it is."""
        if peer not in self._came:
            self._awaited = tuple(one for one in self._awaited if one != peer)

    @property
    def limit(self) -> float:
        """Most seconds that anybody would be waited for."""
        if not self._took:
            return UNKNOWN * self._first
        return min(MOST, max(LEAST, SHARE * median(self._took)))

    def grace(self) -> float:
        """Seconds to wait for stragglers once a quorum is ready."""
        limit = self.limit
        usual = [self._usual(self._members.get(peer)) for peer in self._awaited]
        return max((one for one in usual if one <= limit), default=min(LEAST, limit))

    def _usual(self, member: _Member | None) -> float:
        if member is None or not (member.late or member.missed):
            return min(self._first, self.limit)  # nobody has shown anything yet
        middle = median(member.late) if member.late else 0.0
        spread = median(abs(one - middle) for one in member.late) if member.late else 0.0
        return max(LEAST, middle + K * spread) * 2.0 ** min(MISSES, member.missed)

    def _settle(self) -> None:
        """Take over what the round that is over has shown; nothing where it was over before a quorum announced to us."""
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
                    member.late.clear()  # it is another machine now, or it was busy: what was usual is not
                    member.missed = 0
                member.late.append(max(0.0, at - quorum))
            elif self._usual(member) <= limit:
                member.missed += 1
        self._took.append(max(0.0, quorum - self._began))
