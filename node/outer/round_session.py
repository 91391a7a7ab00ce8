"""Session: the rounds of one peer; routes frames to the round in progress, and begins the next.

Everything runs on the event loop. The session averages encoded chunks for `OuterLoop` and does not know the model. The
state is served and fetched by `state_server`; `catch_up` decides when to fetch it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import blake3
import msgspec
from thinwire.collectives.consensus.chain import Prove, proven
from thinwire.collectives.consensus.proposal import RoundTerms
from thinwire.collectives.consensus.vote_store import OpenVotes, open_in_memory
from thinwire.collectives.health.straggler_grace import StragglerGrace
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounds.payload import room
from thinwire.collectives.rounds.round import Round
from thinwire.collectives.rounds.round_factory import STASH, RoundFactory, fragment_of, round_of
from thinwire.collectives.timing import TICK
from thinwire.collectives.topology.shards import Grid
from thinwire.collectives.transport.pending_frames import PendingFrames
from thinwire.compression.core.types import Buffer
from thinwire.node.membership.presence import Presence
from thinwire.node.outer.catch_up import CatchUp
from thinwire.node.outer.lineages import Lineages
from thinwire.node.outer.own_lineage import OwnLineage, check_votes, continue_alone, report
from thinwire.node.outer.round_history import RoundHistory
from thinwire.node.outer.state_server import STATE, StateServer
from thinwire.node.runtime.asyncio_extra import Result, Work
from thinwire.node.runtime.event_log import Emit
from thinwire.node.state.replica import Replica
from thinwire.swarm.frame import Frame, sign_message
from thinwire.swarm.identity.identity import Identity, short
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import (
    MAX_GROUP,
    Ask,
    Behind,
    Commit,
    Decline,
    Digest,
    Fetch,
    Fork,
    Found,
    Head,
    PeerId,
    Prepare,
    Ready,
)


class RoundSession:
    """Frame handler of the rounds of one `fragment`; call `advance` after a commit was applied.

    `stash`: see RoundFactory. `turn`: see CatchUp. Sessions of other fragments share these two.

    `entered`: True if our state is that of the swarm, False if it must be compared with the others' first. `votes`: opens the
    memory of our votes. `patience`: seconds without progress before a peer acts; adapts to the duration of rounds. `on_commit`:
    called when a round commits, before it is applied: training on the old state may stop. `founder`: see Lineages.
    """

    def __init__(
        self,
        identity: Identity,
        manifest: Manifest,
        run_id: Digest,
        *,
        presence: Presence,
        replica: Replica,
        now: Callable[[], float],
        emit: Emit,
        entered: bool = True,
        votes: OpenVotes = open_in_memory,
        patience: float = 2.0,
        fragment: int = 0,
        stash: PendingFrames | None = None,
        turn: asyncio.Semaphore | None = None,
        on_commit: Callable[[], None] = lambda: None,
        founder: bytes = b"",
    ) -> None:
        self.identity, self.manifest, self.run_id = identity, manifest, run_id
        self.me, self.fragment = identity.peer_id, fragment
        self.votes = votes(fragment)
        self.presence, self.roster, self.live = presence, presence.roster, presence.live
        self.replica = replica
        watch = presence.watch if manifest.exchange.slow_peers == "no-ownership" else None
        self._round_factory = RoundFactory(
            identity,
            run_id,
            codec=replica.codec,
            rule=manifest.exchange.aggregation,
            send_queue=presence.send_queue,
            now=now,
            live=presence.live,
            key_of=self._key_of,
            patience=patience,
            phase=self._phase,
            collective=manifest.exchange.collective,
            by_bandwidth=manifest.exchange.chunk_assignment == "bandwidth",
            topology=manifest.exchange.topology,
            site=presence.site,
            stash=stash,
            kept=replica.kept,
            aside=presence.aside,
            sick=tuple if watch is None else watch.slow,
            spans=presence.spans,
        )
        self.strays = 0
        """Dropped frames of past or distant rounds."""
        self.stats: dict[PeerId, tuple[float, float, int]] = {}
        """Latest (loss, tokens/s, round) that each peer announced."""
        self._now, self._emit, self._on_commit = now, emit, on_commit
        self._send_queue = presence.send_queue
        entered = entered and self.me in replica.members
        self._history = RoundHistory(replica.state.nbytes, now)
        self.prove: Prove = partial(
            proven,
            fraction=manifest.exchange.quorum,
            verifier=self._round_factory.with_keys,
            gaps=manifest.pipeline.stages > 1,
        )
        """Checks chains of this run."""
        self.states = StateServer(
            replica, presence.send_queue, now, entered=entered, fragment=fragment, emit=emit, report=self.report
        )
        # The attempts of a restarted process count as later ones: its record has the seconds since 1970.
        self._life = presence.roster.record.sequence // 1000 % 2**31
        self._stash = self._round_factory.stash
        cut, rule = replica.plan_grid, manifest.exchange.aggregation
        self._plan = blake3.blake3(
            msgspec.msgpack.encode([replica.layout, replica.codec.spec, cut.total, cut.chunk, rule])
        ).digest()
        exchange = manifest.exchange
        self.lineages = Lineages(
            replica,
            presence,
            fragment,
            now=now,
            prove=self.prove,
            current=lambda: self.current,
            quorate=lambda: self.own_lineage.since is None,
            entered=lambda: self.states.entered,
            # A lost pipeline stage begins again with the peer that makes it.
            founder=b"" if manifest.pipeline.stages > 1 else founder,
        )
        self.own_lineage = OwnLineage(
            replica,
            presence,
            fragment,
            self.lineages,
            orphan=exchange.orphan,
            now=now,
            emit=emit,
            sign=lambda message: sign_message(message, b"", identity, run_id),
            key_of=self._round_factory.key_of,
            votes=self.votes,
            current=lambda: self.current,
            founded=self._founded,
        )
        self.catch_up = CatchUp(
            replica,
            self.states,
            presence=presence,
            factory=self._round_factory,
            current=lambda: self.current,
            lineages=self.lineages,
            prove=self.prove,
            now=now,
            fragment=fragment,
            turn=turn,
        )
        self._straggler_grace = StragglerGrace(
            exchange.timeout_seconds, auto=exchange.straggler_timeout == "auto", fraction=exchange.quorum
        )
        self._ahead = False
        """True if our votes show that this peer has been further than its state."""
        self.current = self._next_round(self._life)

    # --- rounds

    @property
    def grid(self) -> Grid:
        """Chunk grid of the round in progress."""
        return self.replica.grid

    @property
    def links(self) -> dict[int, RoundSession]:
        """Sessions by fragment number: only this one."""
        return {self.fragment: self}

    @property
    def codec(self) -> Any:
        return self.replica.codec

    async def average(
        self,
        source: Sequence[Buffer],
        *,
        weight: int,
        loss: float,
        speed: float,
        hashes: bytes | None = None,
        give_up: float | None = None,
    ) -> Outcome:
        """Average our encoded pseudo-gradient with the peers of the round in progress.

        The outcome has no commit if the round did not commit within `give_up` seconds, if this peer is behind, or if
        its state differs from that of the majority.
        """
        self._straggler_grace.came(self.me, self.current.round, self._now(), contributes=weight > 0)
        self.current.announce(source, weight=weight, loss=loss, speed=speed, hashes=hashes)
        return await self.outcome(give_up=give_up)

    async def outcome(self, *, give_up: float | None = None) -> Outcome:
        """Wait for the end of the round in progress, see `average`."""
        return await self._round_factory.outcome(self.current, give_up=give_up)

    @property
    def patience(self) -> float:
        """Seconds without progress before a peer acts."""
        return self._round_factory.patience

    @property
    def grace(self) -> float:
        """Maximum seconds that a round waits for stragglers after a quorum is ready."""
        return self._straggler_grace.limit

    def _graces_of(self, round: int) -> dict[PeerId, float]:
        """Graces of the members in a round that begins now, if this peer opens it.

        Members without one have the configured grace. An asynchronous round takes the members that are ready, so the
        others are not late.
        """
        if self.replica.asynchronous and self.manifest.exchange.straggler_timeout != "auto":
            return {}
        here = [peer for peer in self.replica.members if peer in self.live or peer == self.me]
        commit = self.current.agreement.commit if hasattr(self, "current") else None
        present = commit.opened.alive if commit is not None else ()
        attended = self._straggler_grace.begin(round, here, self._now(), present=present)
        others = [one for one in attended if one.peer != self.me]
        if others and self.presence.watch is not None:
            self.presence.watch.attended(others, fragment=self.fragment)
        return self._straggler_grace.graces()

    @property
    def overtaken(self) -> bool:
        """True if the swarm has completed this round without us: training on the old state is useless."""
        return self.verdict is not None or self.catch_up.behind.is_set()

    @property
    def verdict(self) -> Commit | None:
        """Commit of the round in progress while the replica does not have it yet."""
        return self.current.agreement.commit if self.current.round > self.replica.round else None

    @property
    def ready(self) -> Collection[PeerId]:
        """Peers that hold the state and take part in the round in progress."""
        return self.current.agreement.ready

    def waiting_for(self) -> Collection[PeerId]:
        """Return the peers that the round in progress waits for."""
        return self.current.agreement.waiting_for()

    def stalled(self) -> str:
        """Return why no round can commit, for whom this peer waits, and until when; empty if a quorum is here."""
        since, until = self.own_lineage.since, self.own_lineage.until
        if since is None:
            return ""
        absent = ", ".join(map(short, self.current.agreement.absent)) or "the results of the round"
        told = f"no quorum for {self._now() - since:.0f} s: waiting for {absent}"
        if until is None:
            return f"{told}; `thinwire recover` continues without them"
        return f"{told}; a lineage continues in {max(0.0, until - self._now()):.0f} s"

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return size and limit of each buffer, by name."""
        return {"stash": (len(self._stash), STASH), "early": self.current.exchange.early}

    @property
    def history(self) -> RoundHistory:
        """Past rounds that other peers may still need."""
        return self._history

    async def pause(self) -> None:
        """Wait for one patience before a retry; less if no peer was here and one appears."""
        alone, until = not self.live, self._now() + self.patience
        while self._now() < until and not (alone and self.live):
            await asyncio.sleep(TICK)

    def again(self) -> None:
        """Continue the round in progress, which was given up for a swarm ahead of us that does not exist."""
        if self.current.agreement.commit is None:
            self.current.resume()

    def report(self, name: str, detail: str) -> None:
        """Emit an event about this peer."""
        self._emit(name, {"peer": self.me.hex(), "detail": detail})

    def fail(self, error: Exception) -> None:
        """Report an error that no caller would notice soon."""
        self._send_queue.fail(error)

    async def change(self, work: Work, how: Callable[[], Result], *, settled: bool = True) -> Result:
        """Run `how`, which changes the replica, in `work`. The state is not offered until `advance`.

        Then the digest is computed there too; with `settled` False the caller computes it before `advance`.
        """

        def change() -> Result:
            result = how()
            if settled:
                self.replica.compute_digest()
            return result

        return await self.states.change(work, change)

    def advance(self) -> None:
        """Begin the next round after a change of the state; the same again if the last one's was fetched."""
        done, attempt = self.current, self._life
        committed = self.replica.round == done.round and done.complete
        if committed:
            self._history.add(done)
        else:
            self._history.clear()
        self._ahead &= self.replica.round == 0
        if self.replica.round + 1 == done.round and self.states.entered:
            attempt = done.attempt  # Our next announcement in this round is a later one.
        self._give_up()
        self.current = self._next_round(attempt)
        self._send_queue.begin(self.current.round, self.fragment)
        # Peers that are past this round, and those that announced something with our state before it began again here.
        said, base = set[PeerId](), self.current.agreement.terms.base
        if done.round == self.current.round:
            said = {peer for peer, ready in done.agreement.ready.items() if ready.base == base} - {self.me}
        for peer in sorted(said.union(self.catch_up.begin())):
            self._send_queue.control(peer, Ask(self.current.round, self.fragment))
        for peer, frame in self._stash.take(lambda frame: fragment_of(frame.message) == self.fragment):
            self.on_frame(peer, frame)
        self.advanced()
        self.states.resume()
        self.own_lineage.advance()
        self.lineages.advance()
        # The others should know that we have no vote, although we are a member.
        mute = not self.current.agreement.witness
        if self.me not in self.replica.members or mute or self.replica.asynchronous:
            self.take_part()

    def advanced(self) -> None:
        """Announce our progress to the other peers."""
        self.roster.progress = self.replica.round

    def _give_up(self) -> None:
        """Report lost owner residuals: other peers own their chunks, or the state was replaced."""
        kept = self._round_factory.kept
        if kept.lost[0]:
            chunks, square = kept.lost
            kept.lost = 0, 0.0
            self.report("given up", f"residuals of {chunks} chunks, norm {square**0.5:.3g}")

    def leave(self) -> None:
        """Say farewell in the round in progress: the others need not count on our vote."""
        self.current.agreement.leave()
        self.current.pump()

    def take_part(self) -> None:
        """Become a member of the next round without a contribution (unless one follows in time)."""
        self.current.announce((), weight=0, loss=0.0, speed=0.0)

    def _next_round(self, attempt: int) -> Round:
        exchange = self.manifest.exchange
        terms = RoundTerms(
            self.replica.round + 1,
            self.fragment,
            self.replica.members,
            self.replica.digest,
            self._plan,
            fraction=exchange.quorum,
            min_peers=exchange.min_peers,
            max_weight=self.manifest.max_weight,
            room=room(self.grid) if exchange.collective == "all-gather" else MAX_GROUP,
            grace=self.grace,
            limit=self.grace,
            graces=self._graces_of(self.replica.round + 1),
            buffered=self.replica.asynchronous,
            lives=self.replica.known_lives,
            lineage=self.replica.lineage,
        )
        terms = self.replica.terms(terms)
        self._ahead |= check_votes(self.replica, self.votes, self.me)
        return self._round_factory.begin(
            terms,
            self.grid,
            store=self.votes,
            attempt=attempt,
            turn=self.replica.phase,
        )

    def _founded(self, fork: Fork) -> None:
        """Continue in a lineage that was founded with our state; the training since its round remains."""
        self.replica.found(fork)
        self.current.abandon()
        self.advance()

    def _phase(self, round: int, name: str) -> None:
        self._emit("phase", {"round": round, "phase": name})
        if name == "commit":
            self._on_commit()

    def _key_of(self, peer: PeerId) -> bytes | None:
        record = self.roster.record_of(peer)
        return record.public_key if record else None

    # --- frame handler

    def on_link_up(self, peer: PeerId) -> None:
        self.catch_up.on_link_up(peer)
        self.lineages.on_link_up(peer)
        self.current.reach(peer)

    def on_link_down(self, peer: PeerId, *, gone: bool) -> None:
        self.states.on_link_down(peer)
        self._history.done(peer)
        self.catch_up.on_link_down(peer, gone=gone)
        self.stats.pop(peer, None)
        self.lineages.on_link_down(peer)
        self._straggler_grace.on_link_down(peer)
        self.current.on_link_down(peer)
        self._history.on_link_down(peer)

    def on_frame(self, peer: PeerId, frame: Frame) -> None:
        message = frame.message
        self._send_queue.look()
        if isinstance(message, STATE):
            self.states.on_frame(peer, frame)
        elif isinstance(message, Behind):
            self.catch_up.claimed(peer, message.round)
            if message.round >= self.current.round:
                self.current.agreement.past.add(peer)
                self.current.spent(peer)
            self.catch_up.look()
        elif isinstance(message, Head):
            self.lineages.on_head(peer, message, frame.payload)
            self.catch_up.look()
        elif isinstance(message, Found):
            self.own_lineage.on_found(peer, message, frame.signature)
        else:
            self._route_round(peer, frame)

    def on_tick(self) -> None:
        """Let time pass in the round in progress, and in finished rounds that other peers need."""
        self._send_queue.look()
        self.current.tick()
        self._history.pump()
        self._history.prune(self.current, self.live, read=self.states.read)
        self.states.on_tick()
        self.catch_up.look()
        if not self.states.held:
            self.lineages.on_tick()
            self.own_lineage.on_tick()

    def _route_round(self, peer: PeerId, frame: Frame) -> None:
        message, current, number = frame.message, self.current.round, round_of(frame.message)
        if isinstance(message, Ready) and message.weight:
            self.stats[peer] = (message.loss, message.speed, number)
        if isinstance(message, Ready):
            self.states.done(peer, number)
        if isinstance(message, Prepare) and not self.replica.members:
            self._send_queue.control(peer, Decline(number, self.fragment, "no state yet"))
        if number == current:
            if isinstance(message, Ready):
                self._straggler_grace.came(peer, number, self._now(), contributes=message.weight > 0)
            self.current.on_frame(peer, frame)
            if isinstance(message, Commit):
                # Not every commit can be verified later: peers that had departed then may be here now.
                self.catch_up.claimed(peer, number)
                self.current.agreement.past.add(peer)
            if isinstance(message, Ready):
                self._history.done(peer)
                self._history.prune(self.current, self.live, read=self.states.read)
        elif number < current:
            self._route_past(peer, frame, number)
        else:
            if number == current + 1 and not memoryview(frame.payload).nbytes:
                self._stash.put(peer, frame)
            self.strays += number > current + 1
            if isinstance(message, Ready):
                self.current.agreement.past.add(peer)
            if frame.signature and self.current.agreement.commit is None:
                self.catch_up.seen(peer, number)

    def _route_past(self, peer: PeerId, frame: Frame, number: int) -> None:
        past = self._history.get(number)
        if past is not None:
            past.on_frame(peer, frame)
            if isinstance(frame.message, (Ready, Ask, Fetch)):
                self._history.follow(peer)
        else:
            self.strays += 1
            verdict = self._history.verdict(number, peer)
            if verdict is not None and isinstance(frame.message, (Ready, Ask, Prepare)):
                self._send_queue.control(peer, verdict)
            if frame.signature:
                self._send_queue.control(peer, Behind(self.replica.round, self.fragment))

    async def continue_alone(self, work: Work, change: Callable[[], None] = lambda: None) -> None:
        """Found a lineage alone, as no other peer has the state. `change` makes the state first, in `work`."""

        def alone() -> Fork | None:
            change()
            place = self.replica, self.fragment, self.votes
            return continue_alone(*place, self.identity, self.run_id, ahead=self._ahead)

        if (fork := await self.change(work, alone)) is not None:
            report(fork, self._emit)
        self.catch_up.brought_back()
