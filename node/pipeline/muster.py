"""Who of an origin's hosts is ready: each says so when it follows the rounds that it waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from thinwire.swarm.frame import Frame
from thinwire.swarm.identity import short
from thinwire.swarm.protocol import PeerId, Post

from ..presence import Emit
from .origin import Origin
from .rescue import Source

MOMENT = 1.0
"""Seconds for which a host is waited for that holds a stage which nobody else does."""


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
        now: Callable[[], float],
        wait: float,
        emit: Emit,
        spare: int = 0,
    ) -> None:
        self.origin, self._me, self._stages, self._spare = origin, me, stages, spare
        self._now, self._wait, self._emit = now, wait, emit
        self.source: Callable[[int], Source] = lambda stage: "holder"
        """Where the parameters of a stage come from that no host holds."""
        self.alone: Callable[[], bool] = lambda: False
        """Whether nobody else trains who would have to wait for this group."""
        self._posts: dict[PeerId, Post] = {}
        self._told: tuple[int, ...] = ()
        self._here: set[PeerId] = set()
        self._news = asyncio.Event()

    def routed(self, peer: PeerId, frame: Frame) -> None:
        """A checked frame."""
        message = frame.message
        if not isinstance(message, Post):
            return self.origin.routed(peer, frame)
        if not 0 < message.stage < self._stages:
            return
        if peer not in self._posts or self._posts[peer].stage != message.stage:
            if peer in self._posts:
                self._dismiss(peer)
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
        self._news.set()

    def lost(self, peer: PeerId, *, gone: bool) -> None:
        """See Handler."""
        self._here.discard(peer)
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
            late = self._here - {peer for peers in ready.values() for peer in peers}
            left = until - self._now()
            if left <= 0:
                self._here -= late  # until they say again that they are ready: they may be elsewhere by now
            elif late:
                await self._change(stop, left)
                continue
            if sum(not peers for peers in ready.values()) <= self._spare:
                self.origin.crew.holders = ready
                return True
        return False

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
        step = self.origin.next_step
        posts = self._posts
        return {
            stage: [peer for peer in peers if posts[peer].step <= step < posts[peer].until]
            for stage, peers in self.hosts.items()
        }

    def _dismiss(self, peer: PeerId) -> None:
        stage = self._posts.pop(peer).stage
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
