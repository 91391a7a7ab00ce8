"""Progress of a round's data at one peer: when useful data last arrived, and which peers are late."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.consensus.proposal import MISSING
from thinwire.collectives.timing import SLOW_FACTOR
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.swarm.messages.registry import PeerId

PARTIAL_FRAMES = 30
"""Patiences for which bytes being received count as progress while nothing useful completes.

Without the limit, a peer could send useless bytes forever.
"""


class Halfway:
    """Time at which more than half of some peers have sent everything, and at which the others are late.

    It concerns one ballot at a time. So peers that send slowly do not change the time at which a peer is late, unless they are
    half of all; and if most are slow, none of them is late.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        """Seconds that more than half of them took, in the ballot in which they took the most."""
        self._began = 0.0
        self._reached: float | None = None
        self._all = False

    def begin(self, now: float) -> None:
        """Begin a ballot, which may ask for other data."""
        self._began, self._reached, self._all = now, None, False

    def note(self, done: int, peers: int, now: float) -> None:
        """Note that this number of the peers have sent everything."""
        self._all = done >= peers
        if self._reached is None and 2 * done > peers:
            self._reached, self.longest = now, max(self.longest, now - self._began)

    def late_at(self, wait: float) -> float:
        """Return the time from which the others are late; infinite until more than half of all are done.

        They get `wait` seconds more than the first half, or SLOW_FACTOR times what that half took.
        """
        if self._reached is None or self._all:
            return math.inf
        return self._reached + max(wait, SLOW_FACTOR * self.longest)


class TransferProgress:
    """Progress of the data of one round at one peer, which is reported to the agreement.

    Data of late peers is no progress. compares: whether peers can be compared with each other, and some of them be late.
    """

    def __init__(
        self, agreement: Agreement, send_queue: SendQueue, now: Callable[[], float], *, compares: bool = True
    ) -> None:
        self._agreement, self._send_queue, self._now, self._compares = agreement, send_queue, now, compares
        self.progressed_at = 0.0
        """Time when useful data last arrived or was being received."""
        self._whole = 0.0
        """Time when useful data last arrived completely."""
        self._last_arrival = self._last_departure = 0.0
        """Times when the last useful frame arrived, and when the last one of our data left."""
        self._contributors, self._owners = Halfway(), Halfway()
        """When half of the contributors, and of the owners, have sent us everything."""

    def begin(self) -> None:
        """Begin a ballot."""
        self.progressed_at = self._whole = self._now()
        self._contributors.begin(self.progressed_at)
        self._owners.begin(self.progressed_at)

    def note_arrival(self) -> None:
        """Note useful data."""
        if not self._late:
            self._whole = self._last_arrival = self._now()
            self._note_progress()

    def note_partial_arrival(self) -> None:
        """Note that bytes of an incomplete frame are arriving."""
        if not self._late and self._now() < self._whole + PARTIAL_FRAMES * self._agreement.terms.patience:
            self._note_progress()

    def update(
        self,
        contributors: set[PeerId],
        sent: Collection[PeerId],
        owners: set[PeerId],
        served: Collection[PeerId],
    ) -> None:
        """Note how many peers have sent us everything, and whether our own data leaves; call it often.

        sent: peers that have sent us their contributions. served: peers that have sent us their results. While our own data
        leaves, all others may wait for it: that is progress, and we do not count as a peer that has sent everything.
        """
        me, terms, now = self._agreement.me, self._agreement.terms, self._now()
        sending, left = (
            self._send_queue.uplink_limits(terms.round, terms.fragment),
            self._send_queue.last_sent(terms.round, terms.fragment),
        )
        if sending and left > self._last_departure:
            self._last_departure = left
            self._note_progress()
        ours = {me} if sending else set()
        self._contributors.note(len(contributors.intersection(sent) - ours), len(contributors), now)
        self._owners.note(len(owners.intersection(served) - ours), len(owners), now)

    @property
    def _late(self) -> bool:
        """True if the contributors or owners that have not sent everything are late.

        They get as much more time than half of all as a late announcement. Our patience does not matter: a peer that is slow
        on purpose would enlarge it.
        """
        wait = self._agreement.terms.limit
        return self._compares and self._now() >= min(self._contributors.late_at(wait), self._owners.late_at(wait))

    @property
    def transferred(self) -> float:
        """Time at which the last useful frame arrived or left; 0.0 without any.

        A peer with a slow uplink may get nothing while all wait for its data.
        """
        return max(self._last_arrival, self._last_departure)

    def duration_without_late_peers(self, took: float) -> float:
        """Return the seconds of a round without the wait for contributors that were too slow.

        took: what it took here. With such contributors it is at most twice what half of all took.
        """
        commit, half = self._agreement.commit, self._contributors.longest
        late = commit is not None and any(entry.reason == MISSING for entry in commit.proposal.excluded)
        return min(took, 2 * half) if late and half else took

    def _note_progress(self) -> None:
        self.progressed_at = self._now()
        self._agreement.progress(self.progressed_at)
