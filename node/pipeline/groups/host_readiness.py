"""Readiness of an origin's hosts: each announces when it has followed the rounds that it waited for."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from thinwire.collectives.topology.peer_backoff import Backoff
from thinwire.collectives.transport.payload_assembly import pieces
from thinwire.node.membership.handler import Handler
from thinwire.node.pipeline.model.frozen_embedding import FrozenEmbedding
from thinwire.node.pipeline.recovery.stage_source import SourceKind
from thinwire.node.pipeline.step.origin import Origin
from thinwire.node.pipeline.step.step_context import StepContext
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import short
from thinwire.swarm.messages.registry import FrozenRows, PeerId, StageAssignment

MOMENT = 1.0
"""Seconds to wait for a host that is the only holder of its stage."""

SETTLED = 2.0
"""Seconds before a host may announce another stage: each change is logged."""

EXCUSED = 5
"""Exponent of the longest exemption of a late host, whose stage has other holders: 2, 4, … turns."""


class HostReadiness(Handler):
    """Handler of Presence in front of the origin.

    `stages`: of the model; `wait`: seconds that a host may take for a round; `spare`: stages that every micro-batch
    skips in any case. `frozen`: returns the rows that every host needs before it is ready; `source`: the source of the
    parameters of a stage without a host; `alone`: True if no other peer trains that would have to wait for this group.

    A late host takes part from the next step for which it is ready. No steps are made while more
    stages than can be skipped have no holder: a model without some of its layers learns nothing of use to the others.
    """

    def __init__(
        self,
        context: StepContext,
        origin: Origin,
        stages: int,
        *,
        wait: float,
        spare: int = 0,
        frozen: Callable[[], FrozenEmbedding] = FrozenEmbedding,
        source: Callable[[int], SourceKind] = lambda stage: "holder",
        alone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._me, self._send_queue, self._now, self._emit = context.me, context.send_queue, context.now, context.emit
        self.origin, self._stages, self._spare, self._wait = origin, stages, spare, wait
        self.source, self.frozen, self._alone = source, frozen, alone
        self._handed: dict[PeerId, int] = {}
        """Tags of the rows sent to each host over a link that is still up."""
        self._posts: dict[PeerId, StageAssignment] = {}
        self._reported: tuple[int, ...] = ()
        self._here: set[PeerId] = set()
        self._news = asyncio.Event()
        self._seated_at: dict[PeerId, float] = {}
        """Time at which each host took its stage."""
        self._turn = 0
        self._excused: dict[PeerId, Backoff] = defaultdict(lambda: Backoff(EXCUSED))
        """Turns in which a host is not waited for."""

    def on_frame(self, peer: PeerId, frame: Frame) -> None:
        """Handle a post of a host; pass other frames to the origin."""
        message = frame.message
        if not isinstance(message, StageAssignment):
            return self.origin.on_frame(peer, frame)
        if not 0 < message.stage < self._stages:
            return
        if peer not in self._posts or self._posts[peer].stage != message.stage:
            if peer in self._posts:
                if self._now() < self._seated_at[peer] + SETTLED:
                    return
                self._here.discard(peer)
                self._dismiss(peer)
            self._seated_at[peer] = self._now()
            detail = f"stage {message.stage}" + (f", from: {message.source}" if message.source else "")
            self._emit("host_joined", {"peer": peer.hex(), "detail": detail})
        others = [self._posts[one].round for one in self._here if self._posts[one].stage == message.stage]
        newest = max(others, default=0)
        if message.round < newest:
            # The host knows whether it only follows, or has been away.
            self.origin.outdated(peer, message.stage, newest)
        self._posts[peer] = message
        self._here.add(peer)
        if message.step < self.origin.next_step:
            self.origin.catch_up(peer)
        self._send_frozen(peer)
        self._news.set()

    def on_link_down(self, peer: PeerId, *, gone: bool) -> None:
        """Remove a host whose link broke."""
        self._here.discard(peer)
        self._handed.pop(peer, None)
        if peer in self._posts and gone:
            self._dismiss(peer)
        self.origin.on_link_down(peer, gone=gone)
        self._news.set()

    def on_link_up(self, peer: PeerId) -> None:
        """Pass a new link on; a host takes part again when it posts."""
        self.origin.on_link_up(peer)

    @property
    def hosts(self) -> dict[int, list[PeerId]]:
        """Return the reachable hosts by stage, as they have announced it."""
        found: dict[int, list[PeerId]] = {stage: [] for stage in range(1, self._stages)}
        for peer in sorted(self._here):
            found[self._posts[peer].stage].append(peer)
        return found

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the stages without a reachable holder."""
        return tuple(stage for stage, peers in self.hosts.items() if not peers)

    @property
    def incomplete(self) -> bool:
        """True if more stages lack a holder than can be skipped, so that no steps are made."""
        return len(self.missing) > self._spare

    @property
    def summary(self) -> str:
        """Describe the hosts, for people."""
        held = ", ".join(f"stage {stage}: {len(peers) or 'no holder'}" for stage, peers in self.hosts.items())
        sources = "; ".join(f"stage {stage} can be had from: {self.source(stage)}" for stage in self.missing)
        return held + (f"; {sources}" if sources else "")

    async def gather(self, stop: asyncio.Event) -> bool:
        """Wait until all hosts are ready, or for `wait` seconds until one host of each stage is.

        The origin then works with the ready hosts. Returns False if `stop` is set first, or a stage has no holder and
        gets none in a moment: other peers need not wait for a group that cannot work. Without other peers, the wait
        continues until the stage has a holder.
        """
        until = self._now() + self._wait
        for peer in sorted(self._here):
            self._send_frozen(peer)
        self._turn += 1
        while not stop.is_set():
            if self.incomplete:
                await self._change(stop, MOMENT)
            self._report_missing()
            if self.incomplete:
                if not self._alone():
                    return False
                until = self._now() + self._wait
                continue
            ready = self._ready()
            late, left = self._late(ready), until - self._now()
            if left <= 0:
                self._here -= late  # Until they post again: they may be elsewhere by now.
                for peer in late:
                    self._excused[peer].fail(self._turn)
            elif late:
                await self._change(stop, left)
                continue
            if sum(not peers for peers in ready.values()) <= self._spare:
                for peer in [peer for peers in ready.values() for peer in peers]:
                    self._excused[peer].succeed()
                self.origin.stage_holders.holders = ready
                return True
            if not late:
                return False  # The only holder of a stage is past our step, and cannot return to it.
        return False

    def _send_frozen(self, peer: PeerId) -> None:
        """Send a host the frozen rows that it lacks; it posts again when it has them."""
        frozen = self.frozen()
        if self._posts[peer].frozen != frozen.tag != self._handed.get(peer, 0):
            self._handed[peer] = frozen.tag
            for number, piece in enumerate(pieces(frozen.payload)):
                self._send_queue.bulk(peer, Frame(FrozenRows(frozen.tag, number), piece))

    def _late(self, ready: Mapping[int, Sequence[PeerId]]) -> set[PeerId]:
        """Return the hosts that are not ready, except late ones if their stage has other ready hosts."""
        found = self._here - {peer for peers in ready.values() for peer in peers}
        behind = {peer for peer in found if self._posts[peer].step <= self.origin.next_step}
        return {peer for peer in behind if self._turn > self._excused[peer].until or not ready[self._posts[peer].stage]}

    def _report_missing(self) -> None:
        for stage in self.missing:
            if stage not in self._reported:
                detail = {"stage": stage, "group": short(self._me), "source": self.source(stage)}
                self._emit("stage_lost", detail)
        self._reported = self.missing

    def jump(self, step: int) -> None:
        """Set the origin's next step; hosts in an earlier step end it."""
        self.origin.next_step = step
        for peer in sorted(self._here):
            self.origin.catch_up(peer)

    def refresh(self) -> None:
        """Add the hosts that have become ready to the origin's holders. Call it between two steps."""
        stage_holders, ready = self.origin.stage_holders, self._ready()
        for stage, peers in ready.items():
            known = stage_holders.holders.setdefault(stage, [])
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
        self._handed.pop(peer, None)  # At another stage the host starts without the rows.
        holders = self.origin.stage_holders.holders.get(stage, [])
        if peer in holders:
            holders.remove(peer)
        self._emit("host_lost", {"peer": peer.hex(), "stage": stage})

    async def _change(self, stop: asyncio.Event, seconds: float | None) -> None:
        """Wait until something has happened, `stop` is set, or these seconds have passed."""
        self._news.clear()
        waits = [asyncio.ensure_future(event.wait()) for event in (self._news, stop)]
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
