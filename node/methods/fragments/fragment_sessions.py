"""Sessions of one peer, one for each fragment that it holds.

They share links and estimates. A frame goes to the fragment that it names; link events and ticks go to all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial
from statistics import median_low
from typing import Any

from thinwire.collectives.consensus.vote_store import OpenVotes, open_in_memory
from thinwire.collectives.rounds.round import Round
from thinwire.collectives.rounds.round_factory import MAX_PENDING, MAX_PENDING_EACH, fragment_of
from thinwire.collectives.transport.pending_frames import PendingFrames
from thinwire.node.membership.presence import Presence
from thinwire.node.methods.fragments.fragment_replicas import FragmentReplicas, turn_of
from thinwire.node.methods.fragments.standby_copy import StandbyCopy
from thinwire.node.outer.round_session import RoundSession
from thinwire.node.outer.state_server import SIDE_BY_SIDE, STATE
from thinwire.node.runtime.event_log import Emit
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import Decline, Digest, PeerId, Prepare, Proposal, Ready, StateAsk, StateOffer
from thinwire.swarm.method_specs.streaming import MAX_SEPARATE

FRAME_EACH = 2
"""Control frames that each peer may have pending for every fragment beyond the first."""


class FragmentSession(RoundSession):
    """The session of one fragment."""

    def __init__(self, *shared: Any, on_advance: Callable[[], None], **named: Any) -> None:
        """Create the session. `on_advance`: called when the next round begins. Others: see RoundSession."""
        self._on_advance = on_advance
        self.over = asyncio.Event()
        """Set when the round in progress has committed, until the next one begins."""
        super().__init__(*shared, **named)

    def advanced(self) -> None:
        self.over.clear()
        self._on_advance()


class FragmentSessions:
    """Frame handler with one session (`sessions`) for each held fragment. `ahead`: that of the next turn."""

    def __init__(
        self,
        identity: Identity,
        manifest: Manifest,
        run_id: Digest,
        *,
        presence: Presence,
        replica: FragmentReplicas,
        now: Callable[[], float],
        emit: Emit,
        entered: bool = True,
        votes: OpenVotes = open_in_memory,
        patience: float = 2.0,
        on_commit: Callable[[], None] = lambda: None,
        founder: bytes = b"",
    ) -> None:
        self.me, self.replica, self.manifest = identity.peer_id, replica, manifest
        self.presence, self.roster, self.live, self._send_queue = (
            presence,
            presence.roster,
            presence.live,
            presence.send_queue,
        )
        self.announced: dict[PeerId, Ready] = {}
        """Latest announcement of each peer, of some fragment."""
        self._emit, self._strays = emit, 0
        pending_frames = PendingFrames(MAX_PENDING, MAX_PENDING_EACH + FRAME_EACH * (len(replica.fragments) - 1))
        turn = asyncio.Semaphore(SIDE_BY_SIDE)
        self.now = now
        self._heard: dict[int, dict[PeerId, tuple[int, float]]] = {}  # fragment -> peer -> (round, time)
        self.sessions: dict[int, FragmentSession] = {}
        self.copies: dict[int, StandbyCopy] = {}
        """States of fragments that this peer does not hold, by number."""
        for number, fragment in replica.fragments.items():
            self.sessions[number] = FragmentSession(
                identity,
                manifest,
                run_id,
                presence=presence,
                replica=fragment.replica,
                now=now,
                emit=partial(self._say, number),
                entered=entered,
                votes=votes,
                patience=patience,
                fragment=number,
                pending_frames=pending_frames,
                turn=turn,
                announced=self.announced,
                on_advance=self._advanced,
                on_commit=partial(self._committed, number, on_commit),
                founder=founder,
            )
        self.ahead: RoundSession = next(iter(self.sessions.values()))
        if presence.watch is not None:
            presence.watch.fragments = self.sessions

    def _say(self, number: int, name: str, fields: Mapping[str, object]) -> None:
        """Emit an event of one fragment; its round is given as a turn, from 1 on."""
        changed, round = {**fields, "fragment": number}, fields.get("round")
        if isinstance(round, int):
            changed["round"] = turn_of(number, round - 1, self.replica.count) + 1 if round else 0
            if not round:
                changed.pop("digest", None)  # each fragment has a different initial state
        self._emit(name, changed)

    def _committed(self, number: int, on_commit: Callable[[], None]) -> None:
        self.sessions[number].over.set()
        on_commit()

    def _advanced(self) -> None:
        self.roster.progress = self.replica.round

    @property
    def current(self) -> Round:
        return self.ahead.current

    @property
    def overtaken(self) -> bool:
        """True if the other peers have completed the next turn: further training for it is useless."""
        return self.ahead.overtaken

    @property
    def ready(self) -> Collection[PeerId]:
        return {peer for session in self.sessions.values() for peer in session.ready}

    def waiting_for(self) -> Collection[PeerId]:
        """Return the peers that the round of the next turn waits for."""
        return self.ahead.waiting_for()

    def stalled(self) -> str:
        """Return why rounds of some fragment cannot commit, see RoundSession."""
        stalls = {number: session.stalled() for number, session in self.sessions.items()}
        return "; ".join(f"fragment {number}: {text}" for number, text in stalls.items() if text)

    @property
    def strays(self) -> int:
        """Dropped frames: of past or distant rounds, and of unknown fragments."""
        return self._strays + sum(session.strays for session in self.sessions.values())

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return size and limit of each buffer, by name."""
        return {
            f"{name} {number}": one
            for number, session in self.sessions.items()
            for name, one in session.sizes().items()
        }

    def report(self, name: str, detail: str) -> None:
        """Emit an event about this peer."""
        self._emit(name, {"peer": self.me.hex(), "detail": detail})

    def leave(self) -> None:
        """Say farewell in the rounds in progress of all fragments."""
        for session in self.sessions.values():
            session.leave()

    def take_part(self) -> None:
        """Become a member of the next rounds of all fragments without a contribution."""
        for session in self.sessions.values():
            session.take_part()

    # --- frame handler

    def on_link_up(self, peer: PeerId) -> None:
        for session in self.sessions.values():
            session.on_link_up(peer)

    def on_link_down(self, peer: PeerId, *, gone: bool) -> None:
        for announced in self._heard.values():
            announced.pop(peer, None)
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
                announced = self._heard.setdefault(number, {})
                if announced.get(peer, (0, 0.0))[0] < message.round:
                    announced[peer] = message.round, self.now()
            session.on_frame(peer, frame)
        elif copy is not None and (message.copy if isinstance(message, StateAsk) else isinstance(message, STATE)):
            copy.on_frame(peer, frame)
        elif isinstance(message, StateAsk):
            if self._send_queue.later(peer, StateOffer) <= MAX_SEPARATE:
                nothing = StateOffer(0, bytes(32), bytes(32), 0, (), number)
                self._send_queue.bulk(peer, Frame(nothing), later=True)
        elif isinstance(message, Prepare) and number < self.replica.count:
            self._send_queue.control(peer, Decline(message.round, number, "no state"))
        else:
            self._strays += number >= self.replica.count

    def late(self, proposal: Proposal, at: float) -> float:
        """Return the seconds by which half of the contributors were ready before `at`; 0 if we contribute."""
        entries, heard = {entry.peer for entry in proposal.contributors}, self._heard.get(proposal.fragment, {})
        times = [heard[peer][1] for peer in entries if peer in heard and heard[peer][0] == proposal.round]
        return at - median_low(times) if times and self.me not in entries else 0.0

    def on_tick(self) -> None:
        for session in self.sessions.values():
            session.on_tick()
        for copy in self.copies.values():
            copy.on_tick()
