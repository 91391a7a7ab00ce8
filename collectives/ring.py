"""The data of a round as a ring: every peer sends to the next one only, and adds its own to what comes from the one before.

As many bytes as with owners, over one connection of each peer in place of all of them; it takes more hops. So it is for few
peers, near each other, or with links to some that are much better than those to others (`ringorder`). The way of each chunk and
the order in which it is added up follow from the ballot (`ringway`), so that all who compute a result compute the same; but,
other than with owners, another ballot has other results. What is under way at a peer is at most one contribution's size,
whatever the number of peers: a chunk is there as a sum or as a result.

What travels is the mean of those that have added to it, in the run's codec. With fp32 each hop rounds once, as sums in fp32
do. A codec that loses something does so at every hop; docs/compression.md says how much that is.

What can be screened: that what comes from the neighbour is a payload, is finite and not absurdly long; and results, by the
hashes that their owners have signed. What cannot: whether a neighbour has added what it had announced, or has changed what
came before it. So who is at fault cannot be said either: whoever cannot get on says so ("ring", see `complaints`), the next
ballot has no ring, where it shows who it is; and the next rounds have none (`Series`). When a peer dies, the ring of the next
ballot is without it. Frames of a ballot with another ring are not taken, however late they come.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from thinwire.collectives.complaints import BROKEN
from thinwire.collectives.plane import Plane
from thinwire.collectives.ringway import Lap, joined
from thinwire.collectives.settled import Settled
from thinwire.compression.codec import Buffer
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import Contribution, Open, Partial, PeerId, Result

PASSED = 0
"""Number of an announcement that stands for what a neighbour has passed on; real ones begin with 1."""


class Ring(Settled):
    """See the module. Ballots without a ring are those of `Exchange`."""

    _lap: Lap | None = None

    @property
    def broken(self) -> bool:
        """Whether a ring has come to nothing, and the round went on without one."""
        first, last = self._first, self.opened
        return first is not None and last is not None and bool(first.order) and not last.order and last.adopted is None

    # --- a ballot opens

    def _basis(self, opened: Open) -> object:
        """See Plane."""
        if opened.adopted is None and opened.order:
            return opened.contributors, opened.alive, opened.idle, opened.order
        return super()._basis(opened)

    def _renew(self, opened: Open) -> None:
        """See Exchange."""
        if self._lap is not None:
            self._lap = None
            self._outbox.recall(self.round, self.fragment)
        super()._renew(opened)

    def _assign(self, opened: Open) -> None:
        """See Exchange."""
        super()._assign(opened)
        if opened.adopted is None and opened.order:
            lap = self._lap = self._lap or Lap(self.me, opened, len(self.grid))
            self.owners, self._takers = lap.owners, lap.takers
            self._mine = [index for index, owner in enumerate(lap.owners) if owner == self.me]

    def _resume(self, opened: Open) -> None:
        """See Exchange."""
        super()._resume(opened)
        if self._lap is not None:
            for index in range(len(self.grid)):
                self._reduce(index)

    def _scatter(self, opened: Open) -> None:
        """See Plane; who is in the ring has nobody to send its contribution to as it is."""
        if self._lap is None or self._lap.right is None:
            super()._scatter(opened)

    def reach(self, peer: PeerId) -> None:
        """See Plane."""
        super().reach(peer)
        lap = self._lap
        if lap is not None and peer == lap.right:
            for index in range(len(self.grid)):
                self._forward(index)

    def lost(self, peer: PeerId) -> None:
        """See Plane."""
        super().lost(peer)
        if self._lap is not None and peer == self._lap.right:
            self._lap.sent.clear()

    def settle(self) -> None:
        """See Plane."""
        super().settle()
        if self._lap is not None:
            self._lap.passed.clear()
            self._lap.made.clear()

    # --- adding up

    def _reduce(self, index: int) -> None:
        """Add ours to what has come, where all of it has, and send it on; the owner's is the result."""
        opened, lap = self.opened, self._lap
        if opened is None or lap is None:
            return super()._reduce(index)
        way, place = lap.way(index)
        if place is None or self.agreement.commit is not None:
            return
        passed = lap.passed.get(index)
        if index in lap.made or self.results.chunks[index] is not None or (place and passed is None):
            return
        own = self._adding(opened, way.adds[place], index)
        if own is None or not self._usable(way.adds[place], index, lap.left if place else None):
            return
        weights = [float(entry.weight) for entry in way.adds[place]]
        before, size = way.before[place], self.grid.size(index)
        made = joined(self._reducer, passed, before, own, weights, size)
        lap.passed.pop(index, None)
        self._progress()
        if way.stations[-1] == self.me:
            self.results.put(index, made)
            self.check()
            self._send_result(opened, index, opened.alive)
            self._record()
        else:
            lap.made[index] = made
            self._forward(index)

    def _adding(self, opened: Open, entries: Sequence[Contribution], index: int) -> list[Buffer] | None:
        """What we have to add, in this order; None as long as something of it is missing."""
        if any(entry.peer == self.me for entry in entries):
            if not self._names_us(opened):
                return None
            self._contributions.own(self.me, self._attempt, index, self._source[index])
        return self._contributions.of(entries, index)

    def _usable(self, entries: Sequence[Contribution], index: int, left: PeerId | None) -> bool:
        """Whether nothing that is to be added up is absurd. Our own is looked at as a neighbour would, before it does."""
        if any(entry.peer == self.me for entry in entries):
            reason = self._contributions.screen((self.me, self._attempt), index, self._source[index])
            if reason:
                self.agreement.accuse(self.me, reason, self._now())
                return False
        judged = [*entries, *([] if left is None else [Contribution(left, PASSED, 0)])]
        far = self._contributions.beyond(judged, self._key, index)
        for peer in far:
            outside = any(entry.peer == peer for entry in entries) and peer != self.me
            self.agreement.accuse(peer, "norm" if outside else BROKEN, self._now())
        return not far

    def _take_partial(self, sender: PeerId, message: Partial, frame: Frame) -> None:
        """See Plane."""
        lap, index = self._lap, message.index
        if lap is None or index >= len(self.grid) or self.agreement.commit is not None:
            return
        way, place = lap.way(index)
        if not place or way.stations[place - 1] != sender:
            return
        if index in lap.made or index in lap.passed or self.results.chunks[index] is not None:
            return
        if self._contributions.screen((sender, PASSED), index, frame.payload):
            self.agreement.accuse(sender, BROKEN, self._now())
            return
        lap.passed[index] = frame.payload
        self._progress()
        self._reduce(index)

    def _forward(self, index: int) -> None:
        """Send the right neighbour what it is owed of a chunk and has not been sent."""
        opened, lap = self.opened, self._lap
        if opened is None or lap is None or lap.right is None:
            return
        result, made = self.results.chunks[index], lap.made.get(index)
        payload = made if result is None else result
        key = index, result is not None
        if payload is None or key in lap.sent or (result is not None and lap.right == self.owners[index]):
            return
        lap.sent.add(key)
        kind = Partial if result is None else Result
        self._outbox.bulk(lap.right, Frame(kind(self.round, self.fragment, opened.ballot, index), payload))

    # --- results

    def _send_result(self, opened: Open, index: int, to: Sequence[PeerId]) -> None:
        lap = self._lap
        if lap is None:
            return super()._send_result(opened, index, to)
        self._forward(index)
        super()._send_result(opened, index, [peer for peer in to if peer in lap.outside])

    def _take_result(self, sender: PeerId, message: Result, frame: Frame) -> None:
        """In a ring a result comes from a neighbour, and counts, and goes on, when its owner has signed for it."""
        lap, index = self._lap, message.index
        if lap is None:
            return super()._take_result(sender, message, frame)
        taken = self._take_signed(sender, message, frame)
        if taken:
            lap.made.pop(index, None)
            self._forward(index)
            self.check()
        elif taken is False and sender in (lap.left, self.owners[index]):
            self.agreement.accuse(sender, BROKEN, self._now())

    def owing(self, opened: Open) -> Collection[PeerId]:
        """See Plane: whose values those that we wait for are made of."""
        return Plane.owing(self, opened)

    def culprit(self, opened: Open) -> tuple[PeerId, str] | None:
        """See Plane. Of a ring only what comes from outside it has one."""
        lap = self._lap
        if lap is None:
            return super().culprit(opened)
        for index, chunk in enumerate(self.results.chunks):
            way, place = lap.way(index)
            if chunk is None and place == 0 and index not in lap.made:
                for entry in way.adds[0]:
                    if entry.peer != self.me and not self._contributions.has((entry.peer, entry.attempt), index):
                        return entry.peer, "chunk missing" if entry.peer in self.agreement.ready else "not announced"
        lacking = next((index for index in self.results.lacks() if self.owners[index] != self.me), None)
        if lap.left is not None:
            return lap.left, BROKEN
        return None if lacking is None else (self.owners[lacking], BROKEN)
