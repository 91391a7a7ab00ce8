"""The rounds of one peer that averages with one partner a round, or with some (NoLoCo): routes what comes in, begins the next.

Everything here runs on the event loop. It is what `Session` is where all average together, without a group: a peer's round
counts its own outer steps, and peers drift apart by as much as they wait for each other. A partner counts when it is in
the same round; whoever is ready first waits for it, a multiple of what our own inner steps take. Who is late time and again
stops its inner steps when its partner waits (`overtaken`), so that slower machines contribute fewer steps instead of
none. Whose partner says that it is past this round asks some others, and when most are, takes the state of one of them.
Partners are drawn when a round begins, and again until we are ready when the view changes: so they have our slow weights early.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence

import blake3
import msgspec
from thinwire.collectives.gossip.group import GossipGroup
from thinwire.collectives.gossip.pair import PairResult, PairTerms
from thinwire.collectives.state_sync import FetchedState
from thinwire.collectives.timing import TICK
from thinwire.collectives.topology import matching
from thinwire.compression.core.types import Buffer
from thinwire.node.membership.presence import Presence
from thinwire.node.methods.noloco.catch_up import GossipCatchUp
from thinwire.node.methods.noloco.early_messages import EarlyMessages
from thinwire.node.methods.noloco.partner_wait import PartnerWait
from thinwire.node.methods.noloco.progress_poll import ASKED, ProgressPoll
from thinwire.node.methods.noloco.replica import GossipReplica
from thinwire.node.outer.state_server import STATE, StateServer
from thinwire.node.runtime.asyncio_extra import Result, Work
from thinwire.node.runtime.event_log import Emit
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity, short
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import Ask, Base, Behind, Chunk, Decline, Digest, Fetch, PeerId, Ready

EARLY = 64
"""Peers whose announcements are kept for rounds to come."""

GREETED = 64
"""Peers that are told when we have a state: those who wait for others to begin with."""

SOURCES = 4
"""Peers that are asked for their state, one after the other, before we wait."""


class GossipSession:
    """See the module. The presence's handler; call `advance` after the replica has made its step.

    `patience`: least seconds for an answer or for progress. `probation` means nothing: nobody votes. `on_commit`: called when
    training may stop, because the partner has waited long enough for us.
    """

    def __init__(
        self,
        identity: Identity,
        manifest: Manifest,
        run_id: Digest,
        *,
        presence: Presence,
        replica: GossipReplica,
        now: Callable[[], float],
        emit: Emit,
        probation: int = 0,
        patience: float = 2.0,
        life: bytes = b"",
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self.identity, self.manifest, self.run_id = identity, manifest, run_id
        self.me, self.fragment, self.life = identity.peer_id, 0, life
        self.presence, self.roster, self.live = presence, presence.roster, presence.live
        self.replica, self.codec, self.grid = replica, replica.codec, replica.grid
        codec, grid = replica.codec, replica.grid
        self.strays = 0
        """Frames that were dropped because they are of a round that is over, or far ahead."""
        self.stats: dict[PeerId, tuple[float, float, int]] = {}
        """Latest (loss, tokens/s, round) that peers announced to us."""
        self.usual = 0.0
        """Running norm of contributions, see `aggregate.outliers`."""
        self._now, self._emit, self._send_queue, self._on_commit = now, emit, presence.send_queue, on_commit
        self._entered = self.me in replica.members
        self._states = StateServer(
            replica, presence.send_queue, now, entered=self._entered, emit=emit, report=self.report
        )
        self.catch_up = GossipCatchUp(
            replica, self._states, draw=lambda: self._some(SOURCES), patience=lambda: self.patience
        )
        outer, exchange = manifest.outer, manifest.exchange
        self._plan = blake3.blake3(
            msgspec.msgpack.encode(
                [replica.layout, codec.spec, grid.total, grid.chunk, outer.method, exchange.aggregation]
            )
        ).digest()
        # Announcements of a later life of this peer count as later ones: seconds since 1970, as its record has them.
        self._life = presence.roster.record.sequence // 1000 % 2**31
        self._early = EarlyMessages(EARLY)
        self._drawn: tuple[bytes, int, tuple[PeerId, ...]] = (b"", -1, ())
        self._pace = PartnerWait(now, patience=patience, entered=self._entered)
        self._inquiry = ProgressPoll(now)
        self._past: GossipGroup | None = None
        self._present: set[PeerId] = set()
        self.current = self._next_round(self._life)
        if presence.watch is not None:
            presence.watch.paired()

    # --- rounds

    async def average(
        self, source: Sequence[Buffer], *, weight: int, loss: float, speed: float, hashes: bytes | None = None
    ) -> tuple[PairResult, ...]:
        """Average these encoded chunks with the partners of the round; how it ended with each of them."""
        if hashes is None:
            hashes = b"".join(blake3.blake3(chunk).digest() for chunk in source)
        circle, deadline = self.current, self._pace.train()
        self._choose()
        self._phase("announce")
        circle.announce(source, hashes, weight=weight, loss=loss, speed=speed, deadline=deadline)
        meetings = await circle.wait()
        self._pace.learn(circle, meetings)
        return meetings

    @property
    def patience(self) -> float:
        """Seconds for an answer or for progress."""
        return self._pace.patience

    def post(self, base: Sequence[Buffer], hashes: bytes) -> None:
        """Let the partners of the round in progress have these encoded slow weights, the replica's, while we train."""
        self.current.post(base, hashes)
        if self._entered:
            self._choose()

    def refuse(self, peer: PeerId, reason: str) -> None:
        """Nothing of this partner's in this round: what it sent is not to be used."""
        self.report("refused", f"what {short(peer)} sent: {reason}")

    @property
    def links(self) -> dict[int, GossipSession]:
        """Sessions by fragment number: this one alone."""
        return {0: self}

    @property
    def overtaken(self) -> bool:
        """Whether inner steps should end here: a state must be fetched, or partners wait for who is always late."""
        return self.catch_up.behind.is_set() or self._pace.keeps_waiting(self.current)

    @property
    def ready(self) -> Collection[PeerId]:
        """Peers that have a state, as far as they have told us."""
        return self._present

    def waiting_for(self) -> tuple[PeerId, ...]:
        """Whom the round in progress waits for."""
        return self.current.lacking

    def sizes(self) -> dict[str, tuple[int, int]]:
        """What is held for later, and how much it may be."""
        return {"early": (len(self._early), self._early.most)}

    async def pause(self) -> None:
        """Wait before something is tried again: a patience, less when nobody was here to try it with and somebody comes."""
        alone, until = not self.live, self._now() + self.patience
        while self._now() < until and not (alone and self.live):
            await asyncio.sleep(TICK)

    def report(self, name: str, detail: str) -> None:
        """An event about this peer."""
        self._emit(name, {"peer": self.me.hex(), "detail": detail})

    async def change(self, work: Work, how: Callable[[], Result]) -> Result:
        """Let `how` change the replica where `work` computes: its state is not offered until `advance`."""
        return await self._states.change(work, how)

    def advance(self) -> None:
        """The replica has a new state: begin the next round. Then comes `post`, where slow weights travel."""
        done = self.current
        done.release()
        self._past = done if self.replica.round == done.round else None
        if self._past is not None:
            self._phase("commit")
        self._pace.begin(elsewhere=self._past is None)
        for peer in () if self._entered else self._some(GREETED):
            self._send_queue.control(peer, Behind(self.replica.round))
        self._entered = True
        self.catch_up.behind.clear()
        # Where the state of another takes the place of ours, what we announced before is not what counts.
        again = self.replica.round + 1 == done.round
        self.current = self._next_round(done.attempt + 1 if again else self._life)
        self._send_queue.begin(self.current.round)
        self.roster.progress = self.replica.round
        self._states.resume()
        for peer in self._early.peers:
            self._bring(peer)

    def _next_round(self, attempt: int) -> GossipGroup:
        terms = PairTerms(
            self.replica.round + 1,
            self._plan,
            self.grid,
            self.codec,
            self.manifest.max_weight,
            self._send_queue,
            self._now,
            self.patience,
        )
        return GossipGroup(terms, size=self.manifest.exchange.gossip_group_size, attempt=attempt)

    def _phase(self, name: str) -> None:
        self._emit("phase", {"round": self.current.round, "phase": name})

    def _choose(self) -> None:
        """Settle the partners of the round in progress in the view as it is."""
        view, round, size = self.roster.view, self.current.round, self.manifest.exchange.gossip_group_size
        if self._drawn[:2] != (view.digest, round):
            self._drawn = (view.digest, round, matching.others(self.run_id, round, view.peers, self.me, size))
        known = self.current.pairs
        self.current.choose(self._drawn[2], view)
        for peer in [peer for peer in self.current.pairs if peer not in known]:
            self._bring(peer)

    def _bring(self, peer: PeerId) -> None:
        """Hear what was kept of a peer, if its round has come."""
        for frame in self._early.take(peer, self.current.round):
            self.on_frame(peer, frame)

    # --- what presence tells

    def on_link_up(self, peer: PeerId) -> None:
        """See Handler."""
        for circle in (self._past, self.current):
            if circle is not None:
                circle.reach(peer)

    def on_link_down(self, peer: PeerId, *, gone: bool) -> None:
        """See Handler."""
        self._states.on_link_down(peer)
        self._early.drop(peer)
        self._inquiry.on_link_down(peer)
        self._present.discard(peer)
        self.stats.pop(peer, None)
        for circle in (self._past, self.current):
            if circle is not None:
                circle.on_link_down(peer)
        if gone or not self.roster.alive(peer):
            self.current.drop(peer, "gone")

    def on_frame(self, peer: PeerId, frame: Frame) -> None:
        """See Handler."""
        message = frame.message
        if isinstance(message, STATE):
            self._states.on_frame(peer, frame)
        elif isinstance(message, Behind):
            self._hear_round(peer, message.round)
        elif isinstance(message, Ask):
            if self._entered:
                self._send_queue.control(peer, Behind(self.replica.round))
        elif isinstance(message, (Base, Ready, Fetch, Chunk, Decline)):
            self._route_round(peer, frame, message.round)
        else:
            self.strays += 1

    def on_tick(self) -> None:
        """See Handler."""
        self.current.tick()
        if self.current.posted and self._entered:
            self._choose()
        self._states.on_tick()
        if self._inquiry.due:
            self._judge()
        if self._pace.keeps_waiting(self.current):
            self._pace.hurried = True
            self._on_commit()

    def _route_round(self, peer: PeerId, frame: Frame, number: int) -> None:
        message, current = frame.message, self.current
        if isinstance(message, Ready):
            self.stats[peer] = (message.loss, message.speed, number)
            self._present.add(peer)
            self._states.done(peer, number)
            if not self._entered:
                return self._send_queue.control(peer, Decline(number, 0, "no state yet"))
        if isinstance(message, Base) and not self._entered:
            self._early.keep(peer, frame)
        elif number == current.round:
            if isinstance(message, (Base, Ready)) and current.ours is None and peer not in current.pairs:
                self._choose()
            if isinstance(message, Base) and peer not in current.pairs:
                self._early.keep(peer, frame)
            current.on_frame(peer, frame)
        elif self._past is not None and number == self._past.round and self._past.met(peer):
            self._past.on_frame(peer, frame)
        elif isinstance(message, (Base, Ready)):
            if number > current.round:
                self._early.keep(peer, frame)
            if isinstance(message, Base):
                return
            # Where we are: behind it, so that it waits, or beyond it, so that it does not.
            self._send_queue.control(peer, Behind(self.replica.round))
        elif isinstance(message, Fetch):
            self._send_queue.control(peer, Decline(number, 0, "late"))
        else:
            self.strays += 1

    # --- whether the others have gone on

    def _hear_round(self, peer: PeerId, round: int) -> None:
        """A peer says which round it has made last."""
        pair = self.current.pairs.get(peer)
        self._present.add(peer)
        if pair is not None and pair.ours is not None and pair.meeting is None:
            pair.heard()
            if round >= pair.round:
                pair.fail("ahead", tell=False)
                self._ask_around(peer, round)
        elif self._inquiry.answer(peer, round):
            self._judge()

    def _ask_around(self, peer: PeerId, round: int) -> None:
        for one in self._inquiry.open(peer, round, self._some(ASKED + 1), self.patience):
            self._send_queue.control(one, Ask(self.current.round, 0))
        if self._inquiry.complete:
            self._judge()

    def _judge(self) -> None:
        if self._inquiry.close() > self.replica.round:
            self.catch_up.behind.set()
            self._on_commit()

    def _some(self, count: int) -> list[PeerId]:
        """Some others that are here, drawn at random."""
        others = [peer for peer in self.roster.view.peers if peer != self.me and peer in self.live]
        seed = blake3.blake3(self.run_id + self.me + repr(self._now()).encode()).digest()
        return random.Random(seed).sample(others, min(count, len(others)))

    # --- the state of another

    async def install(self, fetched: FetchedState, work: Work) -> None:
        """Make a fetched state the replica's; then comes `advance`."""
        await self._states.install(work, fetched)
