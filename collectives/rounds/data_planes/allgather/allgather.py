"""All-gather of whole payloads.

Every contributor sends its payload to all peers, and every peer computes the result.

Meant for sparse payloads, which are small and differ in length. Announcements, ballots and votes are the same as with a
butterfly: a payload is announced by the hashes of its pieces, and the results voted for are the pieces of all
contributors in the order of the proposal. So the result is a pure function of the proposal, no owner has to be trusted, and
any peer can supply missing pieces, which are identified by their hashes.

A contributor with a weak uplink sends a piece to one helper only, which forwards it to the other peers (see
`RelayPlan`). If a helper fails to forward, another peer stands in, sooner if the helper is unreachable; after that all
peers are asked, as for pieces that do not arrive at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

import blake3
import msgspec
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.rounds.data_planes.allgather.payload_pieces import max_contributors
from thinwire.collectives.rounds.data_planes.allgather.piece_store import PieceStore
from thinwire.collectives.rounds.data_planes.contributions import Contributions, Screen
from thinwire.collectives.rounds.data_planes.data_plane import DataPlane
from thinwire.collectives.rounds.data_planes.result_store import Results
from thinwire.collectives.topology.bandwidth_shares import MOST
from thinwire.collectives.topology.piece_requests import SOON, MissingPiece, PieceRequests
from thinwire.collectives.topology.relay_plan import RelayPlan, stand_in
from thinwire.collectives.topology.shards import Grid
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.compression.core.types import Buffer
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import (
    MAX_CHUNKS,
    MAX_GROUP,
    Chunk,
    ContributionKey,
    Fetch,
    PeerId,
    Proposal,
    Result,
    ResultRecord,
)


class AllGather(DataPlane):
    """Data plane of an all-gather. The caller stores `usual`, the running norm of a payload."""

    repair_patiences: ClassVar[float] = (
        SOON  # voters have the whole payload already, so whatever is being sent arrives by then
    )

    def __init__(
        self,
        agreement: Agreement,
        *,
        screen: Screen,
        pieces: Grid,
        send_queue: SendQueue,
        now: Callable[[], float],
        usual: dict[int, float],
    ) -> None:
        super().__init__(
            agreement,
            results=Results(0),
            contributions=Contributions(screen, Grid(pieces.total, max(1, pieces.total)), usual),
            early=(2 * MAX_CHUNKS + MAX_GROUP, (MOST + 2) * len(pieces) + 8, max_contributors(pieces) * pieces.total),
            send_queue=send_queue,
            now=now,
        )
        self.pieces = pieces
        self._store = PieceStore(pieces, self.results, self._contributions)
        self._slots = self._store.slots
        self._relay_plan = RelayPlan(self.me)
        self._requests = PieceRequests(self._relay_plan)

    @property
    def failed(self) -> set[PeerId]:
        """Peers that must not relay in the next rounds."""
        return self._relay_plan.failed

    def contribute(self, source: Sequence[Buffer], attempt: int) -> None:
        """Set our own payload and the number of its announcement."""
        super().contribute(source, attempt)
        self._relay_plan.renew()

    def on_link_down(self, peer: PeerId) -> None:
        """Mark data sent to a disconnected peer as possibly lost."""
        super().on_link_down(peer)
        self._relay_plan.on_link_down(peer)

    @property
    def complete(self) -> bool:
        """True if every committed result is here and decodes; votes for it do not matter."""
        return super().complete and self._store.sound

    def finish(self) -> None:
        """Free the round's data: everything committed is here."""
        super().finish()
        self._store.clear()

    def on_link_up(self, peer: PeerId) -> None:
        """Send a newly connected peer what it lacks."""
        proposal = self.proposal
        if proposal is not None and peer in proposal.alive and self.agreement.commit is None:
            self._scatter(proposal)
            self._forward_pieces(proposal)

    # --- a ballot opens

    def open(self, proposal: Proposal) -> None:
        """Handle a new ballot: send our payload to all participants."""
        changed = self._note_ballot(proposal)
        self._relay_plan.open(proposal, changed=changed)
        self._store.open(proposal, changed=changed)
        if changed:
            self.owners = tuple(entry.peer for entry in proposal.contributors for _ in range(len(self.pieces)))
            self._tidy()
        self._begin(proposal)
        self._expect(proposal)
        self._replay()
        for key in self._slots.keys:
            self._accuse(key)
        self._forward_pieces(proposal)
        self.check()

    def _tidy(self) -> None:
        """Free payloads of obsolete announcements.

        An announcement is obsolete if it is not in the open ballot, we have not voted for it, and its sender has made
        another.
        """
        voted = self.agreement.acceptor.voted
        needed = {entry.key for entry in (voted.contributors if voted is not None else ())}
        needed |= {*self._slots.keys}
        needed |= {(peer, ready.attempt) for peer, ready in self.agreement.ready.items()}
        self._store.keep(needed)

    def _scatter(self, proposal: Proposal) -> None:
        """Send our payload to all other peers.

        Each piece starts at another peer, so that all links are in use at once. Pieces that a helper forwards go first.
        """
        if not self._names_our_contribution(proposal):
            return
        after = [peer for peer in proposal.alive if peer > self.me] + [
            peer for peer in proposal.alive if peer < self.me
        ]
        able, count = self.agreement.electorate.live & ({*proposal.alive} - {*proposal.idle}), len(self._source)
        relays = [self._relay_plan.relay(index, count, able) for index in range(count)]
        for index in sorted(range(count), key=lambda index: relays[index] is None):
            piece, helper = self._source[index], relays[index]
            message = Chunk(self.round, self.fragment, self._attempt, index)
            first = index % len(after) if after else 0
            for peer in after[first:] + after[:first] if helper is None else (helper,):
                if (peer, index) not in self._sent:
                    self._sent.add((peer, index))
                    self.send_queue.bulk(peer, Frame(message, piece))

    def announced(self, sender: PeerId) -> None:
        """Handle an announcement: expect its payload, and take frames that arrived before it."""
        if self.proposal is not None:
            self._expect(self.proposal)
            for key in self._slots.keys:
                if key[0] == sender:
                    self._accuse(key)
        super().announced(sender)
        self.check()

    def _expect(self, proposal: Proposal) -> None:
        """Set the expected hashes of slots from the announcements, unless the results are settled already."""
        for entry in proposal.contributors:
            ready = self.agreement.announcements.find(entry)
            if ready is not None:
                self._store.expect(entry.key, ready.hashes)
        if self._names_our_contribution(proposal):
            self._store.store_own((self.me, self._attempt), self._source)
        self._store.fill()
        self._accuse_faulty()

    # --- receiving

    def take(self, sender: PeerId, frame: Frame) -> None:
        """Take a frame. A piece forwarded in an earlier ballot stays valid; its number is translated."""
        message, proposal = frame.message, self.proposal
        if isinstance(message, Result) and proposal is not None and message.ballot != proposal.ballot:
            if (slot := self._slots.translate(message.ballot, message.index)) is not None:
                message = msgspec.structs.replace(message, ballot=proposal.ballot, index=slot)
                frame = msgspec.structs.replace(frame, message=message)
        super().take(sender, frame)

    def _fits(self, frame: Frame) -> bool:
        """Return True if a frame's index and length fit this round."""
        message, size = frame.message, memoryview(frame.payload).nbytes
        count = len(self.pieces) if isinstance(message, Chunk) else MAX_CHUNKS
        return getattr(message, "index", 0) < count and size <= min(self.pieces.chunk, self.pieces.total)

    def _take_chunk(self, sender: PeerId, message: Chunk, frame: Frame) -> None:
        ready, proposal = self.agreement.ready[sender], self.proposal
        if message.attempt != ready.attempt or message.index >= len(self.pieces) or self.complete:
            return
        key = (sender, message.attempt)
        slot = self._slots.find(key, message.index)
        if slot is None:
            if self._fits(frame):
                self._early.put(sender, frame)  # it may have overtaken the proposal
            return
        count = len(ready.hashes) // 32
        charged = self.agreement.commit is None and self._relay_plan.charge(key, message.index, count)
        if not self._put(slot, frame) and self.results.wanted is None and not self._store.fault(key):
            if self.results.chunks[slot] is None:
                self._store.mark(key, "hash")
                self._accuse(key)
        if charged and proposal is not None:
            self._forward_pieces(proposal, ((key, message.index),))

    def _forward_pieces(self, proposal: Proposal, what: Sequence[tuple[ContributionKey, int]] | None = None) -> None:
        """Forward pieces that we are helper for, all or those in `what`.

        They go to the peers that did not get them from us.
        """
        charged = self._relay_plan.charged if what is None else what
        if not charged or self.agreement.commit is not None:
            return
        for key, index in charged:
            slot = self._slots.find(key, index)
            if slot is not None and (piece := self.results.chunks[slot]) is not None:
                frame = Frame(Result(self.round, self.fragment, proposal.ballot, slot, proposal.lineage), piece)
                for peer in self._relay_plan.receivers(key, index, proposal.alive):
                    self.send_queue.bulk(peer, frame)

    def _note_arrival(self, sender: PeerId, slot: int) -> None:
        """Note the arrival of a piece that has a helper; stand in for a helper that failed."""
        proposal, helper = self.proposal, self._helper(slot)
        if self._relay_plan.note_arrival(slot, sender) and sender == self.owners[slot] and proposal is not None:
            if helper is not None and stand_in(proposal, sender, helper, slot % len(self.pieces)) == self.me:
                what = self._slots.split(slot)
                self._relay_plan.take_on(*what)
                self._forward_pieces(proposal, (what,))

    def _helper(self, slot: int) -> PeerId | None:
        """Return the helper that should bring us a piece in place of its contributor, or None."""
        ready = self.agreement.ready.get(self.owners[slot])
        count = len(ready.hashes) // 32 if ready is not None else 0
        found = self._relay_plan.helper(self.owners[slot], slot % len(self.pieces), count)
        return found if found != self.me else None

    def _take_result(self, sender: PeerId, message: Result, frame: Frame) -> None:
        """Take a piece from any peer that has it; a piece that does not match is requested from another peer."""
        if message.index < len(self.results) and not self.complete:
            if self._put(message.index, frame):
                self._note_arrival(sender, message.index)
            elif self.results.expected_hash(message.index) is None:
                self._early.put(sender, frame)  # it may have overtaken the message that settles the results

    def _put(self, slot: int, frame: Frame) -> bool:
        if not self._store.put(slot, frame.payload, frame.hashed):
            return False
        self.progress.note_arrival()
        self._accuse_faulty()
        self.check()
        return True

    def _take_record(self, sender: PeerId, record: ResultRecord, signature: bytes) -> None:
        """Take the hashes of all results if they match the settled digest; any peer may send them."""
        everything = tuple(range(len(self.results)))
        if self.complete or record.indices != everything or len(record.hashes) != 32 * len(everything):
            return
        if blake3.blake3(record.hashes).digest() != self.results.wanted:
            return
        self._store.settle(record.hashes)
        self._store.fill()
        self._accuse_faulty()
        self._replay()
        self.check()

    def _accuse_faulty(self) -> None:
        """Accuse the contributors of payloads that were found invalid just now."""
        for key in self._store.take_faults():
            self._accuse(key)

    def _accuse(self, key: ContributionKey) -> None:
        if (reason := self._store.fault(key)) and self.results.wanted is None:
            self.agreement.accuse(key[0], reason, self.now())

    def check(self) -> None:
        """Vote when all payloads are here, are valid and have usual norms."""
        digest, wanted, proposal = self.results.digest, self.results.wanted, self.proposal
        if proposal is None or digest is None or wanted not in (None, digest):
            return
        if not self._store.sound:
            return
        if wanted is None:
            outliers = self._contributions.outliers(proposal.contributors, self._key, 0)
            for peer in outliers:
                self.agreement.accuse(peer, "norm", self.now())
            if outliers:
                return
        self._on_phase(self.round, "vote")
        self._vote(digest)

    def _finished_contributors(self, proposal: Proposal) -> Collection[PeerId]:
        """Return the contributors whose payloads are here."""
        return [entry.peer for entry in proposal.contributors if self._store.whole(entry.key)]

    def culprit(self, proposal: Proposal) -> tuple[PeerId, str] | None:
        """Return the contributor that the round waits for and the reason, or None."""
        for entry in proposal.contributors:
            key = entry.key
            if reason := self._store.fault(key):
                return entry.peer, reason
            if not self._store.whole(key):
                return self._missing_data_of(entry.peer)
        return None

    def debtors(self, proposal: Proposal) -> Collection[PeerId]:
        """Return the peers that should bring us missing pieces: their contributors, or helpers."""
        return {self._helper(slot) or self.owners[slot] for slot in self.results.missing_indices()} - {self.me}

    # --- missing pieces from other peers

    def tick(self) -> None:
        """Let time pass before the commit: also ask for announced pieces that do not arrive."""
        super().tick()
        if self.results.missing:
            self._request_missing()

    def _request_missing(self) -> None:
        """Ask other peers for announced pieces that do not arrive: sooner if their sender is unreachable."""
        proposal, now, patience = self.proposal, self.now(), self.agreement.terms.patience
        if proposal is None or self.me not in proposal.alive or not self._requests.due(now, patience):
            return
        pieces = [
            MissingPiece(slot, slot % len(self.pieces), self.owners[slot], self._helper(slot))
            for slot in self.results.missing_indices()
            if self.results.expected_hash(slot) is not None
        ]
        live = self.agreement.electorate.live
        found = self._requests.plan(
            proposal, pieces, live, progressed_at=self.progress.progressed_at, now=now, patience=patience
        )
        for peer, part in found.items():
            self.send_queue.control(peer, Fetch(self.round, self.fragment, self._key, tuple(part)))

    def serves(self, sender: PeerId, message: Fetch) -> bool:
        """Return True if a peer may get the pieces that it asks for, also before all are here.

        Note those of our payload: its helper failed to forward them.
        """
        proposal, count = self.proposal, len(self.pieces)
        served = super().serves(sender, message) or message.digest == self._key
        if served and proposal is not None and self.agreement.commit is None:
            lost = [
                slot % count for slot in message.indices if slot < len(self.owners) and self.owners[slot] == self.me
            ]
            self._relay_plan.note_request(sender, lost)
        return served
