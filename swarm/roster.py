"""Who is alive: SWIM with Lifeguard over signed records, without a socket or a clock.

The caller hands in messages and time, and sends what it gets back: `(message, now) -> messages`. Every method that takes
`now` wants monotonic seconds; `wall` gives unix seconds, for records alone.

A caller drains its sockets before it calls `tick`. When `tick` comes late all the same, the time lost is not held against
anybody: timers that wait for others are moved on by it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from . import rumor
from .broadcast import MAX_ITEMS, Broadcast
from .distances import Distances
from .identity import Identity
from .intake import Intake
from .member import Event, Member, State
from .members import Members
from .preset import Preset
from .probe import Letters, Prober, Rotation
from .protocol import Ack, Gossip, Message, Nack, PeerId, Ping, PingRequest, PushPull
from .record import PeerRecord
from .rumor import Departure
from .suspicion import Awareness
from .view import View

PAGE_BYTES = 50_000
PAGE_ITEMS = 32
FAREWELLS = 64
"""Peers that are told of our departure directly."""


class Roster:
    """The membership of one run, as this peer knows it.

    `record`: our first record; its sequence must be above those of earlier lives (unix milliseconds will do). `progress`:
    set it to our round, others see it. `events`: what happened since the caller last emptied the list.
    """

    def __init__(
        self,
        identity: Identity,
        record: PeerRecord,
        *,
        run_id: bytes,
        preset: Preset,
        rng: random.Random,
        now: float,
        wall: Callable[[], int],
    ) -> None:
        if record.peer_id != identity.peer_id or record.run_id != run_id:
            raise ValueError("the record is not ours, or of another run")
        self.awareness = Awareness(preset.awareness_max)
        self._identity, self.preset, self._rng = identity, preset, rng
        self._news = Broadcast()
        self._members = Members(identity, record, preset, self._news, self.awareness, wall)
        self._intake = Intake(self._members, run_id, wall, now)
        self.distances = Distances()
        """How far others are."""
        self._prober = Prober(preset, rng, self.awareness, self._helpers, self._items, self.distances.add)
        self._rotation = Rotation(rng)
        self._gone = False
        self._answered: dict[PeerId, float] = {}
        self._probe_at = now + rng.random() * preset.probe_period
        self._gossip_at = now
        self._push_pull_at = now + rng.random() * preset.push_pull_period
        self._reconnect_at = now + preset.reconnect_period
        self._refresh_at = now + record.ttl / 2

    # --- what is known

    @property
    def view(self) -> View:
        """The current View; a new one, with the next number, when somebody joined, died or left."""
        return self._members.view()

    @property
    def others(self) -> list[PeerId]:
        """Who is in the view but ourselves, sorted."""
        return self._members.live()

    @property
    def banned(self) -> list[PeerId]:
        """Who has signed two records with one sequence."""
        return list(self._members.banned)

    @property
    def record(self) -> PeerRecord:
        """Our own current record."""
        return self._members.own.record

    @property
    def events(self) -> list[Event]:
        return self._members.events

    @property
    def progress(self) -> int:
        return self._prober.progress

    @progress.setter
    def progress(self, value: int) -> None:
        self._prober.progress = value

    def alive(self, peer: PeerId) -> bool:
        """Whether a peer is in the view."""
        return peer == self._members.me or (peer in self._members.table and self._members.table[peer].live)

    def record_of(self, peer: PeerId) -> PeerRecord | None:
        """The newest record of a peer, alive or not."""
        if peer == self._members.me:
            return self.record
        return self._members.table[peer].record if peer in self._members.table else None

    def states(self) -> dict[PeerId, State]:
        """Every other peer that we know of, in order of id."""
        return {peer: self._members.table[peer].state for peer in sorted(self._members.table)}

    def progress_of(self, peer: PeerId) -> int:
        """The round that a peer last said it is in; 0 when it has not."""
        return self._members.table[peer].progress if peer in self._members.table else 0

    # --- what happens

    def learn(self, record: PeerRecord, now: float) -> None:
        """Take in a checked record from a Welcome or Hello."""
        alone = self._members.alone
        if self._members.accept(record, now):
            self._rotation.insert(record.peer_id)
        if alone and not self._members.alone:
            self._push_pull_at = now

    def update(self, addresses: tuple[str, ...], now: float) -> None:
        """Publish a new record of ours with these addresses."""
        self._members.update(now, addresses)

    def announce(self, capabilities: int, now: float) -> None:
        """Publish a new record of ours that says this of what we hold."""
        self._members.update(now, capabilities=capabilities)

    def lost(self, peer: PeerId, now: float) -> Letters:
        """A link broke: look at once whether the peer is alive. Never a death by itself."""
        return self._prober.start(peer, now) if self.alive(peer) and not self._gone else []

    def leave(self, now: float) -> Letters:
        """Say goodbye. After this the roster is silent."""
        departure = Departure(self._members.me, self.record.sequence)
        item = rumor.sign(departure, self._identity, self.record.run_id)
        others = self._members.live()
        self._gone = True
        return [(peer, Gossip((item,))) for peer in self._rng.sample(others, min(FAREWELLS, len(others)))]

    @property
    def left(self) -> bool:
        """Whether we have said goodbye."""
        return self._gone

    def handle(self, sender: PeerId, message: Message, now: float) -> Letters:
        """Take in a message whose signature is checked. Returns messages to send. Raises TypeError for other types."""
        if self._gone:
            return []
        member = self._members.table.get(sender)
        match message:
            case Ping():
                self._ingest(sender, message.items, now)
                if member is not None:
                    member.progress = message.progress
                return [(sender, Ack(message.sequence, self.progress, self._items(sender)))]
            case PingRequest():
                self._ingest(sender, message.items, now)
                if message.target == self._members.me:
                    return [(sender, Ack(message.sequence, self.progress, self._items(sender)))]
                if message.target not in self._members.table:
                    return [(sender, Nack(message.sequence))]
                return self._prober.ask(sender, message, now)
            case Ack():
                self._ingest(sender, message.items, now)
                reached, letters = self._prober.acknowledge(sender, message, now)
                if reached is not None:
                    self._members.reached(reached, now)
                    if reached in self._members.table:
                        self._members.table[reached].progress = message.progress
                return letters
            case Nack():
                self._prober.refuse(sender, message)
            case Gossip():
                self._ingest(sender, message.items, now)
            case PushPull():
                self._ingest(sender, message.items, now)
                last = self._answered.get(sender, -math.inf)
                if not message.reply and now - last >= self.preset.probe_period:
                    self._answered[sender] = now
                    return [(sender, PushPull(True, page)) for page in self._pages(now)]
            case _:
                raise TypeError(f"{type(message).__name__} is no message of the roster")
        return []

    def next_deadline(self) -> float:
        """When `tick` wants to be called next, in the seconds of `now`."""
        if self._gone:
            return math.inf
        times = [self._probe_at, self._prober.deadline(), self._members.deadline()]
        times += [self._gossip_at, self._push_pull_at, self._reconnect_at, self._refresh_at]
        return min(times)

    def tick(self, now: float) -> Letters:
        """Do what is due. Returns messages to send."""
        if self._gone:
            return []
        lag = now - self._gossip_at  # the shortest of our periods
        if lag > self.preset.lag_limit:
            self.awareness.add(1)
            self._prober.shift(lag)
            self._members.shift(lag)
        if now >= self._refresh_at:
            self._members.update(now)
            self._refresh_at = now + self.record.ttl / 2
        self._members.publish(now)
        letters, failed = self._prober.tick(now)
        for peer in failed:
            self._members.failed(peer, now)
        for peer in self._members.expire(now):
            letters += self._prober.start(peer, now)
        if now >= self._probe_at:
            target = self._rotation.next(self._members.live())
            if target is not None:
                letters += self._prober.start(target, now)
            self._probe_at = now + self._prober.period()
        if now >= self._push_pull_at:
            letters += self._push_pull(now)
        if now >= self._reconnect_at:
            letters += self._reconnect(now)
        if now >= self._gossip_at:
            letters += self._gossip(now)
        return letters

    # --- timers

    def _sample(self, pool: list[PeerId], count: int) -> list[PeerId]:
        return self._rng.sample(pool, min(count, len(pool)))

    def _dead(self) -> Iterator[tuple[PeerId, Member]]:
        return ((peer, member) for peer, member in self._members.table.items() if member.state == "dead")

    def _gossip(self, now: float) -> Letters:
        self._gossip_at = now + self.preset.gossip_period
        pool, table = self._members.live(), self._members.table
        if len(pool) < len(table):
            pool += [peer for peer, member in self._dead() if now - member.since < self.preset.gossip_to_dead]
        letters: Letters = []
        for peer in self._sample(pool, self.preset.gossip_fanout):
            if not self._news and not table[peer].note and peer not in self._members.behind:
                continue
            items = self._items(peer)
            if items:
                letters.append((peer, Gossip(items)))
        return letters

    def _push_pull(self, now: float) -> Letters:
        self._push_pull_at = now + self.preset.push_pull(self._members.size)
        self._answered.clear()
        self._intake.forget()
        for peer in self._members.purge(now):
            self._prober.forget(peer)
            self.distances.forget(peer)
        partner = self._sample(self._members.live(), 1)
        return [(peer, PushPull(False, page)) for peer in partner for page in self._pages(now)]

    def _reconnect(self, now: float) -> Letters:
        """Two halves of a split swarm would never find each other again without this."""
        self._reconnect_at = now + self.preset.reconnect_period
        dead = self._sample([peer for peer, _ in self._dead()], 1)
        return [letter for peer in dead for letter in self._prober.start(peer, now)]

    # --- items

    def _ingest(self, sender: PeerId, items: tuple[bytes, ...], now: float) -> None:
        for peer in self._intake.take(sender, items, now):
            self._rotation.insert(peer)

    def _helpers(self, target: PeerId) -> list[PeerId]:
        return [peer for peer in self._members.live() if peer != target]

    def _items(self, to: PeerId) -> tuple[bytes, ...]:
        """What to piggyback on a message. One who is doubted is told so first, so that it can answer."""
        first: list[bytes] = []
        member = self._members.table.get(to)
        if member is not None and member.note and member.state != "banned":
            first += [member.note] if member.live else [member.note, rumor.announce(member.record)]
        if to in self._members.behind:
            del self._members.behind[to]
            first.insert(0, rumor.announce(self.record))
        rest = self.preset.piggyback
        while sum(map(len, first)) > rest:
            first.pop()
        rest -= sum(map(len, first))
        times = self.preset.retransmissions(self._members.size)
        return (*first, *self._news.take(rest, MAX_ITEMS - len(first), times))

    def _pages(self, now: float) -> Iterator[tuple[bytes, ...]]:
        """The whole table, in items that fit in one PushPull each."""
        page: list[bytes] = []
        size = 0
        for item in self._table_items(now):
            if len(page) == PAGE_ITEMS or size + len(item) > PAGE_BYTES:
                yield tuple(page)
                page, size = [], 0
            page.append(item)
            size += len(item)
        yield tuple(page)

    def _table_items(self, now: float) -> Iterator[bytes]:
        yield rumor.announce(self.record)
        recent = 2 * self.preset.push_pull(self._members.size) + self.preset.gossip_to_dead
        for member in self._members.table.values():
            if member.live:
                yield rumor.announce(member.record)
            if member.note and (member.live or member.state == "banned" or now - member.since < recent):
                yield member.note
