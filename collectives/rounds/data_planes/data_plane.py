"""Base of the algorithms that move the data of a round.

`Butterfly` averages chunks at their owners, `Ring` sums them from peer to peer, `AllGather` sends every payload to
all peers. All of them send only announced data, accept only announced or settled data, store early frames, and vote
when they have every result. The leader gets a complaint (`Blame`) about a peer that misbehaves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar

import blake3
import msgspec
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.consensus.proposal import MISSING
from thinwire.collectives.rounds.data_planes.contributions import Contributions, ContributionSummary, summarize
from thinwire.collectives.rounds.data_planes.result_store import Results
from thinwire.collectives.rounds.data_planes.transfer_progress import TransferProgress
from thinwire.collectives.transport.pending_frames import PendingFrames
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.compression.core.types import Buffer
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import (
    Ask,
    Ballot,
    Chunk,
    Digest,
    Fetch,
    PeerId,
    Proposal,
    Result,
    ResultClaim,
    ResultRecord,
)


def ignore(*arguments: object) -> None:
    """Do nothing: the default handler of an event."""


class DataPlane(ABC):
    """One peer's part in moving the data of one round of one fragment.

    `early`: limits of stored early frames: in all, per sender, and optionally bytes.
    """

    repair_patiences: ClassVar[float] = 1.0
    """Patiences without progress before settled but missing results are requested from their holders."""
    complaint_patiences: ClassVar[Mapping[str, float]] = {}
    """Patiences without progress before a complaint about a peer, by reason, if more than one."""
    compares_peers: ClassVar[bool] = True
    """True if enough peers send directly to us to compare them, so that some may be late."""

    def __init__(
        self,
        agreement: Agreement,
        *,
        results: Results,
        contributions: Contributions,
        early: tuple[int, int] | tuple[int, int, int],
        send_queue: SendQueue,
        now: Callable[[], float],
    ) -> None:
        self.agreement, self.results = agreement, results
        self.me, self.round, self.fragment = agreement.me, agreement.terms.round, agreement.terms.fragment
        self.proposal: Proposal | None = None
        """The ballot in progress at this peer."""
        self.owners: tuple[PeerId, ...] = ()
        """The owner of each result in that ballot."""
        self.progress = TransferProgress(agreement, send_queue, now, compares=self.compares_peers)
        self.ratios: Mapping[PeerId, float] = {}
        """After the round: norms of contributions, in units of the norm to which each is clipped."""
        self.send_queue, self.now = send_queue, now
        self._on_phase: Callable[[int, str], object] = ignore
        self._on_result: Callable[[], object] = ignore
        self._contributions = contributions
        self._source: Sequence[Buffer] = ()
        self._attempt = 0
        self._delivered: set[PeerId] = set()
        self._keys: dict[Ballot, bytes] = {}
        self._key = b""
        self._sent: set[tuple[PeerId, int]] = set()
        self._early = PendingFrames(*early)

    def subscribe(self, on_phase: Callable[[int, str], object], on_result: Callable[[], object]) -> None:
        """Report events from now on.

        - `on_phase`: called with the round and the name of each of its phases.
        - `on_result`: called when a result was computed aside, because there may be messages to send.
        """
        self._on_phase, self._on_result = on_phase, on_result

    @property
    def failed(self) -> set[PeerId]:
        """Peers that must not own chunks in the next rounds."""
        return set()

    @property
    def withheld(self) -> set[PeerId]:
        """Contributors that are excluded for missing data, except those that sent us all that we need."""
        commit = self.agreement.commit
        out = commit.proposal.excluded if commit is not None else ()
        return {entry.peer for entry in out if entry.reason == MISSING} - self._delivered - {self.me}

    def _finished_contributors(self, proposal: Proposal) -> Collection[PeerId]:
        """Return the contributors of a ballot that have sent us all data that we need, if we need any."""
        return ()

    def _finished_owners(self) -> Collection[PeerId]:
        """Return the owners whose results are all here."""
        return ()

    def tick(self) -> None:
        """Let time pass before the commit: note which peers have sent us everything."""
        if (proposal := self.proposal) is not None:
            contributors, owners = {entry.peer for entry in proposal.contributors}, set(self.owners)
            self.progress.update(contributors, self._finished_contributors(proposal), owners, self._finished_owners())

    @property
    def complete(self) -> bool:
        """True if every committed result is here."""
        commit = self.agreement.commit
        return commit is not None and self.results.digest == commit.digest

    @property
    def nbytes(self) -> int:
        """Bytes of stored contributions, including our own if we aggregate them, and of results."""
        return self._contributions.nbytes + self.results.nbytes

    @property
    def early(self) -> tuple[int, int]:
        """Number of stored early frames, and its limit."""
        return len(self._early), self._early.total

    @property
    def source(self) -> Sequence[Buffer]:
        """Our own encoded chunks; empty before `contribute` and after the round."""
        return self._source

    def summarize(self, source: Sequence[Buffer]) -> ContributionSummary:
        """Return what our announcement contains of these encoded chunks. May run in any thread."""
        return summarize(source)

    def contribute(self, source: Sequence[Buffer], attempt: int) -> None:
        """Set our own encoded chunks and the number of their announcement."""
        self._source, self._attempt = source, attempt
        self._sent.clear()  # no peer has any of this yet

    def finish(self) -> None:
        """Free the round's data: everything committed is here."""
        self._source = ()
        self.halt()
        if self.agreement.commit is not None:
            self.ratios = self._contributions.ratios(self.agreement.commit.proposal.contributors)
        self._contributions.finish(self._key, learns=self._learns)

    def halt(self) -> None:
        """Drop what waits for more data or computation: this round is over here."""
        self._early.clear()
        self._on_result = ignore

    @property
    def _learns(self) -> bool:
        """True if this round updates the usual norms.

        Peers that may contribute at any time often contribute alone, and must not define the norms then.
        """
        commit, buffered = self.agreement.commit, self.agreement.terms.buffered
        return not buffered or commit is None or 2 * len(commit.proposal.contributors) > len(commit.proposal.alive)

    def on_link_down(self, peer: PeerId) -> None:
        """Mark data sent to `peer` as possibly lost."""
        self._sent = {key for key in self._sent if key[0] != peer}

    @abstractmethod
    def on_link_up(self, peer: PeerId) -> None:
        """Send a newly connected `peer` what it lacks."""

    @abstractmethod
    def open(self, proposal: Proposal) -> None:
        """Handle a new ballot: send the data it asks for."""

    @abstractmethod
    def check(self) -> None:
        """Vote when every result is here, and signed for or settled."""

    def _vote(self, digest: Digest) -> None:
        """Vote for our results, unless the agreement has another proposal, which has not begun here."""
        if self.proposal is self.agreement.proposal:
            self.agreement.complete(digest, self.now())

    def announcement_shown(self) -> None:
        """Handle an announcement that another peer has shown to us: adopted results may count with it."""
        self.check()

    @property
    def waits(self) -> bool:
        """True if we cannot vote yet because other peers have not sent something."""
        return bool(self.results.missing)

    @abstractmethod
    def culprit(self, proposal: Proposal) -> tuple[PeerId, str] | None:
        """Return the peer that the round waits for and the reason, or None."""

    def _missing_data_of(self, peer: PeerId) -> tuple[PeerId, str]:
        """Return a contributor whose data is missing here, with the reason."""
        return peer, MISSING if peer in self.agreement.ready else "not announced"

    def debtors(self, proposal: Proposal) -> Collection[PeerId]:
        """Return the peers that the round waits for, and that must send us data over our link to them."""
        found = self.culprit(proposal)
        return () if found is None else (found[0],)

    @property
    def unclaimed(self) -> bool:
        """True if all results that the ballot adopts are here, and not all that an audit of them needs."""
        return False

    def claims(self) -> Sequence[ResultClaim]:
        """Return the claims of owners to the results."""
        return ()

    def serves(self, sender: PeerId, message: Fetch) -> bool:
        """Return True if a peer may get the results that it asks for; note the request."""
        return self.results.digest == message.digest

    def announced(self, sender: PeerId) -> None:
        """Handle an announcement: free obsolete chunks of its sender, and take frames that arrived before it."""
        named = self.proposal.contributors if self.proposal else ()
        attempts = {entry.attempt for entry in named if entry.peer == sender}
        self._contributions.forget(sender, {self.agreement.ready[sender].attempt, *attempts})
        self._replay()

    def take(self, sender: PeerId, frame: Frame) -> None:
        """Take a Chunk, Result or ResultRecord; ignore messages of other planes.

        A frame that has overtaken the message that explains it is stored for later.
        """
        message = frame.message
        if isinstance(message, Chunk):
            ready = self.agreement.ready.get(sender)
            if ready is None or message.attempt > ready.attempt:
                self._keep_early(sender, frame)
            else:
                self._take_chunk(sender, message, frame)
        elif isinstance(message, (Result, ResultRecord)):
            if not self._belongs(message.ballot):
                self._keep_early(sender, frame)
            elif isinstance(message, ResultRecord):
                self._take_record(sender, message, frame.signature)
            else:
                self._take_result(sender, message, frame)

    def _belongs(self, ballot: Ballot) -> bool:
        """Return True if a ballot is known here and has the same results as the one in progress."""
        return bool(self._key) and self._keys.get(ballot) == self._key

    def _keep_early(self, sender: PeerId, frame: Frame) -> None:
        """Store a frame that has overtaken the message that explains it."""
        if self._fits(frame) and not self.complete:
            self._early.put(sender, frame)

    @abstractmethod
    def _fits(self, frame: Frame) -> bool:
        """Return True if a frame can belong to this round, judging by its lengths."""

    @abstractmethod
    def _take_chunk(self, sender: PeerId, message: Chunk, frame: Frame) -> None: ...

    @abstractmethod
    def _take_record(self, sender: PeerId, record: ResultRecord, signature: bytes) -> None: ...

    @abstractmethod
    def _take_result(self, sender: PeerId, message: Result, frame: Frame) -> None: ...

    def _note_ballot(self, proposal: Proposal) -> bool:
        """Note a ballot; return whether the present results do not count in it.

        Results that an earlier ballot adopted may be false, so they do not count in a later one that computes its results.
        """
        if self.proposal is not None and self.proposal.adopted is None:
            self._delivered |= set(self._finished_contributors(self.proposal))
        self.proposal = proposal
        self.progress.begin()
        key = blake3.blake3(msgspec.msgpack.encode(self._basis(proposal))).digest()
        self._keys[proposal.ballot] = key
        computes = proposal.adopted is None and self.agreement.commit is None
        changed, self._key = key != self._key or (computes and self.results.wanted is not None), key
        return changed

    def _basis(self, proposal: Proposal) -> object:
        """Return the inputs that determine the results of a ballot."""
        return proposal.contributors

    def _begin(self, proposal: Proposal) -> None:
        """Start a ballot: send our contribution and ask for announcements that we missed."""
        self._on_phase(self.round, "open")
        if self.agreement.commit is None:
            if self._withdrawn(proposal):
                self.agreement.accuse(self.me, "withdrawn", self.now())
            self._scatter(proposal)
            self._ask_unannounced(proposal)
        if proposal.adopted is not None:
            self.results.settle(proposal.adopted)

    @abstractmethod
    def _scatter(self, proposal: Proposal) -> None:
        """Send our contribution to its receivers, unless it was sent already."""

    def _withdrawn(self, proposal: Proposal) -> bool:
        """Return True if a ballot names a contribution of ours that we no longer have."""
        named = any(entry.peer == self.me for entry in proposal.contributors)
        return named and proposal.adopted is None and not self._names_our_contribution(proposal)

    def _names_our_contribution(self, proposal: Proposal) -> bool:
        ours = (self.me, self._attempt)
        found = [entry for entry in proposal.contributors if entry.key == ours]
        return bool(self._source) and bool(found) and self.agreement.announcements.find(found[0]) is not None

    def _ask_unannounced(self, proposal: Proposal) -> None:
        """Ask for earlier announcements: chunks are meaningless without them, and a late peer missed them."""
        for entry in proposal.contributors:
            ready = self.agreement.ready.get(entry.peer)
            if self.me in proposal.alive and (ready is None or ready.attempt < entry.attempt):
                self.send_queue.control(entry.peer, Ask(self.round, self.fragment))

    def _replay(self) -> None:
        """Take again the frames that arrived before the message that explains them."""
        if len(self._early):
            for sender, frame in self._early.take():
                self.take(sender, frame)

    def awaited_peers(self, proposal: Proposal) -> Collection[PeerId]:
        """Return the peers from which we wait for data in this ballot."""
        return [peer for peer in proposal.group if peer != self.me]
