"""Butterfly: the owner of a chunk aggregates its contributions and sends the result to all peers.

Each peer owns some chunks (reduce-scatter and all-gather in one hop each, as in hivemind); it is not recursive halving.
Payloads are checked against the hashes that their contributor announced, results against the signed record of their
owner, and all results against the digest that was voted for. The leader gets a complaint (`Blame`) about a peer that
misbehaves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import ClassVar

import blake3
from thinwire.collectives.blocking_work import Work, at_once
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.rounds.data_planes.contributions import (
    UNCHECKED,
    Contributions,
    ContributionSummary,
    OwnerChecks,
    ResultScreen,
    norm_bytes,
)
from thinwire.collectives.rounds.data_planes.data_plane import DataPlane
from thinwire.collectives.rounds.data_planes.owned_chunks import OwnedChunks
from thinwire.collectives.rounds.data_planes.owner_records import OwnerRecords
from thinwire.collectives.rounds.data_planes.owner_results import (
    AuditData,
    ChunkReducer,
    audit_data,
)
from thinwire.collectives.rounds.data_planes.result_store import Results
from thinwire.collectives.topology.bandwidth_shares import MOST
from thinwire.collectives.topology.owner_pace import OwnerPace
from thinwire.collectives.topology.shards import Grid, owners
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.types import Buffer
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import (
    MAX_GROUP,
    Ballot,
    Chunk,
    Contribution,
    ContributionKey,
    Digest,
    Partial,
    PeerId,
    Proposal,
    Result,
    ResultClaim,
    ResultRecord,
    Subtotal,
)

RESULT_MISSING = "result missing"
"""Reason of a complaint about an owner."""


def _computed(
    reducer: ChunkReducer, payloads: Sequence[Buffer], weights: Sequence[float], size: int
) -> tuple[Buffer, Digest]:
    """Return the encoded aggregate of payloads of `size` elements, and its hash. May run in any thread."""
    result = reducer.result(payloads, weights, size)
    return result, blake3.blake3(result).digest()


class Butterfly(DataPlane):
    """Data plane in which every chunk has an owner that computes its result.

    - `seed`: draws the owners of chunks.
    - `usual`: running norm of each chunk, stored by the caller.
    - `checks`: only for a plain butterfly. The owners of a subclass do not have all contributions, or use other values, too.
    - `aside`: computes large results, one after the other; `at_once`: when the last contribution arrives.
    """

    # An owner that waits for a contribution gets the time to name its sender before the others name the owner.
    complaint_patiences: ClassVar[Mapping[str, float]] = {RESULT_MISSING: 1.25}
    repair_patiences: ClassVar[float] = (
        0.25  # data being sent arrives by then, and peers store results for one more round only
    )

    def __init__(
        self,
        agreement: Agreement,
        reducer: ChunkReducer,
        grid: Grid,
        *,
        seed: bytes,
        usual: dict[int, float],
        send_queue: SendQueue,
        now: Callable[[], float],
        checks: OwnerChecks = UNCHECKED,
        aside: Work = at_once,
    ) -> None:
        super().__init__(
            agreement,
            results=Results(len(grid)),
            contributions=Contributions(reducer, grid, usual),
            early=((MOST + 1 if agreement.terms.chunks else 2) * len(grid) + MAX_GROUP, 2 * len(grid) + 8),
            send_queue=send_queue,
            now=now,
        )
        self.grid, self._reducer, self._seed = grid, reducer, seed
        self._owned = OwnedChunks(self.results, self._contributions, aside, send_queue.fail)
        self._collectors: tuple[PeerId, ...] = ()
        """Peer that receives the contributions to each chunk in the ballot in progress."""
        self._recorded: Ballot | None = None
        """Ballot for which we have signed our results."""
        self._pace = OwnerPace()
        self._audited = checks.audited
        self._screen = ResultScreen(reducer, grid, checks, agreement.announcements.find)
        self._records = OwnerRecords(agreement, self.results, audited=checks.audited)
        self.refused: dict[PeerId, str] = {}
        """Owners whose results were refused for their norms, with the reason."""
        self.audit_data: AuditData | None = None
        """After an audited round: what an audit of its owners needs."""

    # --- a ballot opens

    def open(self, proposal: Proposal) -> None:
        """Handle a new ballot: send chunks to their owners and reduce our own chunks."""
        self._pace.open(proposal, self.now())
        if self._note_ballot(proposal):
            self._recorded = None
            self._drop_results(proposal)
        before = self.owners
        self._assign(proposal)
        self._records.open(proposal, self.owners)
        for index, owner in enumerate(before):
            if owner != self.owners[index]:
                self.results.unsign(index)
        self._begin(proposal)
        self._resume(proposal)
        self._replay()
        self._send_record()
        self.check()

    def _drop_results(self, proposal: Proposal) -> None:
        """Drop results and computations: they do not belong to this ballot."""
        self._owned.clear()
        self.results.clear()
        self._records.clear()

    def _assign(self, proposal: Proposal) -> None:
        """Determine the owner of each chunk and the peer that receives the contributions to it."""
        working = [peer for peer in proposal.alive if peer not in proposal.idle]
        self._set_owners(proposal, self._choose_owners(proposal, working))
        self._collectors = self.owners

    def _set_owners(self, proposal: Proposal, owners: tuple[PeerId, ...]) -> None:
        self.owners = owners
        self._owned.indices = [i for i, owner in enumerate(owners) if owner == self.me and self.me in proposal.alive]

    def _choose_owners(self, proposal: Proposal, working: Sequence[PeerId]) -> tuple[PeerId, ...]:
        """Return the owner of each chunk, one of the `working` peers."""
        return owners(len(self.grid), proposal.group, working, self._seed, proposal.shares, self.fragment)

    def _resume(self, proposal: Proposal) -> None:
        """Send or compute our results as the new ballot requires."""
        for index in self._owned.indices:
            here = self.results.chunks[index] is not None
            if here and self._records.computes and not self._records.computed((index,)):
                self.results.drop(index)  # We would sign for the result of an earlier owner, which may have lied.
            if self.results.chunks[index] is not None:
                self._send_result(proposal, index, self._result_receivers(proposal, index))
            else:
                self._reduce(index)

    def on_link_up(self, peer: PeerId) -> None:
        """Send a newly connected peer its chunks and our results."""
        proposal = self.proposal
        if proposal is not None and peer in proposal.alive and self.agreement.commit is None:
            self._scatter(proposal)
            for index in self._owned.indices:
                self._send_result(proposal, index, (peer,))

    def _fits(self, frame: Frame) -> bool:
        """Return True if a frame's index and length fit this round."""
        message, size = frame.message, memoryview(frame.payload).nbytes
        if not isinstance(message, (Chunk, Partial, Result, Subtotal)):
            return True  # a record
        return message.index < len(self.grid) and size <= self._reducer.nbytes(self.grid.size(message.index))

    def halt(self) -> None:
        """Drop what waits for more data or computation: this round is over here."""
        super().halt()
        self._owned.clear()

    def finish(self) -> None:
        """Free the round's data; store what an audit needs."""
        super().finish()
        commit = self.agreement.commit
        if self._audited and commit is not None:
            find, claims = self.agreement.announcements.find, self._records.take_claims()
            self.audit_data = audit_data(commit, find, claims, self._reducer, self.grid)

    # --- contributing

    def summarize(self, source: Sequence[Buffer]) -> ContributionSummary:
        """Return hashes and, if they count, norms of our encoded chunks."""
        return self._screen.summarize(source)

    def _scatter(self, proposal: Proposal) -> None:
        if not self._names_our_contribution(proposal):
            return
        for index, owner in enumerate(self._collectors):
            if owner == self.me:
                self._take_own(index)
            elif (owner, index) not in self._sent:
                self._sent.add((owner, index))
                message = Chunk(self.round, self.fragment, self._attempt, index)
                self.send_queue.bulk(owner, Frame(message, self._source[index]))

    def _take_own(self, index: int) -> None:
        """Screen and store our own contribution to a chunk that we own; our training may have diverged."""
        if self._contributions.has((self.me, self._attempt), index):
            return
        reason = self._contributions.screen((self.me, self._attempt), index, self._source[index])
        if reason:
            self.agreement.accuse(self.me, reason, self.now())
        else:
            self._contributions.store(self.me, self._attempt, index, self._source[index])

    # --- owning chunks

    def _take_chunk(self, sender: PeerId, message: Chunk, frame: Frame) -> None:
        ready = self.agreement.ready[sender]
        if message.attempt != ready.attempt or message.index >= len(self.grid) or self.agreement.commit is not None:
            return
        key, index, held = (sender, message.attempt), message.index, self._contributions
        if held.has(key, index):
            return
        if not self._awaits(key, index):
            # It may have overtaken the proposal that asks for it. PendingFrames protects the space of other senders.
            if self._fits(frame):
                self._early.put(sender, frame)
            return
        announced = ready.hashes[32 * index : 32 * index + 32]
        norm = norm_bytes(ready.norms, index) if self._screen.bounded else None
        self._owned.note_check(key, ready.digest)
        reason = held.take(key, index, frame.payload, found=frame.hashed(), announced=announced, norm=norm)
        if reason:
            self.agreement.accuse(sender, reason, self.now())
            return
        self.progress.note_arrival()
        self._reduce(index)
        self._send_record()

    def _awaits(self, key: tuple[PeerId, int], index: int) -> bool:
        """Return True if the ballot in progress asks this contributor to send us this chunk.

        Other chunks do not count as progress.
        """
        if self.proposal is None or self._collectors[index] != self.me:
            return False
        return self._names(key, self.proposal.contributors)

    def _names(self, key: ContributionKey, entries: Sequence[Contribution]) -> bool:
        """Return True if an entry names this announcement, which we have."""
        return any(one.key == key and self.agreement.announcements.find(one) is not None for one in entries)

    def _reduce(self, index: int) -> None:
        """Compute the result of a chunk that we own once all contributions to it are here and screened."""
        proposal = self.proposal
        payloads = self._owned.inputs(proposal, index) if proposal is not None else None
        if proposal is None or payloads is None:
            return
        outliers = self._contributions.outliers(proposal.contributors, self._key, index)
        for peer in outliers:
            self.agreement.accuse(peer, "norm", self.now())
        if not outliers:
            self._compute(index, payloads, [float(entry.weight) for entry in proposal.contributors])

    def _compute(self, index: int, payloads: Sequence[Buffer], weights: Sequence[float]) -> None:
        """Compute the result of a chunk that we own from all contributions to it."""
        make = partial(_computed, self._reducer, payloads, weights, self.grid.size(index))
        if self._owned.at_once(payloads):
            self._publish(index, *make())
        else:
            self._owned.compute(index, make, self._on_computed)

    def _on_computed(self, index: int, made: tuple[Buffer, Digest]) -> None:
        """Publish a result that was computed aside, with its hash."""
        self._publish(index, *made)
        self._send_record()
        self._on_result()

    def _publish(self, index: int, result: Buffer, found: Digest) -> None:
        """Store a result of ours and send it to the other peers."""
        self.results.put(index, result, found)
        self._records.note_computed(index)
        self.progress.note_arrival()
        self._pace.note_result(self.me, self.progress.progressed_at)
        self.check()
        if self.proposal is not None:
            self._send_result(self.proposal, index, self._result_receivers(self.proposal, index))

    def _result_receivers(self, proposal: Proposal, index: int) -> Sequence[PeerId]:
        """Return the peers to which we send the result of a chunk."""
        return proposal.alive if self.owners[index] == self.me else ()

    def _send_result(self, proposal: Proposal, index: int, to: Sequence[PeerId]) -> None:
        result = self.results.chunks[index]
        if result is not None:
            frame = Frame(Result(self.round, self.fragment, proposal.ballot, index, proposal.lineage), result)
            for peer in to:
                if peer != self.me:
                    self.send_queue.bulk(peer, frame)

    def _send_record(self) -> None:
        """Sign for our results once all of them are here."""
        proposal = self.proposal
        if proposal is None or not self._owned.complete or self._recorded == proposal.ballot:
            return
        self._recorded = proposal.ballot
        record = self._records.sign(proposal, tuple(self._owned.indices))
        self._on_phase(self.round, "record")
        for peer in proposal.alive:
            if peer != self.me:
                self.send_queue.control(peer, record)

    # --- receiving results

    def take(self, sender: PeerId, frame: Frame) -> None:
        """Take a frame, including a ResultClaim."""
        if isinstance(frame.message, ResultClaim):
            self._records.take_claim(frame.message)
            self.check()
        else:
            super().take(sender, frame)

    def _is_result_source(self, sender: PeerId, index: int) -> bool:
        """Return True if a result from this peer is accepted before its hash is signed."""
        return sender == self.owners[index]

    def _take_result(self, sender: PeerId, message: Result, frame: Frame) -> None:
        index = message.index
        if index >= len(self.grid) or self.results.chunks[index] is not None:
            return
        vouches, check = self._is_result_source(sender, index), self._check_result
        taken = self.results.take(index, frame.payload, frame.hashed, check=check, from_owner=vouches)
        if taken is None and self.results.wanted is not None:
            self._early.put(sender, frame)  # it has overtaken the ResultRecord that vouches for it
        elif taken:
            self.progress.note_arrival()
            if sender == self.owners[index]:
                self._pace.note_result(sender, self.progress.progressed_at)
            if self.proposal is not None:
                self._send_result(self.proposal, index, self._result_receivers(self.proposal, index))
            self.check()
        elif taken is False:
            over_bound = self._screen.over_bound
            if over_bound and sender == self.owners[index]:
                self.refused[sender] = over_bound
            if over_bound and self.proposal is not None:
                self.agreement.refuse_leader(self.proposal)
            self.agreement.accuse(sender, "result", self.now())

    def _check_result(self, chunk: Buffer, index: int) -> None:
        """Raise CodecError for an impossible result. The norm does not matter if honest peers have checked it."""
        proposal = self.proposal
        free = proposal is None or self.agreement.decision.results_confirmed(proposal)
        self._screen.check(chunk, index, None if proposal is None or free else proposal.contributors)

    def _take_record(self, sender: PeerId, record: ResultRecord, signature: bytes) -> None:
        if self._records.sound(record) and not self.complete:
            if self._records.take(sender, record, signature):
                self._replay()
            self.check()

    def announcement_shown(self) -> None:
        """Check adopted results by the norms in announcements that have come later; vote if all are right."""
        proposal = self.proposal
        if proposal is None or proposal.adopted is None or self.agreement.decision.results_confirmed(proposal):
            return
        for index, chunk in enumerate(self.results.chunks):
            try:
                if chunk is not None:
                    self._check_result(chunk, index)
            except CodecError:
                self.results.drop(index)
                self.agreement.refuse_leader(proposal)
        self.check()

    def check(self) -> None:
        """Vote when every result is here, and signed for or settled."""
        digest, wanted = self.results.digest, self.results.wanted
        if digest is None or wanted not in (None, digest):
            return
        proposal = self.proposal
        if proposal is not None and self.unclaimed and not self.agreement.decision.results_confirmed(proposal):
            return
        if self._records.all_signed:
            self._on_phase(self.round, "vote")
            self._vote(digest)

    # --- claims of owners, for audits

    def claims(self) -> Sequence[ResultClaim]:
        """Return the claims of owners to the results."""
        return self._records.claims()

    @property
    def unclaimed(self) -> bool:
        """True if all results that the ballot adopts are here, and not all that an audit of them needs."""
        return self._records.unclaimed

    # --- peers that we wait for

    @property
    def waits(self) -> bool:
        """True if chunks, results, or an owner's signature for its results are missing."""
        return super().waits or not self._records.all_signed

    def awaited_peers(self, proposal: Proposal) -> Collection[PeerId]:
        """Return the peers from which we wait for chunks or results."""
        senders = (entry.peer for entry in self._owned.awaited(proposal))
        return {*senders, *(self.owners[index] for index in self.results.missing_indices())} - {self.me}

    def _finished_contributors(self, proposal: Proposal) -> Collection[PeerId]:
        """Return the contributors whose chunks that we own are all here."""
        return self._owned.delivered(proposal)

    def _finished_owners(self) -> Collection[PeerId]:
        """Return the owners whose results are all here, and signed for."""
        return set(self.owners) - {self.owners[index] for index in self._records.unfinished()}

    def culprit(self, proposal: Proposal) -> tuple[PeerId, str] | None:
        """Return the peer that the round waits for and the reason, or None."""
        for entry in self._owned.awaited(proposal):
            return self._missing_data_of(entry.peer)
        owners = [self.owners[index] for index in self._records.unfinished() if self.owners[index] != self.me]
        return (owners[0], RESULT_MISSING) if owners else None

    def debtors(self, proposal: Proposal) -> Collection[PeerId]:
        """Return all contributors to our chunks that we wait for, or else the owner of a missing result."""
        return {entry.peer for entry in self._owned.awaited(proposal)} or super().debtors(proposal)

    @property
    def failed(self) -> set[PeerId]:
        """Peers that must not own chunks in the next rounds.

        These are owners of the round's first ballot that own nothing in the last one, owners that signed for a result
        other than the settled one, and owners with many chunks that are slower than they announced.
        """
        if self.proposal is None:
            return set()
        nbytes = self._reducer.nbytes(self.grid.chunk)
        return self._records.contradicted | self._pace.failed(self.proposal, self.agreement.ready, nbytes)
