"""Routing of frames, link events and time to the parts of one peer's rounds."""

from __future__ import annotations

from thinwire.collectives.health.straggler_grace import StragglerGrace
from thinwire.collectives.rounds.round_factory import fragment_of, round_of
from thinwire.collectives.transport.pending_frames import PendingFrames
from thinwire.node.outer.catch_up import CatchUp
from thinwire.node.outer.lineages import Lineages
from thinwire.node.outer.own_lineage import OwnLineage
from thinwire.node.outer.session import FragmentRounds
from thinwire.node.outer.state_transfer.round_history import RoundHistory
from thinwire.node.outer.state_transfer.state_fetcher import ANSWERS
from thinwire.node.outer.state_transfer.state_server import QUESTIONS, StateServer
from thinwire.node.outer.verification.verification import Verification
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import (
    Ask,
    Behind,
    Commit,
    CompactCommit,
    Decline,
    Fetch,
    Found,
    Head,
    PeerId,
    Prepare,
    Ready,
    Result,
    ViewChange,
)


class FrameRouter:
    """Receiver of frames, link events and time for the rounds of one fragment.

    Frames of the round in progress go to it, those of past rounds to `history`, those of the next round wait in
    `pending_frames`, and those about states and lineages go to their parts. The sender of a frame of a round that is not stored
    any more is told that it is behind. `announced`: latest announcement of each peer, updated here.
    """

    def __init__(
        self,
        rounds: FragmentRounds,
        *,
        states: StateServer,
        catch_up: CatchUp,
        lineages: Lineages,
        own_lineage: OwnLineage,
        history: RoundHistory,
        straggler_grace: StragglerGrace,
        pending_frames: PendingFrames,
        announced: dict[PeerId, Ready],
        verification: Verification,
    ) -> None:
        self.dropped_frames = 0
        """Dropped frames of past or distant rounds."""
        self._replica, self._fragment = rounds.replica, rounds.fragment
        self._now, self._current = rounds.now, rounds.current
        self._live, self._send_queue = rounds.presence.live, rounds.presence.send_queue
        self._states, self._catch_up, self._lineages, self._own_lineage = states, catch_up, lineages, own_lineage
        self._history, self._straggler_grace, self._pending_frames, self._announced = (
            history,
            straggler_grace,
            pending_frames,
            announced,
        )
        self._verification = verification

    def on_link_up(self, peer: PeerId) -> None:
        self._catch_up.on_link_up(peer)
        self._lineages.on_link_up(peer)
        self._verification.audits.on_link_up(peer)
        self._current().on_link_up(peer)

    def on_link_down(self, peer: PeerId, *, gone: bool) -> None:
        self._states.on_link_down(peer)
        self._catch_up.fetcher.on_link_down(peer)
        self._history.done(peer)
        self._catch_up.on_link_down(peer, gone=gone)
        self._announced.pop(peer, None)
        self._lineages.on_link_down(peer)
        self._straggler_grace.on_link_down(peer)
        self._current().on_link_down(peer)
        self._history.on_link_down(peer)

    def on_frame(self, peer: PeerId, frame: Frame) -> None:
        message = frame.message
        self._send_queue.sample_bandwidth()
        if isinstance(message, QUESTIONS):
            self._states.on_frame(peer, frame)
        elif isinstance(message, ANSWERS):
            self._catch_up.fetcher.on_frame(peer, frame)
        elif isinstance(message, Behind):
            self._catch_up.claimed(peer, message.round)
            current = self._current()
            if message.round >= current.round:
                current.agreement.past.add(peer)
                current.note_freed(peer)
            self._catch_up.look()
        elif isinstance(message, Head):
            self._lineages.on_head(peer, message, frame.payload)
            self._catch_up.look()
        elif isinstance(message, Found):
            self._own_lineage.on_found(peer, message, frame.signature)
        else:
            self._route(peer, frame)

    def on_tick(self) -> None:
        """Let time pass in the round in progress, and in finished rounds that other peers need."""
        self._send_queue.sample_bandwidth()
        self._current().tick()
        self._history.pump()
        self.prune()
        self._catch_up.fetcher.on_tick()
        self._states.on_tick()
        self._catch_up.look()
        if not self._states.held:
            self._lineages.on_tick()
            self._own_lineage.on_tick()

    def waiting(self) -> list[tuple[PeerId, Frame]]:
        """Return the frames that have waited for the round in progress, and forget them."""
        return self._pending_frames.take(lambda frame: fragment_of(frame.message) == self._fragment)

    def _route(self, peer: PeerId, frame: Frame) -> None:
        message, number, current = frame.message, round_of(frame.message), self._current().round
        if isinstance(message, Ready):
            if message.weight:
                self._announced[peer] = message
            self._states.done(peer, number)
        if isinstance(message, Prepare) and not self._replica.members:
            self._send_queue.control(peer, Decline(number, self._fragment, "no state yet"))
        if self._verification.takes(peer, frame):
            return
        if number == current:
            self._route_present(peer, frame)
        elif number < current:
            self._route_past(peer, frame, number)
        else:
            self._route_later(peer, frame, number)

    def _route_present(self, peer: PeerId, frame: Frame) -> None:
        message, current = frame.message, self._current()
        if isinstance(message, Fetch) and current.agreement.commit is not None:
            self._history.follow(peer, current.round)
        if isinstance(message, Ready):
            self._straggler_grace.on_announcement(peer, current.round, self._now(), contributes=bool(message.weight))
        current.on_frame(peer, frame)
        if isinstance(message, (Commit, CompactCommit)):
            # Not every commit can be verified later: peers that had departed then may be here now.
            self._catch_up.claimed(peer, current.round)
            current.agreement.past.add(peer)
        if isinstance(message, Ready):
            self._history.done(peer)
            self.prune()

    def _route_past(self, peer: PeerId, frame: Frame, number: int) -> None:
        past = self._history.get(number)
        if past is not None:
            if isinstance(frame.message, (Ready, Ask, Fetch)):
                self._history.follow(peer, number)
            past.on_frame(peer, frame)
            return
        self.dropped_frames += 1
        commit = self._history.commit_of(number, peer)
        if commit is not None and isinstance(frame.message, (Ready, Ask, Prepare, ViewChange)):
            self._send_queue.control(peer, commit)
        if frame.signature:
            self._send_queue.control(peer, Behind(self._replica.round, self._fragment))

    def _route_later(self, peer: PeerId, frame: Frame, number: int) -> None:
        current = self._current()
        if number > current.round + 1:
            self.dropped_frames += 1
        elif not memoryview(frame.payload).nbytes:
            self._pending_frames.put(peer, frame)
        if isinstance(frame.message, Ready):
            current.agreement.past.add(peer)
        if frame.signature:
            self._catch_up.seen(peer, number)

    def prune(self) -> None:
        """Free past rounds that no peer needs, and our contributions to them.

        A peer asks for contributions to a round before it announces itself in the next one.
        """
        for peer in self._history.followers:
            if self._send_queue.requested(peer, Result, self._fragment):
                self._history.follow(peer)  # its pauses may be longer
                if self._history.hurried(peer):
                    self._send_queue.end_pauses(peer, self._fragment)
        self._history.prune(self._current(), self._live, read=self._states.read)
        self._verification.own_contributions.drop(self._history.continued)
