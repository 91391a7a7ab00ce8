"""Session of a peer that averages with one or a few partners per round (NoLoCo).

Everything runs on the event loop. A peer's round number counts its own outer steps; peers drift apart. A partner counts
if it is in the same round, and the peer that is ready first waits for a multiple of the time of its own inner steps. A
peer that is late repeatedly stops its inner steps when its partner waits (`overtaken`). A peer whose partner claims to
be past its round, or far behind it, polls some others, and if most of them are, takes over the state of one. Partners are
drawn when a round begins, and again when the view changes until this peer is ready, so that they receive its slow
weights early.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence

import blake3
import msgspec
from thinwire.collectives.gossip.group import GossipGroup
from thinwire.collectives.gossip.owner_group import MESH, OwnerGroup
from thinwire.collectives.gossip.pair import PairResult, PairTerms
from thinwire.collectives.rounds.data_planes.contributions import ContributionSummary, summarize
from thinwire.collectives.state_sync.state_offers import ReceivedChains, unchecked
from thinwire.collectives.state_sync.state_sync import FetchedState
from thinwire.collectives.topology.matching import Matching
from thinwire.compression.core.types import Buffer
from thinwire.node.methods.noloco.catch_up import GossipCatchUp
from thinwire.node.methods.noloco.early_messages import EarlyMessages
from thinwire.node.methods.noloco.partner_wait import PartnerWait
from thinwire.node.methods.noloco.progress_poll import ASKED, ProgressPoll, far_ahead
from thinwire.node.methods.noloco.replica import GossipReplica
from thinwire.node.outer.session import ReplicaSession, SessionContext
from thinwire.node.outer.state_transfer.state_fetcher import ANSWERS, StateFetcher
from thinwire.node.outer.state_transfer.state_server import QUESTIONS, StateServer
from thinwire.node.runtime.asyncio_extra import Result, Work
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import short
from thinwire.swarm.messages.registry import Ask, Base, Behind, Chunk, Decline, Fetch, PeerId, Ready

EARLY = 128
"""Peers whose announcements of later rounds, or of groups that we may still draw, are stored."""

GREETED = 64
"""Peers that get a message when this peer has a state: they may be waiting to enter."""

SOURCES = 4
"""Peers that are asked for their state, one after the other, before this peer waits."""


class GossipSession(ReplicaSession):
    """Session of a replica that averages with partners; call `advance` after it has made its step.

    Whether it has `entered` follows from the replica, and no votes exist. Training may stop (`on_commit`) because the partner
    has waited long enough.
    """

    replica: GossipReplica
    catch_up: GossipCatchUp

    def __init__(self, context: SessionContext, replica: GossipReplica) -> None:
        super().__init__(context, replica)
        manifest, presence, now = context.manifest, context.presence, context.now
        self._on_commit = context.on_commit
        codec, grid = replica.codec, replica.grid
        self._dropped_frames = 0
        self.usual = 0.0
        """Running norm of contributions, see `aggregation.outliers`."""
        self._entered = self.me in replica.members
        self.states = StateServer(
            replica,
            presence.send_queue,
            now,
            entered=self._entered,
            report=self.report,
            paced=False,
        )
        fetcher = StateFetcher(
            replica,
            self.states,
            presence.send_queue,
            now,
            emit=context.emit,
            report=self.report,
            chains=ReceivedChains(unchecked),
        )
        self.catch_up = GossipCatchUp(
            replica, fetcher, draw=lambda: self._draw_peers(SOURCES), patience=lambda: self.patience
        )
        outer, exchange = manifest.outer, manifest.exchange
        self._plan = blake3.blake3(
            msgspec.msgpack.encode([replica.layout, codec.spec, grid.total, grid.chunk, outer.method, exchange.rule])
        ).digest()
        self._first_attempt = presence.roster.record.first_attempt
        self._early = EarlyMessages(EARLY)
        self._last_draw: tuple[int, tuple[PeerId, ...]] = (-1, ())
        """Number of the view of the last draw of partners, and its result."""
        self._partner_wait = PartnerWait(now, patience=context.patience, entered=self._entered)
        self._poll = ProgressPoll(now)
        self._past: GossipGroup | None = None
        self._peers_with_state: set[PeerId] = set()
        self.current = self._next_round(self._first_attempt)
        self._matching = Matching(self.run_id, self.current.round, manifest.exchange.gossip_group_size)
        """Partition of the round of the last draw."""
        if presence.watch is not None:
            presence.watch.paired()

    # --- rounds

    async def average(
        self,
        source: Sequence[Buffer],
        *,
        weight: int,
        loss: float,
        speed: float,
        summary: ContributionSummary | None = None,
    ) -> tuple[PairResult, ...]:
        """Average these encoded chunks with the partners of the round; return the result for each of them."""
        if summary is None:
            summary = summarize(source)
        self.presence.wake()
        group, deadline = self.current, self._partner_wait.train()
        self._choose_partners()
        self._phase("announce")
        group.announce(source, summary.hashes, weight=weight, loss=loss, speed=speed, deadline=deadline)
        for peer in self._early.peers:  # We draw no other group in this round.
            self._process_early(peer)
        results = await group.wait()
        self._partner_wait.learn(group, results)
        return results

    @property
    def patience(self) -> float:
        return self._partner_wait.patience

    def post(self, base: Sequence[Buffer], hashes: bytes) -> None:
        """Send encoded slow weights to the partners of the round in progress, while training continues."""
        self.presence.wake()
        self.current.post(base, hashes)
        if self._entered:
            self._choose_partners()

    def refuse(self, peer: PeerId, reason: str) -> None:
        """Report that a partner's contribution is not used in this round."""
        self.report("refused", f"the contribution of {short(peer)}: {reason}")

    @property
    def overtaken(self) -> bool:
        """True if inner steps should end now: a state must be fetched, or partners have waited long enough."""
        return self.catch_up.reached is not None or self._partner_wait.keeps_waiting(self.current)

    @property
    def ready(self) -> Collection[PeerId]:
        return self._peers_with_state

    @property
    def dropped_frames(self) -> int:
        return self._dropped_frames

    def waiting_for(self) -> tuple[PeerId, ...]:
        return self.current.outstanding

    def sizes(self) -> dict[str, tuple[int, int]]:
        return {"early": (len(self._early), self._early.most)}

    async def change(self, work: Work, how: Callable[[], Result]) -> Result:
        self.presence.wake()
        return await self.states.change(work, how)

    def advance(self) -> None:
        """Begin the next round after a change of the state. If slow weights travel, `post` follows."""
        self.presence.wake()
        done = self.current
        done.release()
        if self._past is not None:
            self._past.close()
        if self.replica.round == done.round:
            self._past = done
        else:
            self._past = None
            done.close()
        if self._past is not None:
            self._phase("commit")
        self._partner_wait.begin(elsewhere=self._past is None)
        for peer in () if self._entered else self._draw_peers(GREETED):
            self._send_queue.control(peer, Behind(self.replica.round))
        self._entered = True
        if not self._poll.apart(self.replica.round):  # else the answers came during a step, which changes little
            self.catch_up.reached = None
        if self.replica.round + 1 < done.round:
            # We announce these rounds for a second time, and peers may still have what we announced before.
            self._first_attempt = done.attempt + 1
        # A fetched state replaces ours: earlier announcements of this round no longer count.
        repeats = self.replica.round + 1 == done.round
        self.current = self._next_round(done.attempt + 1 if repeats else self._first_attempt)
        self._send_queue.begin(self.current.round)
        self._send_queue.rest()
        self.roster.progress = self.replica.round
        self.catch_up.fetcher.reset()
        self.states.resume()
        for peer in self._early.peers:
            self._process_early(peer)

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
        size = self.manifest.exchange.gossip_group_size
        if size > MESH:
            return OwnerGroup(terms, me=self.me, size=size, attempt=attempt)
        return GossipGroup(terms, size=size, attempt=attempt)

    def _phase(self, name: str) -> None:
        self._emit("phase", {"round": self.current.round, "phase": name})

    def _choose_partners(self) -> None:
        """Choose the partners of the round in progress from the current view."""
        number, drawn = self._last_draw
        # While many peers join, each of them changes the view, so it is read in place and not copied.
        current, live = self.current, self.roster.peers.live
        begun = self._matching.round != current.round
        if begun:
            self._matching = Matching(self.run_id, current.round, self.manifest.exchange.gossip_group_size)
        if begun or number != live.number:
            drawn = self._matching.others(live.everyone, self.me, live.changed_since(number))
            self._last_draw = (live.number, drawn)
        known = current.pairs
        if current.choose(drawn, live.everyone):
            for peer in [peer for peer, pair in current.pairs.items() if known.get(peer) is not pair]:
                self._process_early(peer)

    def _process_early(self, peer: PeerId) -> None:
        """Process the early messages of a peer whose round has come."""
        for frame in self._early.take(peer, self.current.round):
            self.on_frame(peer, frame)

    # --- frame handler

    def on_link_up(self, peer: PeerId) -> None:
        for group in (self._past, self.current):
            if group is not None:
                group.on_link_up(peer)

    def on_link_down(self, peer: PeerId, *, gone: bool) -> None:
        self.states.on_link_down(peer)
        self.catch_up.fetcher.on_link_down(peer)
        self._early.drop(peer)
        self._poll.on_link_down(peer)
        self._peers_with_state.discard(peer)
        self.announced.pop(peer, None)
        for group in (self._past, self.current):
            if group is not None:
                group.on_link_down(peer)
        if gone or not self.roster.peers.is_live(peer):
            self.current.drop(peer, "gone")

    def on_frame(self, peer: PeerId, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, QUESTIONS):
            self.states.on_frame(peer, frame)
        elif isinstance(message, ANSWERS):
            self.catch_up.fetcher.on_frame(peer, frame)
        elif isinstance(message, Behind):
            self._on_claimed_round(peer, message.round)
        elif isinstance(message, Ask):
            if self._entered:
                self._send_queue.control(peer, Behind(self.replica.round))
        elif isinstance(message, (Base, Ready, Fetch, Chunk, Decline)):
            self._route_round(peer, frame, message.round)
        else:
            self._dropped_frames += 1

    def on_tick(self) -> None:
        # Short, because most ticks change nothing: a group has deadlines and may not be drawn again once we are ready.
        current = self.current
        if current.ours is not None:
            current.tick()
        elif current.posted and self._entered:
            self._choose_partners()
        self.catch_up.fetcher.on_tick()
        self.states.on_tick()
        if self._poll.due:
            self._end_poll()
        if current.ours is None and self._partner_wait.keeps_waiting(current):
            self._partner_wait.hurried = True
            self._on_commit()

    def deadline(self) -> float:
        """Return the time before which `on_tick` changes nothing.

        It is the past after our announcement, and while others read our state or answer our questions.
        """
        current = self.current
        settled = not current.posted or not self._entered or tuple(current.pairs) == self._last_draw[1]
        if current.ours is not None or not settled or self.states.busy or self._poll.running:
            return -math.inf
        return self._partner_wait.deadline(current)

    def _route_round(self, peer: PeerId, frame: Frame, number: int) -> None:
        message, current = frame.message, self.current
        if isinstance(message, Ready):
            self.announced[peer] = message
            self._peers_with_state.add(peer)
            self.states.done(peer, number)
            if not self._entered:
                return self._send_queue.control(peer, Decline(number, 0, "no state yet"))
        if isinstance(message, Base) and not self._entered:
            self._early.keep(peer, frame)
        elif number == current.round:
            if isinstance(message, (Base, Ready)) and current.ours is None and peer not in current.pairs:
                self._choose_partners()
            if isinstance(message, (Base, Ready)) and not current.accepts(peer, message):
                self._early.keep(peer, frame)
            else:
                current.on_frame(peer, frame)
        elif self._past is not None and number == self._past.round and self._past.exchanged(peer):
            self._past.on_frame(peer, frame)
        elif isinstance(message, (Base, Ready)):
            if number > current.round:
                self._early.keep(peer, frame)
            if isinstance(message, Base):
                return
            # Report our round: a partner ahead of us then waits, and one behind us does not.
            self._send_queue.control(peer, Behind(self.replica.round))
        elif isinstance(message, Fetch):
            self._send_queue.control(peer, Decline(number, 0, "late"))
        else:
            self._dropped_frames += 1

    # --- progress of other peers

    def _on_claimed_round(self, peer: PeerId, round: int) -> None:
        """Note the last completed round that a peer claims."""
        pair = self.current.pairs.get(peer)
        self._peers_with_state.add(peer)
        if pair is not None and pair.ours is not None and pair.result is None:
            pair.note_present()
            if (ahead := round >= pair.round) or far_ahead(self.replica.round, round):
                pair.fail("ahead" if ahead else "behind", notify=False)
                self._start_poll(peer, round)
            elif round < self.replica.round:
                pair.note_behind(self._partner_wait.time_behind(self.replica.round - round))
        elif self._poll.answer(peer, round):
            self._end_poll()

    def _start_poll(self, peer: PeerId, round: int) -> None:
        for one in self._poll.open(peer, round, self._draw_peers(ASKED + 1), self.patience):
            self._send_queue.control(one, Ask(self.current.round, 0))
        if self._poll.complete:
            self._end_poll()

    def _end_poll(self) -> None:
        reached = self._poll.close(self.replica.round)
        if self._poll.apart(self.replica.round):
            self.catch_up.reached = reached
            self._on_commit()

    def _draw_peers(self, count: int) -> list[PeerId]:
        """Draw up to `count` live peers at random."""
        others = [peer for peer in self.roster.peers.view.peers if peer != self.me and peer in self.live]
        seed = blake3.blake3(self.run_id + self.me + repr(self._now()).encode()).digest()
        return random.Random(seed).sample(others, min(count, len(others)))

    # --- state transfer

    async def install(self, fetched: FetchedState, work: Work) -> None:
        """Install a fetched state in the replica; `advance` follows."""
        self.presence.wake()
        await self.catch_up.fetcher.install(work, fetched)
