"""One peer's round of one fragment.

It connects the agreement (which peers take part, whether the round commits) with the data plane, which sends and aggregates
the chunks.

Everything is event-driven and runs on the thread of the event loop. Payloads are checked against the hashes that their
contributor announced, results against the signed record of their owner, and all results against the digest that was voted
for. The leader gets a complaint (`Blame`) about a peer that misbehaves.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import ref

import msgspec
from thinwire.collectives.consensus.members.peer_standing import PeerStanding
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounds.data_planes.contributions import ContributionSummary
from thinwire.collectives.rounds.data_planes.data_plane import DataPlane, ignore
from thinwire.collectives.rounds.repair import Repair, ResultServer
from thinwire.collectives.rounds.stall_detector import StallDetector
from thinwire.collectives.timing import MAX_TRANSFER, STALL
from thinwire.compression.core.types import Buffer
from thinwire.swarm.frame import Frame
from thinwire.swarm.keyring import Keyring
from thinwire.swarm.messages.registry import (
    Ask,
    Chunk,
    Commit,
    CompactCommit,
    Fetch,
    Partial,
    PeerId,
    Propose,
    Ready,
    Result,
    ResultClaim,
    ResultRecord,
    ShownReady,
    Span,
    Subtotal,
)


def _unknown() -> tuple[int, int]:
    return 0, 0


@dataclass(frozen=True, slots=True)
class LinkReport:
    """Links of this peer, as its announcements report them.

    - `site`: network that this peer shares with others.
    - `rates`: returns the rates of our link up and down, in bytes/s (0: unknown).
    - `spans`: returns our measurements of links to some peers.
    """

    site: str = ""
    rates: Callable[[], tuple[int, int]] = _unknown
    spans: Callable[[], tuple[Span, ...]] = tuple


UNKNOWN_LINKS = LinkReport()


def _pump(round: ref[Round]) -> None:
    # A strong reference would be a cycle: the results of a dropped round would stay in memory until the next collection.
    if (current := round()) is not None:
        current.pump()


class Round:
    """One peer's part in one round of one fragment.

    Pass it frames (`on_frame`), time (`tick`) and link changes (`on_link_up`, `on_link_down`). `announce` announces our own
    contribution; `wait` returns the Outcome. After the commit the round still serves results to peers that lack some.

    - `keyring`: keys with which the agreement checks signatures. The round adds the keys that proposals carry.
    - `attempt`: number of our last announcement, if this round had one before.
    - `on_phase`: called with the round and the name of each of its phases.
    """

    def __init__(
        self,
        data_plane: DataPlane,
        keyring: Keyring,
        *,
        attempt: int = 0,
        links: LinkReport = UNKNOWN_LINKS,
        standing: PeerStanding | None = None,
        on_phase: Callable[[int, str], object] = ignore,
    ) -> None:
        agreement = data_plane.agreement
        self.agreement, self.data_plane = agreement, data_plane
        self.me, self.round, self.fragment = agreement.me, agreement.terms.round, agreement.terms.fragment
        self._send_queue, self._now, self._on_phase = data_plane.send_queue, data_plane.now, on_phase
        data_plane.subscribe(on_phase, partial(_pump, ref(self)))
        self.attempt = attempt
        self._keyring, self._links, self._standing = keyring, links, standing or PeerStanding()
        self._repair, self._server = Repair(data_plane), ResultServer(data_plane, self._standing)
        self._stall_detector = StallDetector(data_plane)
        self.opened_at: float | None = None
        """When the ballot in progress opened here.

        Earlier data was waiting already and gives no information about the links.
        """
        self.booked = False
        """True if the outcome has been recorded for the owners and the patience of later rounds."""
        self._begun_again: set[PeerId] = set()
        """Peers that have begun this round again, and have not got our data again yet."""
        self._sent_again: dict[PeerId, float] = {}
        """Times at which peers that began this round again got our data again."""
        self._over = asyncio.Event()
        self.abandoned = False
        """True if another round takes its place: `wait` returns without a commit."""

    # --- our own contribution

    def announce(
        self,
        source: Sequence[Buffer],
        *,
        weight: int,
        loss: float,
        speed: float,
        summary: ContributionSummary | None = None,
    ) -> None:
        """Take part with the encoded chunks `source` (grid order; must not change before the round ends).

        With `weight` 0 and no source the peer takes part (it owns chunks and gets results) without contributing.
        `summary`: that of `DataPlane.summarize`, if the caller has it.
        """
        self.attempt += 1
        life = self.agreement.use_number(self.attempt)
        self.data_plane.contribute(source, self.attempt)
        if summary is None:
            summary = self.data_plane.summarize(source)
        terms, (endorsed, distrusted) = self.agreement.terms, self._standing.opinions()
        ready = Ready(
            self.round,
            self.fragment,
            self.attempt,
            terms.base,
            terms.plan,
            weight,
            summary.hashes,
            self.agreement.voter,
            float(loss),
            float(speed),
            *self._links.rates(),
            site=self._links.site,
            spans=self._links.spans(),
            life=life,
            endorses=endorsed,
            distrusts=distrusted,
            norms=summary.norms,
        )
        self._on_phase(self.round, "announce")
        self.agreement.announce(ready, self._now())
        self.pump()

    def abandon(self) -> None:
        """End our part: another round takes its place."""
        self.abandoned = True
        self.data_plane.halt()
        self.pump()

    def resume(self) -> None:
        """Continue after `wait` reported that our state differs, because no other state was available.

        Our promises (Paxos) still hold.
        """
        self.agreement.diverged = False
        self._over.clear()
        self.pump()

    async def wait(self) -> Outcome:
        """Wait until the round has committed here with all results, or our state differs from the majority's."""
        await self._over.wait()
        commit = self.agreement.commit
        missing = {entry.peer: entry.reason for entry in commit.proposal.excluded} if commit else {}
        if not self.complete or commit is None:
            return Outcome(diverged=self.agreement.diverged, missing=missing)
        return Outcome(tuple(chunk for chunk in self.results if chunk is not None), commit, missing)

    @property
    def results(self) -> Sequence[Buffer | None]:
        """The results in grid order; None where missing."""
        return self.data_plane.results.chunks

    @property
    def nbytes(self) -> int:
        """Bytes of stored contributions and results."""
        return self.data_plane.nbytes

    @property
    def missing_results(self) -> int:
        """Number of results that are missing here although the round is bound to them, see Repair."""
        return self._repair.missing_results

    @property
    def unclaimed(self) -> bool:
        """True if all results that the ballot adopts are here, and not all claims to them, see OwnerRecords."""
        return self.data_plane.unclaimed

    def unobtainable(self, without: Collection[PeerId] = ()) -> bool:
        """Return True if the round is bound to results that are missing, and no voter for them is reachable.

        `without`: peers that do not have the results, whatever they voted for.
        """
        return bool(self._repair.missing_results) and not set(self._repair.voters).difference(without)

    @property
    def progressed_at(self) -> float:
        """Time at which useful data last arrived."""
        return self.data_plane.progress.progressed_at

    @property
    def complete(self) -> bool:
        """True if every committed result is here."""
        return self.data_plane.complete

    @property
    def gives_nothing(self) -> bool:
        """True if our last announcement has no data."""
        own = self.agreement.ready.get(self.agreement.me)
        return own is not None and not own.hashes

    def given_up_at(self, began: float, give_up: float) -> float:
        """Return the time at which a peer that has waited since `began` gives this round up.

        That is after `give_up` seconds, or STALL patiences after the last whole frame came or left if that is later, so that a
        round may take as long as its links need; but after MAX_TRANSFER seconds at the latest.
        """
        stalled = self.data_plane.progress.transferred + STALL * self.agreement.terms.patience
        return max(began + give_up, min(stalled, began + MAX_TRANSFER))

    # --- events

    def on_frame(self, sender: PeerId, frame: Frame) -> None:
        """Handle a checked frame of this round and fragment."""
        message, lineage = frame.message, self.agreement.terms.lineage
        if getattr(message, "fragment", self.fragment) != self.fragment:
            return
        if isinstance(message, (Chunk, Partial, Result, ResultRecord, ResultClaim, Subtotal)):
            if getattr(message, "lineage", lineage) == lineage:  # One ballot may exist in several lineages.
                self.data_plane.take(sender, frame)
        elif isinstance(message, Fetch):
            self._server.serve(sender, message)
        else:
            if isinstance(message, (Commit, CompactCommit)):
                self._repair.note_held(sender)  # earlier reports concerned another round
            if isinstance(message, Propose):
                self._keyring.borrow(message.keys, self.agreement.terms.members)
            before = self.agreement.ready.get(sender)
            self.agreement.on_message(sender, message, frame.signature, self._now())
            if self.agreement.ready.get(sender) is not before:  # repeated announcements change nothing
                self.data_plane.announced(sender)
            if isinstance(message, Ask) and message.again:
                self._begun_again.add(sender)
                self._send_again()
        self.pump()
        if isinstance(message, ShownReady):
            self.data_plane.announcement_shown()
            self.pump()

    def _send_again(self) -> None:
        """Send peers that have begun this round again what they had before, each at most once in a patience."""
        now, patience = self._now(), self.agreement.terms.patience
        for peer in sorted(self._begun_again):
            if self.agreement.commit is None and now >= self._sent_again.get(peer, -math.inf) + patience:
                self._begun_again.discard(peer)
                self._sent_again[peer] = now
                self._send_queue.drop_data(peer, self.round, self.fragment)  # What still waits would come twice.
                self.data_plane.on_link_down(peer)
                self.data_plane.on_link_up(peer)

    def note_freed(self, peer: PeerId) -> None:
        """Note that a peer is past this round and has freed its results: ask others for what it was asked for."""
        self._repair.note_freed(peer)

    @property
    def follows(self) -> bool:
        """True if we fetch the results of a round in which we take no part: they may arrive with pauses."""
        return self._repair.follows

    @property
    def mostly_exhausted(self) -> bool:
        """True if there is a commit, but most reachable sources have freed its results."""
        return self._repair.mostly_exhausted

    @property
    def exhausted(self) -> bool:
        """True if there is a commit, and every reachable source has freed its results."""
        return self._repair.exhausted

    def on_link_down(self, peer: PeerId) -> None:
        """Handle a broken link to `peer`."""
        self._begun_again.discard(peer)  # It gets our data over its next link.
        self._server.on_link_down(peer)
        self.data_plane.on_link_down(peer)
        self.agreement.on_link_down(peer, self._now())
        self._repair.on_link_down(peer)
        self.pump()

    def on_link_up(self, peer: PeerId) -> None:
        """Handle a new link to `peer`."""
        self.agreement.reach(peer)
        self.data_plane.on_link_up(peer)
        self._repair.on_link_up(peer)
        self.pump()

    def tick(self) -> None:
        """Let time pass: tick the agreement, complain about a peer that stalls it, repeat requests."""
        now = self._now()
        self._stall_detector.count_partial_frames()
        self.agreement.tick(now)
        data_plane, committed = self.data_plane, self.agreement.commit is not None
        proposal = data_plane.proposal
        self._repair.tick(now)
        if not committed:
            data_plane.tick()
            self._send_again()
        if proposal is not None and not committed and self._repair.unproved(now):
            self.agreement.refuse_leader(proposal)
        self._stall_detector.accuse_culprit()
        self.pump()

    def pump(self) -> None:
        """Act on the agreement's decisions and send its messages."""
        proposal, commit = self.agreement.proposal, self.agreement.commit
        if commit is not None and (proposal is None or commit.proposal.ballot != proposal.ballot):
            proposal = commit.proposal
        data_plane = self.data_plane
        self._send_messages()  # a proposal before the data that it asks for: sealing and sending that takes milliseconds
        if proposal is not None and proposal is not data_plane.proposal:
            self.opened_at = self._now()
            self._stall_detector.open(proposal)
            data_plane.open(proposal)
            if proposal.adopted is not None:
                self._repair.settle(proposal.adopted)
        if commit is not None and data_plane.results.wanted != commit.digest and not self.complete:
            self._repair.settle(commit.digest)
        self._send_messages()
        if self.complete or self.agreement.diverged or self.abandoned:
            if not self._over.is_set() and self.complete:
                self._on_phase(self.round, "commit")
                data_plane.finish()
            self._over.set()

    def _send_messages(self) -> None:
        """Send the agreement's messages."""
        for to, message in self.agreement.take():
            if isinstance(message, Propose):
                # A receiver that has just joined may not know the signers.
                proposals = message.proposal, *message.earlier
                signers = {report.peer for report in message.reports}
                signers |= {one.peer for proposal in proposals for one in (*proposal.farewells, *proposal.left)}
                keys = tuple(key for peer in sorted(signers) if (key := self._keyring.key_of(peer)) is not None)
                message = msgspec.structs.replace(message, keys=keys)
            for peer in sorted(self.agreement.electorate.live) if to is None else (to,):
                if peer != self.me:
                    self._send_queue.control(peer, message)
