"""Sessions of one peer, one for each fragment that it holds.

They share links and estimates. A frame goes to the fragment that it names; link events and ticks go to all.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Mapping
from functools import partial
from statistics import median_low

from thinwire.collectives.rounds.round_factory import MAX_PENDING, MAX_PENDING_EACH, fragment_of
from thinwire.collectives.transport.pending_frames import PendingFrames
from thinwire.node.methods.fragments.fragment_replicas import FragmentReplicas, turn_of
from thinwire.node.methods.fragments.standby_copy import StandbyCopy
from thinwire.node.outer.round_session import RoundSession
from thinwire.node.outer.session import Session, SessionContext
from thinwire.node.outer.state_transfer.state_server import SIDE_BY_SIDE
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Decline, PeerId, Prepare, Proposal, Ready, StateAsk, StateOffer
from thinwire.swarm.method_specs.streaming import MAX_SEPARATE

FRAME_EACH = 2
"""Control frames that each peer may have pending for every fragment beyond the first."""


class FragmentSessions(Session):
    """Session of each held fragment (`sessions`). `ahead`: that of the next turn."""

    def __init__(self, context: SessionContext, replica: FragmentReplicas) -> None:
        super().__init__(context)
        self.replica = replica
        self._dropped_frames = 0
        pending_frames = PendingFrames(MAX_PENDING, MAX_PENDING_EACH + FRAME_EACH * (len(replica.fragments) - 1))
        turn = asyncio.Semaphore(SIDE_BY_SIDE)
        self.now = context.now
        self._announced_at: dict[int, dict[PeerId, tuple[int, float]]] = {}
        """By fragment and peer: round of the last announced contribution, and when that came."""
        self._sessions: dict[int, RoundSession] = {}
        self.committed: dict[int, asyncio.Event] = {number: asyncio.Event() for number in replica.fragments}
        """For each held fragment: set when its round in progress has committed, until the next one begins."""
        self.copies: dict[int, StandbyCopy] = {}
        """States of fragments that this peer does not hold, by number."""
        for number, fragment in replica.fragments.items():
            self._sessions[number] = RoundSession(
                dataclasses.replace(
                    context,
                    emit=partial(self._emit_of, number),
                    on_commit=partial(self._on_commit, number, context.on_commit),
                ),
                fragment.replica,
                number,
                announced=self.announced,
                pending_frames=pending_frames,
                turn=turn,
                on_advance=partial(self._on_advance, number),
            )
        self.ahead = next(iter(self._sessions.values()))
        if self.presence.watch is not None:
            self.presence.watch.fragments = self._sessions

    @property
    def sessions(self) -> dict[int, RoundSession]:
        return self._sessions

    def _emit_of(self, number: int, name: str, fields: Mapping[str, object]) -> None:
        """Emit an event of one fragment; its round is given as a turn, from 1 on."""
        changed, round = {**fields, "fragment": number}, fields.get("round")
        if isinstance(round, int):
            changed["round"] = turn_of(number, round - 1, self.replica.count) + 1 if round else 0
            if not round:
                changed.pop("digest", None)  # each fragment has a different initial state
        self._emit(name, changed)

    def _on_commit(self, number: int, on_commit: Callable[[], None]) -> None:
        self.committed[number].set()
        on_commit()

    def _on_advance(self, number: int) -> None:
        self.committed[number].clear()
        self.roster.progress = self.replica.round

    @property
    def overtaken(self) -> bool:
        return self.ahead.overtaken

    @property
    def ready(self) -> Collection[PeerId]:
        return {peer for session in self.sessions.values() for peer in session.ready}

    def waiting_for(self) -> Collection[PeerId]:
        return self.ahead.waiting_for()

    def stalled(self) -> str:
        stalls = {number: session.stalled() for number, session in self.sessions.items()}
        return "; ".join(f"fragment {number}: {text}" for number, text in stalls.items() if text)

    @property
    def fruitless(self) -> bool:
        return any(session.fruitless for session in self._sessions.values())

    @property
    def dropped_frames(self) -> int:
        return self._dropped_frames + sum(session.dropped_frames for session in self.sessions.values())

    def sizes(self) -> dict[str, tuple[int, int]]:
        return {
            f"{name} {number}": one
            for number, session in self.sessions.items()
            for name, one in session.sizes().items()
        }

    def leave(self) -> None:
        for session in self.sessions.values():
            session.leave()

    # --- frame handler

    def on_link_up(self, peer: PeerId) -> None:
        for session in self.sessions.values():
            session.on_link_up(peer)

    def on_link_down(self, peer: PeerId, *, gone: bool) -> None:
        for times in self._announced_at.values():
            times.pop(peer, None)
        for session in self.sessions.values():
            session.on_link_down(peer, gone=gone)
        for copy in self.copies.values():
            copy.on_link_down(peer)

    def on_frame(self, peer: PeerId, frame: Frame) -> None:
        """Route a frame to its fragment."""
        message = frame.message
        number = fragment_of(message)
        session, copy = self.sessions.get(number), self.copies.get(number)
        if session is not None:
            if isinstance(message, Ready) and message.weight and peer in self.live:
                times = self._announced_at.setdefault(number, {})
                if times.get(peer, (0, 0.0))[0] < message.round:
                    times[peer] = message.round, self.now()
            session.on_frame(peer, frame)
        elif copy is not None and copy.takes(message):
            copy.on_frame(peer, frame)
        elif isinstance(message, StateAsk):
            if self._send_queue.requested(peer, StateOffer) <= MAX_SEPARATE:
                nothing = StateOffer(0, bytes(32), bytes(32), 0, (), number)
                self._send_queue.bulk(peer, Frame(nothing), requested=True)
        elif isinstance(message, Prepare) and number < self.replica.count:
            self._send_queue.control(peer, Decline(message.round, number, "no state"))
        else:
            self._dropped_frames += number >= self.replica.count

    def late(self, proposal: Proposal, at: float) -> float:
        """Return the seconds by which half of the contributors were ready before `at`; 0 if we contribute."""
        contributors = {entry.peer for entry in proposal.contributors}
        announced = [self._announced_at.get(proposal.fragment, {}).get(peer, (0, 0.0)) for peer in contributors]
        times = [time for round, time in announced if round == proposal.round]
        return at - median_low(times) if times and self.me not in contributors else 0.0

    def on_tick(self) -> None:
        for session in self.sessions.values():
            session.on_tick()
        for copy in self.copies.values():
            copy.on_tick()
