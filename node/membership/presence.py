"""A peer's presence in the swarm.

It runs transport and roster, from the opening of the transport until the departure.

Everything runs on the event loop. Messages that do not concern membership go to the handler of their topic, which may
be attached after the first frames: a peer that still builds its model already answers probes; otherwise the others
would consider it dead.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from thinwire.collectives.blocking_work import RationedWork, Work, at_once
from thinwire.collectives.state_sync.state_offers import ChainMemory
from thinwire.collectives.timing import TICK
from thinwire.collectives.transport.interface import Arrival, Transport
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.node.membership.handler import Handler, Timed, Topic, topic_of
from thinwire.node.membership.peer_diagnosis import PeerDiagnosis
from thinwire.node.membership.relay_watch import RelayWatch
from thinwire.node.runtime.asyncio_extra import at_intervals
from thinwire.node.runtime.event_log import Emit
from thinwire.swarm.membership.eviction import MAX_PEERS
from thinwire.swarm.membership.gossip_items import evidence_item, read_verdict, verdict_item
from thinwire.swarm.membership.swim import Roster
from thinwire.swarm.messages.registry import (
    Ack,
    Evidence,
    Gossip,
    Message,
    Nack,
    PeerId,
    Ping,
    PingRequest,
    PushPull,
    Span,
    Verdict,
)

MEMBERSHIP = frozenset((Ping, PingRequest, Ack, Nack, Gossip, PushPull))
"""Messages that the roster handles."""

STOPPED_SECONDS = 5.0
"""Seconds without a tick after which an event reports that this process did not run."""

TOLD_SECONDS = 5.0
"""Seconds in which a banned peer that still sends gets the reason; then its link is closed."""


class Presence:
    """Connects transport, roster and handlers.

    `live`: peers with a link; `duplicate` is set if another process uses our key.

    `site`: the network that this peer shares with others. `aside`: see Environment. `wall`: seconds since 1970, for the
    monitor of other peers' health, `watch`; None: there is no monitor.
    """

    def __init__(
        self,
        transport: Transport,
        roster: Roster,
        *,
        now: Callable[[], float],
        emit: Emit,
        site: str = "",
        aside: Work = at_once,
        wall: Callable[[], float] | None = None,
    ) -> None:
        self.transport, self.roster, self.site, self.aside = transport, roster, site, aside
        self.send_queue = SendQueue(transport, lambda peer: self._lose(peer, gone=False))
        self.rationed = RationedWork(now)
        """Checks of what other peers send that may take long."""
        self.chains = ChainMemory()
        """Chains that other peers have sent."""
        self.live: set[PeerId] = set()
        self.duplicate = asyncio.Event()
        self.banned = asyncio.Event()
        """Set if this peer itself is banned, for `ban_reason`."""
        self.ban_reason = ""
        self._told_until: dict[PeerId, float] = {}
        """Banned peers, each with the time until which it is told the reason."""
        self._relay_watch = RelayWatch(transport, self.send_queue)
        self._last_message_at: dict[PeerId, float] = {}
        """Time of the last message of each peer, present or not."""
        self.watch = (
            PeerDiagnosis(roster, self.send_queue, self.live, now=now, wall=wall, emit=emit, pauses=transport.pauses)
            if wall is not None
            else None
        )
        self._routes: dict[Topic, Handler] = {}
        self._handlers: list[Handler] = []  # those of the routes, in the order of the topics
        self._now, self._emit = now, emit
        self._shown = roster.record
        self._ticked_at = now()
        """Time of the last tick."""
        self._due = -math.inf
        """Time before which ticks change nothing here, beside those of the roster."""
        self._deadlines: list[Callable[[], float]] | None = [self.watch.deadline] if self.watch is not None else []
        """Deadlines of the watch and the handlers; None: one has none, and gets every tick."""
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self, *beside: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Receive frames and call ticks until cancelled; run these functions beside."""
        async with asyncio.TaskGroup() as group:
            self._tasks, self._ticked_at = group, self._now()
            group.create_task(self._receive())
            group.create_task(at_intervals(self.roster.preset.tick, self._tick))
            group.create_task(self._raise_send_failure())
            for work in beside:
                group.create_task(work())

    def attach(self, topic: Topic, handler: Handler) -> None:
        """Route the messages of a topic to this handler. Without a handler they are dropped."""
        self.wake()
        self._routes[topic] = handler
        self._handlers = [self._routes[topic] for topic in Topic if topic in self._routes]
        timed = [one for one in (self.watch, *self._handlers) if isinstance(one, Timed)]
        every = len(timed) == len(self._handlers) + (self.watch is not None)
        self._deadlines = [one.deadline for one in timed] if every else None

    def attend(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this task as well while `run` runs. An exception in it ends `run`."""
        assert self._tasks is not None
        self._tasks.create_task(work)

    async def _raise_send_failure(self) -> None:
        await self.send_queue.failure

    async def _receive(self) -> None:
        while True:
            self._arrived(await self.transport.recv())

    def _arrived(self, arrival: Arrival) -> None:
        peer, frame = arrival.peer, arrival.frame
        if frame is None:
            if peer in self.live and not self.roster.left:  # After our own departure all links end.
                relay = {"relay": arrival.relay.hex()} if arrival.relay else {}
                self._emit("link_lost", {"peer": peer.hex(), "reason": arrival.reason, **relay})
            self._lose(peer, gone=arrival.gone)
            # The roster's probe dials again: a refusal by the machine tells a dead process from a broken connection.
            self._send(self.roster.on_link_down(peer, self._now()))
            return
        if peer in self._told_until:
            self._answer_banned(peer)
            return
        if peer not in self.live:
            self._reach(peer)
        message, now = frame.message, self._now()
        self._relay_watch.on_message(peer, now)
        if len(self._last_message_at) >= MAX_PEERS and peer not in self._last_message_at:
            self._last_message_at = {one: at for one, at in self._last_message_at.items() if one in self.live}
        self._last_message_at[peer] = now
        if type(message) in MEMBERSHIP:  # most messages; the watch observes none of them
            if letters := self.roster.handle(peer, message, now):
                self._send(letters)
            if self.roster.due <= now:  # always after an event
                self._follow_roster()
            return
        if self.watch is not None and self.watch.saw(peer, frame):
            return
        handler = self._routes.get(topic_of(message))
        if handler is not None:
            self.wake()
            handler.on_frame(peer, frame)

    def silence_of(self, peer: PeerId) -> float:
        """Return the seconds since the last message of a peer; 0 if none has come."""
        last = self._last_message_at.get(peer)
        return 0.0 if last is None else self._now() - last

    def _answer_banned(self, peer: PeerId) -> None:
        """Tell a banned peer the reason, so that its owner learns it; close the link if it continues."""
        until, item = self._told_until[peer], self.roster.ban_item_of(peer)
        if self._now() >= until or item is None:
            self.transport.drop(peer, self.roster.peers.ban_reason(peer), ban=True)
        else:
            self.send_queue.control(peer, read_verdict(item) or Gossip((item,)))

    def convict(self, evidence: Evidence) -> None:
        """Ban a peer by evidence found here; the next tick passes the ban on to the handlers."""
        self.roster.apply_ban_items((evidence_item(evidence),), self._now())

    def expel(self, verdict: Verdict, lineage: bytes, round: int) -> None:
        """Ban an owner of chunks; the next tick passes the ban on to the handlers.

        See node/outer/verification/owner_audits.py. lineage, round: of our state, which has the members that have given
        the verdict.
        """
        self.roster.apply_ban_items((verdict_item(verdict, lineage, round),), self._now())

    def lift_verdict(self, peer: PeerId) -> None:
        """Remove the ban on a peer; the next tick admits it again."""
        self.roster.end_verdict(peer)

    def _lose(self, peer: PeerId, *, gone: bool) -> None:
        if peer not in self.live and not gone:
            return
        self.wake()
        self.live.discard(peer)
        self.send_queue.drop(peer)
        self._relay_watch.forget(peer)
        if self.watch is not None:
            self.watch.on_link_down(peer)
        for handler in self._handlers:
            handler.on_link_down(peer, gone=gone)

    def _reach(self, peer: PeerId) -> None:
        if peer not in self.live and peer != self.transport.peer_id:
            self.wake()
            self.live.add(peer)
            if self.watch is not None:
                self.watch.on_link_up(peer)
            for handler in self._handlers:
                handler.on_link_up(peer)

    def wake(self) -> None:
        """Let the next tick reach all handlers: the deadline of one may have changed."""
        self._due = -math.inf

    def _tick(self) -> None:
        # Most ticks come before all deadlines; to skip them saves much where one process simulates a thousand peers.
        roster, now, last = self.roster, self._now(), self._ticked_at
        self._ticked_at = now
        if (lag := now - last - roster.preset.tick) > roster.preset.lag_limit:
            roster.stalled(lag, now)
            if lag > STOPPED_SECONDS:
                detail = f"for {lag:.0f} s: the process was suspended, or the machine was overloaded"
                self._emit("suspended", {"detail": detail})
        if now >= roster.due:
            if letters := roster.tick(now):
                self._send(letters)
            self._follow_roster()
        if now < self._due:
            return
        if self.watch is not None:
            self.watch.on_tick()
        for handler in self._handlers:
            handler.on_tick()
        if self._deadlines is not None:
            self._due = min([deadline() for deadline in self._deadlines], default=math.inf)

    def _send(self, messages: Sequence[tuple[PeerId, Message]]) -> None:
        for peer, message in messages:
            self.send_queue.control(peer, message)

    def _follow_roster(self) -> None:
        """Pass the roster's events to the transport and the handlers."""
        roster = self.roster
        if self._shown is roster.record and not roster.events:
            return
        self.wake()
        events = list(roster.events)
        roster.events.clear()
        for event in events:
            self._emit(event.kind, {"peer": event.peer.hex(), "detail": event.detail})
            record = self.roster.peers.record_of(event.peer)
            if event.kind in ("joined", "updated") and record is not None:
                self.transport.learn(record)
                if event.kind == "joined":
                    self._reach(event.peer)
            elif event.kind == "banned" and event.peer == self.transport.peer_id:
                self.ban_reason = event.detail
                self.banned.set()
            elif event.kind == "pardoned":
                self._allow(event.peer)
            elif event.kind in ("dead", "left", "banned"):
                self._lose(event.peer, gone=event.kind == "left")
                self.transport.leave_relay(event.peer)
                if event.peer not in roster.peers.entries:  # Another peer has its place.
                    self.transport.drop(event.peer, event.detail)
                    self._allow(event.peer)
                if event.kind == "banned":
                    self._told_until[event.peer] = self._now() + TOLD_SECONDS
            elif event.kind in ("duplicate", "yielded"):
                self._emit("alarm", {"detail": event.detail})
                if event.kind == "duplicate":
                    self.duplicate.set()
        if self._shown is not self.roster.record:
            self._shown = self.roster.record
            self.transport.learn(self._shown)

    def _allow(self, peer: PeerId) -> None:
        """Forget that a peer was banned."""
        self._told_until.pop(peer, None)
        self.transport.allow(peer)

    def spans(self) -> tuple[Span, ...]:
        """Return our measurements of links to other peers."""
        return self.roster.distances.spans(self.roster.peers.others, self.send_queue.link_rates.rates(self._now()))

    async def leave(self) -> None:
        """Announce our departure to all peers, and wait a moment for the messages to be sent."""
        self._send(self.roster.leave(self._now()))
        await asyncio.sleep(TICK)

    async def close(self) -> None:
        """Stop sending and close the transport."""
        await self.send_queue.close()
        await self.transport.close()
