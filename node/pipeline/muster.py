"""Who of an origin's hosts is ready: each says so when it follows the rounds that it waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from thinwire.collectives.outbox import Outbox
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity import short
from thinwire.swarm.protocol import FrozenRows, PeerId, Post

from ..presence import Emit
from .frozen import Frozen
from .origin import Origin
from .parcel import pieces
from .rescue import Source

MOMENT = 1.0
"""Seconds for which a host is waited for that holds a stage which nobody else does."""

SETTLED = 2.0
"""Seconds for which a host cannot say that it holds another stage: each time is written down."""

EXCUSED = 5
"""A host that was late is not waited for in the next 2, then 4, … turns (two to this power), if others have its stage."""


class Muster:
    """A Handler of Presence in front of the origin. `stages`: of the model; `wait`: seconds that a host may take for a round;
    `spare`: stages that every micro-batch goes past anyway.

    A host that is late for a step takes part from the next one on that it is ready for. While more stages than can be spared
    have no holder there are no steps: a model that lacks layers learns nothing that the others could use.
    """

    def __init__(
        self,
        me: PeerId,
        origin: Origin,
        stages: int,
        *,
        outbox: Outbox,
        now: Callable[[], float],
        wait: float,
        emit: Emit,
        spare: int = 0,
    ) -> None:
        self.origin, self._me, self._stages, self._spare, self._outbox = origin, me, stages, spare, outbox
        self._now, self._wait, self._emit = now, wait, emit
        self.frozen: Callable[[], Frozen] = Frozen
        """What every host has to have before it is ready."""
        self._handed: dict[PeerId, int] = {}
        """Tags of what has been sent to whom over a link that is still up."""
        self.source: Callable[[int], Source] = lambda stage: "holder"
        """Where the parameters of a stage come from that no host holds."""
        self.alone: Callable[[], bool] = lambda: False
        """Whether nobody else trains who would have to wait for this group."""
        self._posts: dict[PeerId, Post] = {}
        self._told: tuple[int, ...] = ()
        self._here: set[PeerId] = set()
        self._news = asyncio.Event()
        self._came: dict[PeerId, float] = {}
        """When a host took its stage."""
        self._strikes: dict[PeerId, int] = {}
        self._excused: dict[PeerId, int] = {}
        """Turns for which a host is not waited for any more."""

    def routed(self, peer: PeerId, frame: Frame) -> None:
        """A checked frame."""
        message = frame.message
        if not isinstance(message, Post):
            return self.origin.routed(peer, frame)
        if not 0 < message.stage < self._stages:
            return
        if peer not in self._posts or self._posts[peer].stage != message.stage:
            if peer in self._posts:
                if self._now() < self._came[peer] + SETTLED:
                    return
                self._here.discard(peer)
                self._dismiss(peer)
            self._came[peer] = self._now()
            told = f"stage {message.stage}" + (f", from: {message.source}" if message.source else "")
            self._emit("host", {"peer": peer.hex(), "detail": told})
        others = [self._posts[one].round for one in self._here if self._posts[one].stage == message.stage]
        newest = max(others, default=0)
        if message.round < newest:
            self.origin.outdated(peer, message.stage, newest)  # it knows whether it only follows, or has been away
        self._posts[peer] = message
        self._here.add(peer)
        if message.step < self.origin.next_step:
            self.origin.catch_up(peer)
        self._hand_out(peer)
        self._news.set()

    def lost(self, peer: PeerId, *, gone: bool) -> None:
        """See Handler."""
        self._here.discard(peer)
        self._handed.pop(peer, None)
        if peer in self._posts and gone:
            self._dismiss(peer)
        self.origin.lost(peer, gone=gone)
        self._news.set()

    def reached(self, peer: PeerId) -> None:
        """See Handler: a host takes part again when it says so."""
        self.origin.reached(peer)

    def ticked(self) -> None:
        """See Handler."""

    @property
    def hosts(self) -> dict[int, list[PeerId]]:
        """By stage, who has said that it holds it and is in reach."""
        found: dict[int, list[PeerId]] = {stage: [] for stage in range(1, self._stages)}
        for peer in sorted(self._here):
            found[self._posts[peer].stage].append(peer)
        return found

    @property
    def missing(self) -> tuple[int, ...]:
        """Stages that nobody in reach holds."""
        return tuple(stage for stage, peers in self.hosts.items() if not peers)

    @property
    def lame(self) -> bool:
        """Whether so many stages are without a holder that there are no steps."""
        return len(self.missing) > self._spare

    @property
    def said(self) -> str:
        """Who is there, for people."""
        held = ", ".join(f"stage {stage}: {len(peers) or 'no holder'}" for stage, peers in self.hosts.items())
        lacking = "; ".join(f"stage {stage} can be had from: {self.source(stage)}" for stage in self.missing)
        return held + (f"; {lacking}" if lacking else "")

    async def gather(self, stop: asyncio.Event) -> bool:
        """Wait until all hosts are ready for the origin's next step, or for `wait` seconds until one of each stage is.

        The origin's crew is then those that are ready. False when `stop` is set before, or when a stage has no holder, nor
        gets one in a moment: the others need not wait for a group that can do nothing. Where there are no others, time stands
        still until it has one.
        """
        until = self._now() + self._wait
        for peer in sorted(self._here):
            self._hand_out(peer)
        self._excused = {peer: turns - 1 for peer, turns in self._excused.items() if turns > 1}
        while not stop.is_set():
            if self.lame:
                await self._change(stop, MOMENT)
            self._tell_missing()
            if self.lame:
                if not self.alone():
                    return False
                until = self._now() + self._wait
                continue
            ready = self._ready()
            late, left = self._late(ready), until - self._now()
            if left <= 0:
                self._here -= late  # until they say again that they are ready: they may be elsewhere by now
                self._strike(late)
            elif late:
                await self._change(stop, left)
                continue
            if sum(not peers for peers in ready.values()) <= self._spare:
                for peer in [peer for peers in ready.values() for peer in peers if peer in self._strikes]:
                    self._forgive(peer)
                self.origin.crew.holders = ready
                return True
            if not late:
                return False  # who holds a stage is past our step, and cannot go back
        return False

    def _hand_out(self, peer: PeerId) -> None:
        """Send a host the frozen rows that it lacks; it posts again when it has them."""
        frozen = self.frozen()
        if self._posts[peer].frozen != frozen.tag != self._handed.get(peer, 0):
            self._handed[peer] = frozen.tag
            for number, piece in enumerate(pieces(frozen.payload)):
                self._outbox.bulk(peer, Frame(FrozenRows(frozen.tag, number), piece))

    def _late(self, ready: Mapping[int, Sequence[PeerId]]) -> set[PeerId]:
        """Who is waited for: those that are not ready yet, but who were late before where others are ready."""
        found = self._here - {peer for peers in ready.values() for peer in peers}
        behind = {peer for peer in found if self._posts[peer].step <= self.origin.next_step}
        return {peer for peer in behind if peer not in self._excused or not ready[self._posts[peer].stage]}

    def _strike(self, late: Collection[PeerId]) -> None:
        for peer in late:
            self._strikes[peer] = min(EXCUSED, self._strikes.get(peer, 0) + 1)
            self._excused[peer] = 1 + 2 ** self._strikes[peer]

    def _forgive(self, peer: PeerId) -> None:
        self._strikes[peer] -= 1
        if not self._strikes[peer]:
            del self._strikes[peer]

    def _tell_missing(self) -> None:
        for stage in self.missing:
            if stage not in self._told:
                told = {"stage": stage, "group": short(self._me), "source": self.source(stage)}
                self._emit("stage without holder", told)
        self._told = self.missing

    def jump(self, step: int) -> None:
        """The origin's next step is `step`, whatever it was: hosts that are in an earlier one end it."""
        self.origin.next_step = step
        for peer in sorted(self._here):
            self.origin.catch_up(peer)

    def refresh(self) -> None:
        """Between two steps: who is there meanwhile belongs to the crew."""
        crew, ready = self.origin.crew, self._ready()
        for stage, peers in ready.items():
            known = crew.holders.setdefault(stage, [])
            known += [peer for peer in peers if peer not in known]

    def _ready(self) -> dict[int, list[PeerId]]:
        step, frozen = self.origin.next_step, self.frozen().tag
        posts = self._posts
        return {
            stage: [p for p in peers if posts[p].step <= step < posts[p].until and posts[p].frozen == frozen]
            for stage, peers in self.hosts.items()
        }

    def _dismiss(self, peer: PeerId) -> None:
        stage = self._posts.pop(peer).stage
        self._handed.pop(peer, None)  # at another stage it begins without them
        holders = self.origin.crew.holders.get(stage, [])
        if peer in holders:
            holders.remove(peer)
        self._emit("host lost", {"peer": peer.hex(), "stage": stage})

    async def _change(self, stop: asyncio.Event, seconds: float | None) -> None:
        """Until something has happened, `stop` is set, or so many seconds are over."""
        self._news.clear()
        waits = [asyncio.ensure_future(event.wait()) for event in (self._news, stop)]
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
