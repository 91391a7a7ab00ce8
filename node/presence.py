"""Being there: transport and roster, from the moment the transport is open until the goodbye.

Everything runs on the event loop. What is not about membership goes to `handler`, which may come later than the first frames:
a peer that still builds its model already answers probes, or the others would take it for dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from thinwire.collectives.aside import Work, at_once
from thinwire.collectives.operations import is_ours
from thinwire.collectives.outbox import Outbox
from thinwire.collectives.transport import Arrival, Transport
from thinwire.node.watch import Watch
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import (
    Ack,
    Activation,
    Apply,
    Bequest,
    Bereft,
    Close,
    FrozenRows,
    Gossip,
    Message,
    Nack,
    Outdated,
    Passed,
    PeerId,
    Ping,
    PingRequest,
    Post,
    PushPull,
    Route,
    Span,
    Tally,
)
from thinwire.swarm.roster import Roster

MEMBERSHIP = frozenset((Ping, PingRequest, Ack, Nack, Gossip, PushPull))
STAGES = frozenset((Route, Activation, Passed, Close, Tally, Apply, Post, FrozenRows, Bereft, Bequest, Outdated))
TICK = 0.1
"""Seconds that a moment takes: well below every patience."""

Emit = Callable[[str, Mapping[str, object]], None]
"""Writes one event: its name and its fields."""


class Handler(Protocol):
    """What wants to know about links, frames and time."""

    def reached(self, peer: PeerId) -> None:
        """A link to a peer is up."""
        ...

    def lost(self, peer: PeerId, *, gone: bool) -> None:
        """A link broke; `gone` when the process at its other end is no more."""
        ...

    def routed(self, peer: PeerId, frame: Frame) -> None:
        """A checked frame that is not about membership."""
        ...

    def ticked(self) -> None:
        """Time passes."""
        ...


class Presence:
    """See the module. `live` are the peers with a link, `duplicate` is set when another process uses our key.

    `site`: the network that this peer shares with others. `aside`: see Doors.
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
    ) -> None:
        self.transport, self.roster, self.site, self.aside = transport, roster, site, aside
        self.outbox = Outbox(transport, lambda peer: self._lose(peer, gone=False))
        self.live: set[PeerId] = set()
        self.duplicate = asyncio.Event()
        self.handler: Handler | None = None
        self.link: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """What our link carries, bytes/s up and down, where rounds of training have shown it."""
        self.operations: Handler | None = None
        """Who is told of averages that are no training rounds; without one their frames are dropped."""
        self.stages: Handler | None = None
        """Who is told of a model that several peers hold together."""
        self.watch: Watch | None = None
        """Who notices how others do."""
        self._now, self._emit = now, emit
        self._shown = roster.record
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Receive and keep time until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._tasks = group
            group.create_task(self._receive())
            group.create_task(self._keep_time())
            group.create_task(self._watch())

    def attend(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this too for as long as we are there. What it raises ends `run`."""
        assert self._tasks is not None
        self._tasks.create_task(work)

    async def _watch(self) -> None:
        await self.outbox.failure

    async def _receive(self) -> None:
        while True:
            self._arrived(await self.transport.recv())

    def _arrived(self, arrival: Arrival) -> None:
        peer = arrival.peer
        if arrival.frame is None:
            if peer in self.live:
                self._emit("lost", {"peer": peer.hex(), "reason": arrival.reason})
            self._lose(peer, gone=arrival.gone)
            # The probe dials anew: whether the machine refuses tells a dead process from a broken connection.
            self._send(self.roster.lost(peer, self._now()))
            return
        if peer not in self.live:
            self._reach(peer)
        if self.watch is not None and self.watch.saw(peer, arrival.frame):
            return
        if type(arrival.frame.message) in MEMBERSHIP:
            self._send(self.roster.handle(peer, arrival.frame.message, self._now()))
            self._follow_roster()
        else:
            handler = self._whose(arrival.frame.message)
            if handler is not None:
                handler.routed(peer, arrival.frame)

    def _lose(self, peer: PeerId, *, gone: bool) -> None:
        if peer not in self.live and not gone:
            return
        self.live.discard(peer)
        self.outbox.drop(peer)
        if self.watch is not None:
            self.watch.lost(peer)
        for handler in self._handlers():
            handler.lost(peer, gone=gone)

    def _reach(self, peer: PeerId) -> None:
        if peer not in self.live and peer != self.transport.peer_id:
            self.live.add(peer)
            for handler in self._handlers():
                handler.reached(peer)

    def _whose(self, message: Message) -> Handler | None:
        if type(message) in STAGES:
            return self.stages
        return self.operations if is_ours(message) else self.handler

    def _handlers(self) -> list[Handler]:
        return [handler for handler in (self.handler, self.operations, self.stages) if handler is not None]

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(self.roster.preset.tick)
            self._send(self.roster.tick(self._now()))
            self._follow_roster()
            if self.watch is not None:
                self.watch.ticked()
            for handler in self._handlers():
                handler.ticked()

    def _send(self, messages: Sequence[tuple[PeerId, Message]]) -> None:
        for peer, message in messages:
            self.outbox.control(peer, message)

    def _follow_roster(self) -> None:
        """Tell the transport and the handler what the roster has learned."""
        events = list(self.roster.events)
        if events:
            self.roster.events.clear()
        for event in events:
            self._emit(event.kind, {"peer": event.peer.hex(), "detail": event.detail})
            record = self.roster.record_of(event.peer)
            if event.kind in ("joined", "updated") and record is not None:
                self.transport.learn(record)
                if event.kind == "joined":
                    self._reach(event.peer)
            elif event.kind in ("dead", "left", "equivocation"):
                self._lose(event.peer, gone=event.kind == "left")
            elif event.kind == "duplicate":
                self.duplicate.set()
        if self._shown is not self.roster.record:
            self._shown = self.roster.record
            self.transport.learn(self._shown)

    def spans(self) -> tuple[Span, ...]:
        """What we have measured of our links to others."""
        return self.roster.distances.spans(self.roster.others, self.outbox.ways.rates(self._now()))

    async def leave(self) -> None:
        """Say goodbye to everyone, and give the words a moment to get out."""
        self._send(self.roster.leave(self._now()))
        await asyncio.sleep(TICK)

    async def close(self) -> None:
        """Stop sending and close the transport."""
        await self.outbox.close()
        await self.transport.close()
