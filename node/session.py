"""One peer in its swarm: transport, roster and the round in progress, put together.

Everything here runs on the event loop and belongs to the loop's thread. The session knows no model: it averages encoded
chunks for `Rounds`, serves the replica's state to joiners and fetches it when this peer is the one that is behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import blake3
import msgspec
from thinwire.collectives.aggregate import RULES
from thinwire.collectives.agreement import Agreement, Terms
from thinwire.collectives.butterfly import Butterfly
from thinwire.collectives.outbox import Outbox
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.shards import Grid
from thinwire.collectives.statesync import fetch_state
from thinwire.collectives.transport import Arrival, Transport
from thinwire.compression.codec import Buffer, Codec
from thinwire.node.outer import Replica
from thinwire.swarm.frame import Frame, sign_message, verify_message
from thinwire.swarm.identity import Identity, short
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import (
    CHUNK_BYTES,
    Ack,
    Ask,
    Behind,
    Commit,
    Digest,
    Gossip,
    Message,
    Nack,
    PeerId,
    Ping,
    PingRequest,
    PushPull,
    Ready,
    StateAsk,
    StateChunk,
    StateFetch,
    StateOffer,
)
from thinwire.swarm.rendezvous import leader_order
from thinwire.swarm.roster import Roster

MEMBERSHIP = (Ping, PingRequest, Ack, Nack, Gossip, PushPull)
TICK = 0.1
"""Seconds between looks at the clock; well below every patience."""

MAX_PATIENCE = 120.0
"""Most seconds without progress before somebody acts, however slow rounds have been."""

STASH = 1024
"""Control frames kept for the round after the one in progress."""

SNAPSHOT_SECONDS = 60.0
"""How long a copy of the state is kept for joiners after the last chunk was asked for."""


Emit = Callable[[str, Mapping[str, object]], None]
"""Writes one event: its name and its fields."""


@dataclass(slots=True)
class _Snapshot:
    round: int
    members: tuple[PeerId, ...]
    digest: Digest
    hashes: tuple[Digest, ...]
    raw: memoryview
    used: float


class Session:
    """See the module. Start `run` as a task; `advance` after the replica has applied a commit.

    `probation`: rounds without a vote, for a process that restarted and may have voted in the round in progress.
    `patience`: seconds without progress before somebody acts; adapts to what rounds take.
    """

    def __init__(
        self,
        identity: Identity,
        manifest: Manifest,
        run_id: Digest,
        *,
        transport: Transport,
        roster: Roster,
        replica: Replica,
        codec: Codec,
        grid: Grid,
        now: Callable[[], float],
        emit: Emit,
        probation: int = 0,
        patience: float = 2.0,
    ) -> None:
        self.identity, self.manifest, self.run_id = identity, manifest, run_id
        self.me = identity.peer_id
        self.transport, self.roster, self.replica, self.codec, self.grid = transport, roster, replica, codec, grid
        self.patience, self._floor = patience, patience
        self.behind = asyncio.Event()
        """Set when the swarm is so far ahead that the state must be fetched."""
        self.duplicate = asyncio.Event()
        """Set when another process uses our key and its record is newer: we should stop."""
        self.live: set[PeerId] = set()
        self.stats: dict[PeerId, tuple[float, float, int]] = {}
        """Latest (loss, tokens/s, round) that each peer announced."""
        self.on_commit: Callable[[], None] = lambda: None
        """Called when a round commits, before it is applied: training on the old state may stop."""
        self._now, self._emit, self._probation = now, emit, probation
        self._shown = roster.record
        self._outbox = Outbox(transport, lambda peer: self._lose(peer, gone=False))
        self._gone: dict[PeerId, int] = {}
        self._usual: dict[int, float] = {}
        self._stash: list[tuple[PeerId, Frame]] = []
        self._state_mail: asyncio.Queue[tuple[PeerId, Frame]] | None = None
        self._snapshot: _Snapshot | None = None
        self._asked_state: set[PeerId] = set()
        self._applying = False
        self._past: Butterfly | None = None
        self._plan = blake3.blake3(
            msgspec.msgpack.encode([replica.layout, codec.spec, grid.total, grid.chunk, manifest.exchange.aggregation])
        ).digest()
        self.current = self._next_round()

    # --- rounds

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
        """Average our encoded pseudo-gradient with whoever takes part in the round in progress.

        Returns an Outcome without commit when the round did not commit within `give_up` seconds, when this peer is
        behind, or when its state differs from the majority's.
        """
        self.current.announce(source, weight=weight, loss=loss, speed=speed, hashes=hashes)
        return await self.outcome(give_up=give_up)

    async def outcome(self, *, give_up: float | None = None) -> Outcome:
        """How the round in progress ends, see `average`."""
        began, fly = self._now(), self.current
        behind = asyncio.create_task(self.behind.wait())
        wait = asyncio.create_task(fly.wait())
        try:
            await asyncio.wait((wait, behind), timeout=give_up, return_when=asyncio.FIRST_COMPLETED)
            outcome = wait.result() if wait.done() else Outcome()
        finally:
            wait.cancel()
            behind.cancel()
        if outcome.commit is not None and fly.opened_at is not None:
            took = self._now() - max(began, fly.opened_at)
            self.patience = max(self._floor, min(MAX_PATIENCE, 0.7 * self.patience + 0.3 * 3.0 * took))
        return outcome

    async def pause(self) -> None:
        """Wait a patience, before something is tried again."""
        await asyncio.sleep(self.patience)

    def again(self) -> None:
        """Begin the round in progress anew: it had been given up for a swarm that is ahead, and there is none."""
        old = self.current.agreement
        if old.commit is None:
            self._probation = max(self._probation, int(old.opened is not None))
            self.current = self._next_round()

    def report(self, name: str, detail: str) -> None:
        """An event about this peer."""
        self._emit(name, {"peer": self.me.hex(), "detail": detail})

    def applying(self) -> None:
        """The replica is about to change in another thread: hold back offers of its state until `advance`."""
        self._applying = True

    def advance(self) -> None:
        """The replica has a new state: begin the next round."""
        self._applying = False
        done = self.current
        if self.replica.round == done.round:
            lost = done.lost_after_open
            self._past = done
            self._probation = max(0, self._probation - 1)
        else:
            lost, self._past = set[PeerId](), None
        self._gone = {peer: number for peer, number in self._gone.items() if peer in lost and number == done.round}
        self.behind.clear()
        self.current = self._next_round()
        stash, self._stash = self._stash, []
        for peer, frame in stash:
            self._route(peer, frame)
        for peer in sorted(self._asked_state):
            self._offer(peer)
        self._asked_state.clear()
        if self.me not in self.replica.members:
            self.take_part()

    def take_part(self) -> None:
        """Become a member of the next round without contributing to it (unless a contribution follows in time)."""
        self.current.announce((), weight=0, loss=0.0, speed=0.0)

    def _next_round(self) -> Butterfly:
        number, exchange = self.replica.round + 1, self.manifest.exchange
        seed = blake3.blake3(self.run_id + number.to_bytes(8, "big")).digest()
        terms = Terms(
            number,
            0,
            leader_order(seed, self.replica.members, number, 0),
            self.replica.digest,
            self._plan,
            fraction=exchange.quorum,
            min_peers=exchange.min_peers,
            max_weight=self.manifest.max_weight,
            grace=exchange.grace,
            patience=self.patience,
        )
        agreement = Agreement(
            self.me,
            terms,
            sign=lambda message: sign_message(message, b"", self.identity, self.run_id),
            verify=self._verify,
            live=self.live,
            gone=self._gone,
            witness=self._probation == 0,
        )
        return Butterfly(
            agreement,
            codec=self.codec,
            grid=self.grid,
            rule=RULES[exchange.aggregation],
            seed=seed,
            outbox=self._outbox,
            now=self._now,
            usual=self._usual,
            phase=self._phase,
        )

    def _phase(self, round: int, name: str) -> None:
        self._emit("phase", {"round": round, "phase": name})
        if name == "commit":
            self.on_commit()

    def _verify(self, peer: PeerId, message: Message, signature: bytes) -> bool:
        if peer == self.me:
            key: bytes | None = self.identity.public_key
        else:
            record = self.roster.record_of(peer)
            key = record.public_key if record else None
        return key is not None and verify_message(message, signature, key, self.run_id)

    # --- the loop

    async def run(self) -> None:
        """Receive and keep time until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive())
            group.create_task(self._keep_time())

    async def _receive(self) -> None:
        while True:
            arrival = await self.transport.recv()
            self._arrived(arrival)

    def _arrived(self, arrival: Arrival) -> None:
        peer = arrival.peer
        if arrival.frame is None:
            if peer in self.live:
                self._emit("lost", {"peer": peer.hex(), "reason": arrival.reason})
            self._lose(peer, gone=arrival.gone)
            self._send(self.roster.lost(peer, self._now()))
            return
        self._reach(peer)
        if isinstance(arrival.frame.message, MEMBERSHIP):
            self._send(self.roster.handle(peer, arrival.frame.message, self._now()))
            self._follow_roster()
        else:
            self._route(peer, arrival.frame)

    def _lose(self, peer: PeerId, *, gone: bool) -> None:
        if peer not in self.live and not gone:
            return
        self.live.discard(peer)
        self._outbox.drop(peer)
        if gone:
            self._gone[peer] = self.current.round
        self.current.lost(peer, gone=gone)

    def _reach(self, peer: PeerId) -> None:
        if peer not in self.live and peer != self.me:
            self.live.add(peer)
            self.current.reach(peer)

    def _route(self, peer: PeerId, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, StateAsk):
            self._offer(peer)
        elif isinstance(message, StateFetch):
            self._serve_state(peer, message)
        elif isinstance(message, StateOffer | StateChunk):
            if self._state_mail is not None:
                self._state_mail.put_nowait((peer, frame))
        elif isinstance(message, Behind):
            if message.round > self.replica.round:
                self._overtaken()
        else:
            self._route_round(peer, frame)

    def _route_round(self, peer: PeerId, frame: Frame) -> None:
        message, current = frame.message, self.current.round
        number = message.opened.round if isinstance(message, Commit) else getattr(message, "round", 0)
        if isinstance(message, Ready) and message.weight:
            self.stats[peer] = (message.loss, message.speed, number)
        if number == current:
            self.current.hear(peer, frame)
        elif number == current - 1 and self._past is not None:
            self._past.hear(peer, frame)
        elif number < current:
            if frame.signature and not isinstance(message, Behind):
                self._outbox.control(peer, Behind(self.replica.round))
        elif number == current + 1:
            if len(self._stash) < STASH and not memoryview(frame.payload).nbytes:
                self._stash.append((peer, frame))
            if self.current.agreement.commit is None:
                self._outbox.control(peer, Ask(current, 0))
        else:
            self._overtaken()

    def _overtaken(self) -> None:
        self.behind.set()
        if self.current.agreement.commit is None:
            self.current.agreement.overtaken()
            self.current.pump()

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            now = self._now()
            self.roster.progress = self.replica.round
            self._send(self.roster.tick(now))
            self._follow_roster()
            self.current.tick()
            if self._past is not None:
                self._past.pump()
            if self._snapshot is not None and now > self._snapshot.used + SNAPSHOT_SECONDS:
                self._snapshot = None

    def _send(self, messages: Sequence[tuple[PeerId, Message]]) -> None:
        for peer, message in messages:
            self._outbox.control(peer, message)

    def _follow_roster(self) -> None:
        """Tell the transport and the round what the roster has learned."""
        events = list(self.roster.events)
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

    # --- state

    async def catch_up(self) -> bool:
        """Fetch the state of the last committed round from those who have it; True when the replica has it now.

        When somebody said that we are behind, only a later round will do.
        """
        self._state_mail = asyncio.Queue()
        peers = sorted(self.live)
        oldest = self.replica.round + self.behind.is_set()
        self.behind.clear()
        try:
            fetched = await fetch_state(
                peers,
                lambda peer, message: self._outbox.control(peer, message),
                self._state_mail,
                layout=self.replica.layout,
                have=self.replica.hashes,
                nbytes=self.replica.state.nbytes,
                patience=self.patience,
                newer_than=oldest - 1,
            )
        finally:
            self._state_mail = None
        if fetched is None:
            return False
        changed = self.replica.install(fetched)
        self._emit(
            "synced",
            {
                "round": fetched.offer.round,
                "bytes": changed,
                "sources": [short(peer) for peer in fetched.sources],
                "digest": fetched.offer.digest.hex(),
            },
        )
        return True

    def _offer(self, peer: PeerId) -> None:
        if self._applying:
            self._asked_state.add(peer)
            return
        replica = self.replica
        snapshot = self._snapshot
        if snapshot is None or snapshot.round != replica.round or snapshot.digest != replica.digest:
            raw = memoryview(bytearray(replica.state.tobytes()))
            hashes = tuple(replica.hashes)
            snapshot = _Snapshot(replica.round, replica.members, replica.digest, hashes, raw, self._now())
            self._snapshot = snapshot
        snapshot.used = self._now()
        offer = StateOffer(snapshot.round, snapshot.digest, replica.layout, snapshot.raw.nbytes, snapshot.members)
        self._outbox.bulk(peer, Frame(offer, b"".join(snapshot.hashes)), later=True)

    def _serve_state(self, peer: PeerId, message: StateFetch) -> None:
        snapshot, payload = self._snapshot, memoryview(b"")
        if snapshot is not None and snapshot.round == message.round and message.index < len(snapshot.hashes):
            payload = snapshot.raw[message.index * CHUNK_BYTES : (message.index + 1) * CHUNK_BYTES]
            snapshot.used = self._now()
        self._outbox.bulk(peer, Frame(StateChunk(message.round, message.index), payload), later=True)

    # --- the end

    async def leave(self) -> None:
        """Say goodbye to everyone."""
        self._send(self.roster.leave(self._now()))
        await asyncio.sleep(0)

    async def close(self) -> None:
        """Stop sending and close the transport."""
        await self._outbox.close()
        await self.transport.close()
