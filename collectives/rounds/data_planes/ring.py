"""Ring: every peer adds its contribution to a partial mean and passes it on to its successor.

A ring moves as many bytes as owners do, over one connection per peer instead of all of them, but takes more hops. It
suits few peers near each other, or links of very different quality (`ring_order`). The path of each chunk and the order
of summation follow from the ballot (`ring_schedule`), so that all peers that compute a result compute the same; but,
unlike with owners, another ballot has other results. Data in flight at a peer is at most one contribution's size,
whatever the number of peers: a chunk exists either as a partial mean or as a result.

A partial mean is the mean of the contributions so far, in the run's codec. With fp32 each hop rounds once, as sums in fp32
do. A lossy codec loses something at every hop; docs/compression.md gives figures.

A peer can screen a neighbour's payload (valid, finite, not absurdly large) and results (against the hashes that their
owners signed). It cannot detect whether a neighbour added what it had announced or changed earlier contributions, so it
cannot name the faulty peer. A peer that waits in vain therefore sends a Blame with the reason "ring" (see
`collectives/consensus/blame.py`). The next ballot has owners instead of a ring, which exposes the faulty peer, and the next
rounds have no ring either (`RoundFactory`). If a peer dies, the next ballot has a ring without it. Frames of a ballot with
another ring are rejected, however late they arrive.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from thinwire.collectives.aggregation.means import mean
from thinwire.collectives.consensus.blame import BROKEN
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.rounds.data_planes.data_plane import DataPlane
from thinwire.collectives.rounds.data_planes.owner_dependent_butterfly import OwnerDependentButterfly
from thinwire.collectives.rounds.data_planes.owner_results import Reducer
from thinwire.collectives.rounds.data_planes.ring_schedule import RingPosition, joined
from thinwire.collectives.topology.shards import Grid
from thinwire.compression.core.norm_clip import CLIP_FROM
from thinwire.compression.core.types import Buffer
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Contribution, Partial, PeerId, Proposal, Result

PASSED = 0
"""Announcement number for data that a neighbour passed on; real numbers start at 1."""

LONGER = 5.0
"""A guarded ring breaks if a contribution in a partial mean seems longer by this factor than ours."""


class Ring(OwnerDependentButterfly):
    """Data plane of a ring. Ballots without a ring work as in `Butterfly`.

    guarded: a partial mean that is much longer than our own contribution breaks the ring.
    """

    _position: RingPosition | None = None

    def __init__(
        self,
        agreement: Agreement,
        reducer: Reducer,
        grid: Grid,
        *,
        guarded: bool = False,
        **butterfly: Any,
    ) -> None:
        super().__init__(agreement, reducer, grid, **butterfly)
        self._adder, self._guarded = reducer.with_rule(mean), guarded

    @property
    def broken(self) -> bool:
        """True if a ring failed and the round continued without one."""
        first, last = self._pace.first, self.proposal
        return first is not None and last is not None and bool(first.order) and not last.order and last.adopted is None

    # --- a ballot opens

    def _basis(self, proposal: Proposal) -> object:
        """Return the inputs that determine the results: in a ring also its members and their order."""
        if proposal.adopted is None and proposal.order:
            return proposal.contributors, proposal.alive, proposal.idle, proposal.order
        return super()._basis(proposal)

    def _drop_results(self, proposal: Proposal) -> None:
        """Drop the data of another ballot's ring."""
        if self._position is not None:
            self._position = None
            self.send_queue.drop_ring_frames(self.round, self.fragment)
        super()._drop_results(proposal)

    def _assign(self, proposal: Proposal) -> None:
        """Assign owners and receivers from the ring's schedule."""
        super()._assign(proposal)
        if proposal.adopted is None and proposal.order:
            position = self._position = self._position or RingPosition(self.me, proposal, len(self.grid))
            self._set_owners(proposal, position.owners)
            self._collectors = position.collectors

    def _resume(self, proposal: Proposal) -> None:
        """Continue with stored data in a new ballot."""
        super()._resume(proposal)
        if self._position is not None:
            for index in range(len(self.grid)):
                self._reduce(index)

    def _scatter(self, proposal: Proposal) -> None:
        """Send our contribution; members of the ring have no receiver for it."""
        if self._position is None or self._position.right is None:
            super()._scatter(proposal)

    def on_link_up(self, peer: PeerId) -> None:
        """Send a newly connected peer what it lacks."""
        super().on_link_up(peer)
        position = self._position
        if position is not None and peer == position.right:
            for index in range(len(self.grid)):
                self._forward(index)

    def on_link_down(self, peer: PeerId) -> None:
        """Mark data sent to `peer` as possibly lost."""
        super().on_link_down(peer)
        if self._position is not None and peer == self._position.right:
            self._position.sent.clear()

    def finish(self) -> None:
        """Free the round's data."""
        super().finish()
        if self._position is not None:
            self._position.passed.clear()
            self._position.made.clear()

    # --- partial means

    def _reduce(self, index: int) -> None:
        """Add our contribution to the received partial mean and send it on; at the owner it is the result."""
        proposal, position = self.proposal, self._position
        if proposal is None or position is None:
            return super()._reduce(index)
        path, place = position.path(index)
        if place is None or self.agreement.commit is not None:
            return
        passed = position.passed.get(index)
        if index in position.made or self.results.chunks[index] is not None or (place and passed is None):
            return
        own = self._adding(proposal, path.adds[place], index)
        if own is None or not self._usable(path.adds[place], index, place):
            return
        weights = [float(entry.weight) for entry in path.adds[place]]
        before, size = path.before[place], self.grid.size(index)
        made = joined(self._adder, passed, before, own, weights, size)
        position.passed.pop(index, None)
        self.progress.note_arrival()
        if path.stations[-1] == self.me:
            self.results.put(index, made)
            self.check()
            self._send_result(proposal, index, proposal.alive)
            self._send_record()
        else:
            position.made[index] = made
            self._forward(index)

    def _adding(self, proposal: Proposal, entries: Sequence[Contribution], index: int) -> list[Buffer] | None:
        """Return the contributions that we have to add, in order; None if one is missing."""
        if any(entry.peer == self.me for entry in entries):
            if not self._names_our_contribution(proposal):
                return None
            self._contributions.store(self.me, self._attempt, index, self._source[index])
        return self._contributions.of(entries, index)

    def _usable(self, entries: Sequence[Contribution], index: int, place: int) -> bool:
        """Return True if all norms are usual at station number `place` of the chunk's path.

        Our own is screened before a neighbour screens it.
        """
        if any(entry.peer == self.me for entry in entries):
            reason = self._contributions.screen((self.me, self._attempt), index, self._source[index])
            if reason:
                self.agreement.accuse(self.me, reason, self.now())
                return False
        left = self._position.left if self._position is not None and place else None
        judged = [*entries, *([] if left is None else [Contribution(left, PASSED, 0)])]
        outliers = self._contributions.outliers(judged, self._key, index)
        for peer in outliers:
            outside = any(entry.peer == peer for entry in entries) and peer != self.me
            self.agreement.accuse(peer, "norm" if outside else BROKEN, self.now())
        if not outliers and left is not None and self._too_long(left, index, place):
            self.agreement.accuse(left, BROKEN, self.now())
            return False
        return not outliers

    def _too_long(self, left: PeerId, index: int, place: int) -> bool:
        """Return True if a partial mean from `place` stations is much longer than our own contribution.

        The mean of honest contributions is hardly longer than one of them; one that is LONGER times as long adds to it.
        A ring cannot clip, since no station sees the norms of all; the next ballot has owners, and they clip.
        """
        proposal, own = self.proposal, self._contributions.norm((self.me, self._attempt), index)
        if not self._guarded or proposal is None or len(proposal.contributors) < CLIP_FROM:
            return False
        ours = [entry.weight for entry in proposal.contributors if entry.peer == self.me]
        if not ours:
            return False
        # Contributions of more tokens than ours may be longer in proportion.
        heavier = max(entry.weight for entry in proposal.contributors) / ours[0]
        limit = (place - 1 + LONGER) / place * heavier * own
        return 0.0 < limit < self._contributions.norm((left, PASSED), index)

    def take(self, sender: PeerId, frame: Frame) -> None:
        """Take a frame, including a Partial."""
        message = frame.message
        if not isinstance(message, Partial):
            super().take(sender, frame)
        elif self._belongs(message.ballot):
            self._take_partial(sender, message, frame)
        else:
            self._keep_early(sender, frame)

    def _take_partial(self, sender: PeerId, message: Partial, frame: Frame) -> None:
        """Take the left neighbour's partial mean."""
        position, index = self._position, message.index
        if position is None or index >= len(self.grid) or self.agreement.commit is not None:
            return
        path, place = position.path(index)
        if not place or path.stations[place - 1] != sender:
            return
        if index in position.made or index in position.passed or self.results.chunks[index] is not None:
            return
        if self._contributions.screen((sender, PASSED), index, frame.payload):
            self.agreement.accuse(sender, BROKEN, self.now())
            return
        position.passed[index] = frame.payload
        self.progress.note_arrival()
        self._reduce(index)

    def _forward(self, index: int) -> None:
        """Send the right neighbour the partial mean or result of a chunk, once."""
        proposal, position = self.proposal, self._position
        if proposal is None or position is None or position.right is None:
            return
        result, made = self.results.chunks[index], position.made.get(index)
        payload = made if result is None else result
        key = index, result is not None
        if payload is None or key in position.sent or (result is not None and position.right == self.owners[index]):
            return
        position.sent.add(key)
        kind = Partial if result is None else Result
        self.send_queue.bulk(
            position.right, Frame(kind(self.round, self.fragment, proposal.ballot, index, proposal.lineage), payload)
        )

    # --- results

    def _send_result(self, proposal: Proposal, index: int, to: Sequence[PeerId]) -> None:
        position = self._position
        if position is None:
            return super()._send_result(proposal, index, to)
        self._forward(index)
        super()._send_result(proposal, index, [peer for peer in to if peer in position.outside])

    def _take_result(self, sender: PeerId, message: Result, frame: Frame) -> None:
        """Take a result from a neighbour; it counts and is forwarded once its owner has signed for it."""
        position, index = self._position, message.index
        if position is None:
            return super()._take_result(sender, message, frame)
        taken = self._take_signed(sender, message, frame)
        if taken:
            position.made.pop(index, None)
            self._forward(index)
            self.check()
        elif taken is False and sender in (position.left, self.owners[index]):
            self.agreement.accuse(sender, BROKEN, self.now())

    def awaited_peers(self, proposal: Proposal) -> Collection[PeerId]:
        """Return all peers of the group but ourselves, as partial means contain any peer's data."""
        return DataPlane.awaited_peers(self, proposal)

    def debtors(self, proposal: Proposal) -> Collection[PeerId]:
        """Return the culprit: in a ring, all partial means come from the left neighbour."""
        return DataPlane.debtors(self, proposal)

    def culprit(self, proposal: Proposal) -> tuple[PeerId, str] | None:
        """Return the peer to blame.

        Only contributors outside the ring can be named exactly; else the left neighbour with "ring".
        """
        position = self._position
        if position is None:
            return super().culprit(proposal)
        for index, chunk in enumerate(self.results.chunks):
            path, place = position.path(index)
            if chunk is None and place == 0 and index not in position.made:
                for entry in path.adds[0]:
                    if entry.peer != self.me and not self._contributions.has(entry.key, index):
                        return self._missing_data_of(entry.peer)
        missing = next((index for index in self.results.missing_indices() if self.owners[index] != self.me), None)
        if position.left is not None:
            return position.left, BROKEN
        return None if missing is None else (self.owners[missing], BROKEN)
